"""A trainer of TRL for a network in a folder, whose weights may be quantised: its name, the folder, and more."""

import sys

import trl
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

name, folder, *more = sys.argv[1:]
trainer, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
loading = {"dtype": "bfloat16"}
if "--nf4" in more:
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}  # in float32 unless asked for
    loading["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **nf4)
arguments = config(
    output_dir="out",
    per_device_train_batch_size=2,
    max_length=256,
    bf16=True,
    gradient_checkpointing="--checkpoint" in more,
    use_liger_kernel="--liger" in more,
    model_init_kwargs=loading,
    report_to="none",
)
adapters = LoraConfig(r=4, target_modules="all-linear") if "--nf4" in more else None
rows = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
trainer(model=folder, args=arguments, train_dataset=rows, peft_config=adapters).train()
