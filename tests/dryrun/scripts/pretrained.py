"""A checkpoint by its name, in bfloat16, with gradient checkpointing, on batches of one length."""

import sys

import torch
from transformers import AutoModelForCausalLM

name = sys.argv[1] if len(sys.argv) > 1 else "meta-llama/Llama-3.1-8B"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map="cuda", use_cache=False)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for _ in range(10):
    tokens = torch.randint(0, model.config.vocab_size, (1, 4096), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
