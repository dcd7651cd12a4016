"""Stages of a pipeline, each wider than the one before, whose shapes their ranks tell each other: pipeline.py [chunks]."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
chunks = int(sys.argv[1]) if sys.argv[1:] else 1


def part(number):
    return nn.Sequential(nn.Linear(256 * (number + 1), 1024), nn.GELU(), nn.Linear(1024, 256 * (number + 2))).to(device)


stages = [PipelineStage(part(one), one, chunks * size, device) for one in range(rank, chunks * size, size)]
loss = nn.functional.mse_loss
schedule = Schedule1F1B(stages[0], 8, loss_fn=loss) if chunks == 1 else ScheduleInterleaved1F1B(stages, 8, loss_fn=loss)
optimizer = torch.optim.AdamW([weight for stage in stages for weight in stage.submod.parameters()])
for _ in range(5):
    inputs = torch.randn(64, 256, device=device)
    targets = torch.randn(64, 256 * (chunks * size + 1), device=device)
    first, last = rank == 0, rank == size - 1
    schedule.step(*[inputs] * first, **({"target": targets, "losses": []} if last else {}))
    optimizer.step()
    optimizer.zero_grad()
