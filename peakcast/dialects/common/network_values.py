"""The values of a network's configuration by flat names (`network.hidden_size`), and jobs with other values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from peakcast.core.fields import flat
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import TrainingJob, canonical_json, job_to_mapping

NETWORK_PREFIX = "network."
"""Prefix of the names of values of a network's configuration; other names are fields of a job (`finetuning.rank`)."""


def network_values(architecture: Architecture) -> dict[str, Any]:
    """Values from which the library builds the network: its own configuration if that is stored, else the architecture's
    fields."""
    if architecture.configuration:
        return flat(json.loads(architecture.configuration), NETWORK_PREFIX)
    fields = job_to_mapping(TrainingJob(architecture=architecture))["architecture"]
    return flat({key: value for key, value in fields.items() if key != "name"}, NETWORK_PREFIX)


def with_values(job: TrainingJob, changes: Mapping[str, Any]) -> TrainingJob:
    """`job` with `changes`, by flat name. Raises: SpecError for invalid values."""
    if not changes:
        return job
    mapping = job_to_mapping(job)
    own_configuration = mapping["architecture"].get("configuration")
    network = json.loads(own_configuration) if own_configuration else mapping["architecture"]
    for name, value in changes.items():
        inside = name.startswith(NETWORK_PREFIX)
        _put(network if inside else mapping, name.removeprefix(NETWORK_PREFIX) if inside else name, value)
    if own_configuration:
        mapping["architecture"]["configuration"] = canonical_json(network)
    return job_from_mapping(mapping)


def _put(mapping: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not isinstance(mapping.get(parent), dict):
            mapping[parent] = {}
        mapping = mapping[parent]
    mapping[last] = value
