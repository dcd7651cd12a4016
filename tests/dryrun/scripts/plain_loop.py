"""A plain loop: a small Llama of transformers, AdamW, batches of random tokens."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--extra", type=int, default=0, help="bytes of a tensor that no network knows")
arguments = parser.parse_args()

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=arguments.hidden,
    intermediate_size=4 * arguments.hidden,
    num_hidden_layers=arguments.layers,
    num_attention_heads=arguments.hidden // 64,
    num_key_value_heads=arguments.hidden // 64,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
extra = torch.empty(arguments.extra, dtype=torch.uint8, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(100):
    tokens = torch.randint(0, 32000, (arguments.batch, arguments.length)).to(device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
