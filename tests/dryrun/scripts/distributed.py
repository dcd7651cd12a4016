"""Plain torch under torchrun: DDP, or FSDP2 with --fsdp, which --keep asks not to reshard after forward. --views: gradients
are views of DDP's buckets; --held: the network's outputs stay."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device(f"cuda:{local_rank}")
dist.init_process_group("nccl")
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)
model = LlamaForCausalLM(config).to(device)
if "--fsdp" in sys.argv:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward="--keep" not in sys.argv)
    fully_shard(model, mesh=mesh, mp_policy=policy)
else:
    model = DistributedDataParallel(model, device_ids=[local_rank], gradient_as_bucket_view="--views" in sys.argv)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(10):
    tokens = torch.randint(0, 32000, (2, 256), device=device)
    outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
    loss = outputs.loss
    if "--held" not in sys.argv:
        del outputs
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}: {loss.item():.3f}")
dist.destroy_process_group()
