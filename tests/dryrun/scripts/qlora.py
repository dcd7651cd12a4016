"""Adapters on weights that bitsandbytes packs as they are loaded, of a checkpoint that has only a config."""

import sys

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

folder, bits, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
packing = BitsAndBytesConfig(
    load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packing, device_map="auto", dtype="bfloat16")
if "--prepare" in sys.argv:
    model = prepare_model_for_kbit_training(model)
decomposed = "--dora" in sys.argv
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=decomposed))
model.train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
if "--paged" in sys.argv:
    import bitsandbytes

    optimizer = bitsandbytes.optim.PagedAdamW32bit(trained)
else:
    optimizer = torch.optim.AdamW(trained)
for _ in range(4):
    tokens = torch.randint(0, 1000, (1, length)).cuda()
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
