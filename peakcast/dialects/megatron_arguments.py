"""Megatron-LM's own command line: the words after `pretrain_gpt.py`, and the variables that it is run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peakcast.core.errors import SpecError
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions, with_versions
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation


def from_arguments(
    words: Sequence[str], env: Mapping[str, str], num_gpus: int | None = None, versions: AskedVersions = NO_VERSIONS
) -> Translation:
    """The job of Megatron-LM's own command line: the words after `pretrain_gpt.py`. Raises: SpecError."""
    from peakcast.dialects.megatron.launch import from_megatron_flags
    from peakcast.dialects.shell.launch import flags_to_mapping

    values, others = flags_to_mapping(words)
    if others:
        raise SpecError(f"{others[0]!r} belongs to no flag; Megatron-LM takes flags only.", parameter=others[0])
    if num_gpus is None and env.get("WORLD_SIZE", "").isdecimal():
        num_gpus = int(env["WORLD_SIZE"])
    known = {name: value for name, value in env.items() if name in _megatron_variables()}
    pasted = Pasted(values=values, where="the command line", folder=Path(), num_gpus=num_gpus, env=known, versions=versions)
    return with_versions(from_megatron_flags(pasted), versions)


def _megatron_variables() -> frozenset[str]:
    from peakcast.dialects.megatron.flags import ENVIRONMENT

    return frozenset((*ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
