"""A GPT in one file, in the manner of nanoGPT: tokens from a memory map, autocast, torch.compile, Muon for matrices."""

import math
import os
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

block_size, batch_size, n_layer, n_embd, vocab_size = 256, 8, 4, 256, 50304
compile_model = "--compile" in sys.argv
use_muon = "--muon" in sys.argv
eval_iters, eval_interval, gradient_accumulation_steps = 10, 1000, 2
device = "cuda"
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
context = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16) if "cuda" in device else nullcontext()

folder = os.environ.get("DATA_DIR", ".")
path = os.path.join(folder, "train.bin")


def get_batch(split):
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (part.view(b, t, 4, c // 4).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz iterations."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                g = p.grad.lerp_(buffer, group["momentum"])
                p.add_(zeropower(g).type_as(p), alpha=-group["lr"])


def zeropower(g):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x.mT if g.size(-2) > g.size(-1) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.size(-2) > g.size(-1) else x


if compile_model:
    zeropower = torch.compile(zeropower)
model = GPT().to(device)
scaler = torch.amp.GradScaler("cuda", enabled=False)
matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("h.")]
others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and n.startswith("h."))]
if use_muon:
    optimizers = [torch.optim.AdamW(others, lr=1e-3, fused=True), Muon(matrices)]
else:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]
if compile_model:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        inputs, targets = get_batch("val")
        with context:
            _, loss = model(inputs, targets)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


inputs, targets = get_batch("train")
t0 = time.time()
for iter_num in range(20):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (0.5 + 0.5 * math.cos(iter_num / 20))
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        torch.save({"model": model.state_dict()}, os.path.join(folder, "ckpt.pt"))
    for _micro_step in range(gradient_accumulation_steps):
        with context:
            logits, loss = model(inputs, targets)
            loss = loss / gradient_accumulation_steps
        inputs, targets = get_batch("train")
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    if loss.isnan():
        raise SystemExit("loss is not a number")
    print(f"iter {iter_num}: loss {loss.item() * 2:.4f}, {time.time() - t0:.1f} s, {torch.cuda.max_memory_allocated()}")
