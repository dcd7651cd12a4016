"""A plain loop whose layers are split over tensor-parallel ranks, as torch's tutorial does it, with sequences split between
them; the other ranks shard by FSDP2. Arguments: ranks that share a layer, and "whole" or "split" logits."""

import contextlib
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, HIDDEN, INNER, LAYERS, BATCH, LENGTH = 32_000, 1024, 2816, 2, 2, 1024


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.w1, self.w3, self.w2 = (
            nn.RMSNorm(HIDDEN),
            nn.Linear(HIDDEN, INNER, bias=False),
            nn.Linear(HIDDEN, INNER, bias=False),
            nn.Linear(INNER, HIDDEN, bias=False),
        )
        self.whole = nn.Identity()

    def forward(self, x):
        y = self.whole(self.norm(x))
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


size, splits = int(sys.argv[1]), sys.argv[2] == "split"
world = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (world // size, size), mesh_dim_names=("dp", "tp"))
model = Network().to("cuda", torch.bfloat16)
ends = {
    "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1) if splits else Replicate(), use_local_output=not splits
    ),
}
inner = {
    "norm": SequenceParallel(),
    "whole": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "w1": ColwiseParallel(),
    "w3": ColwiseParallel(),
    "w2": RowwiseParallel(output_layouts=Shard(1)),
}
parallelize_module(model, mesh["tp"], ends)
for layer in model.layers:
    parallelize_module(layer, mesh["tp"], inner)
    if world > size:
        fully_shard(layer, mesh=mesh["dp"])
if world > size:
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(5):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
    logits = model(tokens)
    with loss_parallel() if splits else contextlib.nullcontext():
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
