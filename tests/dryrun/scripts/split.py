"""A network that transformers splits over all ranks as it loads it."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

dist.init_process_group("nccl")
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M", tp_plan="auto")
weight = model.model.layers[0].self_attn.q_proj.weight
assert weight.to_local().shape == (576 // dist.get_world_size(), 576), weight
assert weight.device.type == "cuda"
assert model.lm_head.weight is model.model.embed_tokens.weight
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    tokens = torch.randint(1000, (2, 128)).cuda()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
