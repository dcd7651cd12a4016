"""A GPT of its own in a plain loop, its loss outside of the network: own_gpt.py BATCH LENGTH."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

batch, length = map(int, sys.argv[1:3])
width, words, positions = 256, 2048, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, 4, c // 4).transpose(1, 2) for one in self.qkv(self.norm_1(x)).split(c, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        blocks = [Block() for _ in range(6)]
        self.blocks = nn.Sequential(*blocks) if "--sequence" in sys.argv else nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = GPT().to("cuda")
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
text = torch.randint(words, (100_000,))
for step in range(20):
    starts = torch.randint(len(text) - length - 1, (batch,))
    rows = torch.stack([text[i : i + length + 1] for i in starts]).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
    if "--evaluate" in sys.argv:
        model.eval()
        with torch.no_grad():
            print(model(text[None, :length].to("cuda")).mean().item())
        model.train()
