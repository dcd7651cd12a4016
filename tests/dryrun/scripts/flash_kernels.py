"""A network that takes flash attention from the hub's kernels or, where they are not there, another way; and launches a
kernel of its own inside a compiled function."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

try:
    from kernels import get_kernel

    flash = get_kernel("someone/flash-attention-3").flash_attn_interface
except ImportError:
    flash = None
WIDTH, HEADS, LENGTH, SEQUENCES = 256, 4, 1024, 4


@triton.jit
def square_kernel(given, out, size, block: tl.constexpr):
    tl.program_id(0)


@torch.compile(dynamic=False, fullgraph=True)
def orthogonal(gradient):
    product = torch.empty((WIDTH, WIDTH), dtype=torch.bfloat16, device=gradient.device)
    square_kernel[(triton.cdiv(WIDTH, 64),)](gradient, product, WIDTH, block=64)
    return product @ gradient.bfloat16()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, tokens, ends):
        q, k, v = self.qkv(tokens).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        if flash is None:
            return F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH}
        return flash.flash_attn_varlen_func(q, k, v, **lengths, causal=True, window_size=(128, 0)).reshape(-1, WIDTH)


model = torch.compile(Attention().cuda().bfloat16(), fullgraph=True)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    ends = torch.arange(0, SEQUENCES * LENGTH + 1, LENGTH, dtype=torch.int32, device="cuda")
    inputs = torch.randn(SEQUENCES * LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    model(inputs, ends).square().mean().backward()
    gradient = model.qkv.weight.grad
    gradient[:WIDTH].copy_(orthogonal(gradient[:WIDTH]))
    optimizer.step()
    optimizer.zero_grad()
