"""accelerate's ParallelismConfig: the axes into which the ranks of a Hugging Face run are divided, besides data
parallelism.

Source: accelerate 1.15 parallelism_config.py (`total_size`, `fsdp_dim_names`: the weights are divided over shards and over
the ranks that share a sequence, and replicas hold them again), utils/launch.py for the keys of its configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.translation import Notes, Settings, words
from peakcast.jobs.spec import Batch, TrainingJob

MESH_PREFIX = "parallelism_config_"
"""Prefix of the keys in accelerate's configuration file."""
SIZES = {
    "replicate": "dp_replicate_size", "shard": "dp_shard_size", "context": "cp_size", "sequence": "sp_size",
    "tensor": "tp_size",
}  # fmt: skip
IGNORED = words("""
    cp_attn_implementation cp_handler cp_seq_length cp_seq_length_is_variable sp_attn_implementation sp_backend sp_handler
    sp_seq_length sp_seq_length_is_variable tp_handler
""")
AXES = ("replicate", "shard", "context", "sequence", "tensor", "expert")
"""The axes of a layout. As along `replicate`, each rank along `expert` has its own samples and all weights that are not
experts (axolotl integrations/expert_parallel/README.md)."""


def _sizes(ranks: int, settings: Settings, keys: Mapping[str, str], fills: str) -> dict[str, int] | None:
    """Axis -> its size, of a mesh of `ranks`, with the arguments of `meshed`; None if all ranks are data-parallel. Raises:
    SpecError."""
    given = [axis for axis in AXES if axis in keys and settings.given(keys[axis])]
    sizes = {axis: (settings.integer(keys[axis], 1) or 1) if axis in given else 1 for axis in AXES}
    made = prod(sizes.values())
    if made == sizes["shard"] and made in (1, ranks):
        return None
    if fills and fills not in given and ranks % made == 0:
        sizes[fills] = ranks // made
    elif made != ranks:
        largest = max(given, key=lambda axis: sizes[axis])
        product = " × ".join(f"{settings.spell(keys[axis])}={sizes[axis]}" for axis in given)
        raise settings.refuse(
            keys[largest],
            f"is of a layout of {made} ranks ({product}), which {'do not divide' if fills else 'are not'} the {ranks} of "
            f"the run; say --num-gpus {made}",
        )
    return sizes


def meshed(job: TrainingJob, settings: Settings, keys: Mapping[str, str], fills: str = "") -> TrainingJob:
    """`job`, whose ranks are all data-parallel, in the layout that `settings` describe. `keys`: axis -> the key for its
    size. `fills`: the axis that gets all remaining ranks if its size is not given.

    Raises: SpecError if the sizes do not multiply to the ranks of the run.
    """
    sizes = _sizes(job.parallelism.world_size, settings, keys, fills)
    if sizes is None:
        return job
    context = sizes["context"] * sizes["sequence"]
    layout, options = job.parallelism, dict(job.framework_options)
    sharding, group = layout.sharding, sizes["shard"] * context
    if sizes["replicate"] * sizes["expert"] > 1 and sharding == "fsdp2":
        sharding = "hsdp" if group > 1 else "none"
        options |= {"shard_group_size": group} if group > 1 else {}
    elif sizes["replicate"] > 1 and sharding != "none":
        settings.notes.unsupported.append(
            f"Several replicas that are each sharded ({settings.spell(keys['replicate'])}) are not modelled with "
            f"{sharding}; with fsdp2 they are.",
            settings.spell(keys["replicate"]),
        )
    layout = replace(
        layout,
        sharding=sharding,
        data_parallel_size=sizes["replicate"] * sizes["shard"] * sizes["expert"],
        context_parallel_size=context,
        tensor_parallel_size=sizes["tensor"],
        expert_parallel_size=sizes["expert"],
    )
    batch = job.batch if context == 1 else Batch()
    return job.replace(parallelism=layout, batch=batch, framework_options=FrozenMapping(options))


def ranks_of(settings: Settings, keys: Mapping[str, str]) -> int | None:
    """The number of ranks to which the sizes of all axes multiply; None if the size of the shard axis is not given: it then
    gets all remaining ranks. `keys` as for `meshed`."""
    if not settings.integer(keys["shard"]):
        return None
    return prod(settings.integer(key, 1) or 1 for key in keys.values())


def of_training(job: TrainingJob, mesh: Mapping[str, object], notes: Notes) -> TrainingJob:
    """`job` with the axes in `parallelism_config` of TrainingArguments or of accelerate's file. Raises: SpecError."""
    written = {str(key).removeprefix(MESH_PREFIX): str(key) for key in mesh}
    values = {key: mesh[name] for key, name in written.items()}
    settings = Settings(values, notes, "accelerate", lambda key: written.get(key, MESH_PREFIX + key))
    job = meshed(job, settings, SIZES)
    ulysses = settings.integer("sp_size", 1) != 1 or settings.text("cp_backend") == "deepspeed"
    if ulysses and job.parallelism.context_parallel_size > 1:
        notes.unsupported.append(
            "Ulysses sequence parallelism (sp_size, or cp_backend: deepspeed) is not modelled; ranks that share a sequence "
            "are treated as a ring.",
            "sp_size",
        )
    if settings.text("cp_comm_strategy", "allgather") == "alltoall" and job.parallelism.context_parallel_size > 1:
        options = FrozenMapping({**job.framework_options, "context_parallel_rotation": "alltoall"})
        job = job.replace(framework_options=options)
    settings.note_left(IGNORED)
    return job


def with_shared_sequences(job: TrainingJob, settings: Settings, *keys: str) -> TrainingJob:
    """`job` with a rank's part of its sequences, if one of `keys` says by how many ranks each sequence is shared (Ulysses,
    ring attention). They exchange heads or keys for the attention alone, so what a layer keeps is divided by their number;
    the weights stay divided over all ranks of the run. Raises: SpecError."""
    key, ranks = next(((key, ranks) for key in keys if (ranks := settings.integer(key, 1) or 1) > 1), ("", 1))
    if ranks == 1:
        return job
    part = -(-job.sequence_length // ranks)
    settings.notes.unsupported.append(
        f"Ranks that share a sequence ({settings.spell(key)}={ranks}) are not modelled: each is counted with its part, "
        f"{part:,} of {job.sequence_length:,} tokens, without the buffers of the exchange for attention.",
        settings.spell(key),
        "more",
    )
    return job.replace(sequence_length=part)
