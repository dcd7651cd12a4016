"""Conditions: everything of a job on which its recipe depends, as values with flat names, so that two jobs can be
compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from peakcast.core.fields import flat
from peakcast.dialects.common.network_values import NETWORK_PREFIX, network_values
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.models.recipes.regime import regime
from peakcast.networks.layer_count import COUNTS

Conditions = Mapping[str, Any]
IDLE = re.compile(
    r"\w*_token_ids?|\w*_token_index|id2label|label2id|auto_map|use_cache|architectures|problem_type|return_dict|torchscript"
    r"|output_attentions|output_hidden_states|transformers_version|torch_dtype|dtype|_\w+|alpha|initializer_\w+|init_\w+|\w*_eps|\w*_epsilon"
    r"|pretraining_tp|task_specific_params|max_new_tokens|router_aux_loss_coef"
)
"""Names of settings that change no tensor of a training step: how weights are initialised, tokens numbered, small terms
added."""
OFF = ("gradient_checkpointing",)
"""Switches that no class of transformers names and whose absence means off."""
ROTARY = re.compile(r"(rope_\w+|\w+_rope\w*)(\..*)?|rotary_base|default_theta")
ROTARY_SHARE = "partial_rotary_factor"
OF_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies are recomputed in a step (transformers modeling_rope_utils.py
`dynamic_rope_update`); those of other kinds exist before it."""


def conditions(job: TrainingJob, defaults: Conditions | None = None, read: Set[str] = frozenset()) -> dict[str, Any]:
    """The conditions of `job`: its own fields where they differ from the defaults (so that fields added to jobs later
    change nothing), and its network's configuration. `defaults`: the library's defaults, for what that does not say;
    `read`: the names that its code reads (empty: it may be any)."""
    recorded = regime(job)
    own = flat(job_to_mapping(recorded))
    usual = flat(job_to_mapping(TrainingJob(architecture=job.architecture)))
    fields = (name for name in own if not name.startswith("architecture."))
    alone = {name: own[name] for name in fields if own[name] != usual.get(name)}
    given = network_values(recorded.architecture)
    network = {**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}
    found: dict[str, Any] = {}
    for name, value in {**alone, **network}.items():
        short = name.removeprefix(NETWORK_PREFIX)
        last = short.rpartition(".")[2]
        if value is None or IDLE.fullmatch(last) or (last in COUNTS and value == job.architecture.num_hidden_layers):
            continue
        if name.startswith(NETWORK_PREFIX) and _changes_nothing(short, value, read):
            continue
        if name.startswith(NETWORK_PREFIX) and ROTARY.fullmatch(short) and last != ROTARY_SHARE:
            if value not in OF_LENGTH:
                continue
            name = NETWORK_PREFIX + "rotary_of_length"
        found[name] = value
    return {**_implied(network), **found}


def _changes_nothing(name: str, value: object, read: Set[str]) -> bool:
    """Whether a value of a configuration is under a name that no code reads, or a switch that is off by default."""
    parts = name.split(".")
    return bool(read and not read & {*parts}) or IDLE.fullmatch(parts[0]) is not None or (name in OFF and value is False)


def implied(job: TrainingJob, defaults: Conditions) -> dict[str, Any]:
    """What the job's network leaves to Hugging Face's conventions."""
    network = regime(job).architecture
    given = {name: value for name, value in network_values(network).items() if value is not None}
    return _implied({**defaults, **given})


def _implied(network: Conditions) -> dict[str, Any]:
    """Values that follow from others of the network, as most `configuration_*.py` of transformers define them, for names
    that the family has."""
    found: dict[str, Any] = {}
    for name, heads in network.items():
        prefix = name.removesuffix("num_attention_heads")
        if prefix == name or not isinstance(heads, int) or heads < 1:
            continue
        if network.get(f"{prefix}num_key_value_heads", 0) is None:
            found[f"{prefix}num_key_value_heads"] = heads
        hidden = network.get(f"{prefix}hidden_size")
        if network.get(f"{prefix}head_dim", 0) is None and isinstance(hidden, int) and hidden % heads == 0:
            found[f"{prefix}head_dim"] = hidden // heads
    return found
