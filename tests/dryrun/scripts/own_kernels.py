"""A compiled network with a kernel of its own in Triton, which multiplies matrices that descriptors describe."""

import torch
import triton
import triton.language as tl
from torch import nn
from triton.tools.tensor_descriptor import TensorDescriptor

TOKENS, WIDTH, HIDDEN = 8192, 512, 1024


@triton.jit
def product_kernel(a_desc, b_desc, c_desc, depth, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr):
    row, column = tl.program_id(0) * rows, tl.program_id(1) * columns
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for k in range(tl.cdiv(depth, step)):
        total = tl.dot(a_desc.load([row, k * step]), b_desc.load([column, k * step]).T, total)
    c_desc.store([row, column], total.to(tl.bfloat16))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        result = torch.empty((x.shape[0], weight.shape[0]), device=x.device, dtype=x.dtype)
        given = [TensorDescriptor.from_tensor(one, [128, 64]) for one in (x, weight)]
        product_kernel[x.shape[0] // 128, weight.shape[0] // 128](
            *given, TensorDescriptor.from_tensor(result, [128, 128]), x.shape[1], rows=128, columns=128, step=64
        )
        ctx.save_for_backward(x, weight)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16))

    def forward(self, x):
        return Product.apply(x, self.weight).relu().square().float().sum()


network = torch.compile(Network(), fullgraph=True)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for _ in range(4):
    network(torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
