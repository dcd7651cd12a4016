"""A decoder written by hand, one training step of it: traced by `--module docs/examples/decoder.py:large` and laid beside
what a GPU recorded of the same step (docs/replay.md). RMSNorm, rotary positions, SwiGLU, attention step by step."""

from __future__ import annotations

import math

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return self.weight * x


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, device="cuda"))

    def forward(self, ids):
        return self.weight[ids, :]


class Rotary(nn.Module):
    def __init__(self, length, width):
        super().__init__()
        self.register_buffer("table", torch.empty(2, length, width // 2, device="cuda"), persistent=False)

    def forward(self, x):
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.table
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.cat((first[..., None], second[..., None]), dim=-1).flatten(-2)


def softmax(x):
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attention(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (Linear(width, width) for _ in range(4))
        self.rotary = rotary

    def forward(self, x):
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.view(split).transpose(1, 2) for each in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        positions = torch.arange(length, device="cuda")
        mask = positions[:, None] >= positions[None, :]
        mixed = attention(query, key, value, mask)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x):
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads, inner, rotary):
        super().__init__()
        self.attention = Attention(width, heads, rotary)
        self.ffn = SwiGLU(width, inner)
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x):
        attended = self.attention(self.ln1(x))
        between = x + attended
        fed = self.ffn(self.ln2(between))
        return between + fed


class Decoder(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads, inner):
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        rotary = Rotary(length, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, rotary) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def training(batch, length, **shape):
    model = Decoder(10_000, length, **shape)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = (torch.zeros(batch, length, dtype=torch.int64, device="cuda") for _ in range(2))

    def step():
        optimizer.zero_grad()
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()

    return model, step


def large():
    return training(4, 512, width=2560, layers=32, heads=32, inner=10_240)


def medium():
    return training(4, 512, width=1024, layers=24, heads=16, inner=4096)
