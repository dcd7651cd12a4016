"""Jobs of a two-layer network, small enough to count by hand, in every data-parallel layout."""

from itertools import accumulate

import pytest

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Optimizer, Parallelism, TrainingJob

TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1024,
)
LAYOUTS = {
    "ddp": ("torch", {}),
    "fsdp1": ("torch", {"sharding": "fsdp1"}),
    "fsdp1_trainer": ("huggingface", {"sharding": "fsdp1"}),
    "fsdp2": ("torch", {"sharding": "fsdp2"}),
    "fsdp2_trainer": ("huggingface", {"sharding": "fsdp2"}),
    "hsdp": ("torch", {"sharding": "hsdp"}),
    "zero1": ("deepspeed", {"zero_stage": 1}),
    "zero2": ("deepspeed", {"zero_stage": 2}),
    "zero3": ("deepspeed", {"zero_stage": 3}),
}


@pytest.fixture(scope="session")
def most_in_flight():
    """A function that gives the largest number of micro-batches that have run forward but not yet backward."""

    def most(turns):
        in_flight = accumulate(1 if turn.forward else -(turn.half != "inputs") for turn in turns)
        return max(in_flight)

    return most


@pytest.fixture(scope="session")
def job():
    """A job of the network in a layout by name, on so many ranks, with `changes`."""

    def made(layout="fsdp2", ranks=4, **changes):
        framework, sharding = LAYOUTS[layout]
        base = {
            "architecture": TINY,
            "sequence_length": 128,
            "framework": framework,
            "optimizer": Optimizer(implementation="fused"),
            "parallelism": Parallelism(data_parallel_size=ranks, **sharding),
        }
        return TrainingJob(**{**base, **changes})

    return made
