"""Projects whose configurations are not read here, told by what they contain, and what to give in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

JOB = "give the model and the step as a job: --model, --micro-batch-size, --sequence-length, --sharding and the like"
FLAGS = "give model, layout and batch as Megatron-LM flags (peakcast megatron --num-layers ...), named as its fields are"


class Foreign(NamedTuple):
    """What the configuration of such a project looks like."""

    title: str
    way_out: str
    signs: tuple[str, ...] = ()
    """As those of a dialect: sets of keys."""
    words: tuple[str, ...] = ()
    """Beginnings of its `_target_`, `recipe` or program."""


FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "a Megatron-Bridge configuration",
        FLAGS,
        ("ConfigContainer", "model_config train_config|ddp_config", "perf_matrix"),
        ("megatron.bridge",),
    ),
    Foreign("a NeMo AutoModel recipe", JOB, ("step_scheduler model",), ("nemo_automodel",)),
    Foreign("a NeMo 2 recipe", FLAGS, (), ("nemo.", "nemo_run")),
    Foreign("a GPT-NeoX configuration", FLAGS, ("pipe_parallel_size|pipe-parallel-size",)),
    Foreign("an LLM Foundry configuration", JOB, ("global_train_batch_size device_train_microbatch_size|max_seq_len",)),
    Foreign(
        "a verl configuration", JOB, ("actor_rollout_ref", "model.partial_pretrain", "data.train_files"), ("verl.",)
    ),
    Foreign("an OpenRLHF command", JOB, ("pretrain micro_train_batch_size",), ("openrlhf",)),
    Foreign("an ms-swift command", JOB, ("train_type model", "tuner_type model"), ("swift",)),
)


_PROGRAM = re.compile(
    r"^[ \t]*(?:python[\d.]*[ \t]+-m[ \t]+)?((?:openrlhf|verl|swift|nemo_run|nemo_automodel)[.\w]*)", re.MULTILINE
)


def foreign_program(text: str) -> str:
    """What `foreign` says of a program that a script's `text` names at the beginning of a line."""
    named = _PROGRAM.search(text)
    return foreign((), {}, named[1]) if named else ""


def foreign(keys: Iterable[str], values: Mapping[str, Any], program: str) -> str:
    """The sentence that names the project which a mapping's `keys` and `values` are of, or whose `program` is run; "" where
    none is known."""
    known = set(keys)
    places = [place for place in (values, values.get("model")) if isinstance(place, Mapping)]
    named = [program, *(str(place.get(key, "")) for place in places for key in ("_target_", "recipe"))]
    for each in FOREIGN:
        calls = each.words and any(name.startswith(each.words) for name in named)
        looks = any(all(known.intersection(word.split("|")) for word in sign.split()) for sign in each.signs)
        if calls or looks:
            return f"is {each.title}, which is not read here; {each.way_out}."
    return ""
