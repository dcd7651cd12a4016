"""Other runs that Hugging Face training arguments may mean, where nothing in them decides it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.huggingface.post_training import KEYS_OF_METHODS, method_of
from peakcast.dialects.huggingface.whose_trainer import Whose

TRL = Whose(True, True, "read as TRL's, as asked")
ASK_WHOSE = "Say which by --dialect trl or --dialect transformers."
METHOD_BY_NAME = re.compile(r"(?!no_|disable_).*(lora|peft|low_rank|[48]_?bit(?!_optim|_adam)|quant)\w*", re.IGNORECASE)
"""Keys which by their names say that adapters train, or that weights are quantised."""
SAY_METHOD = "Say which by --method lora --lora-rank 16 (or yours), or by --method full."
ASK_METHOD = "Say which by the launch script that names its program, such as dpo.py or orpo.py."
PREFERENCES = re.compile(r"prefer|binarized|feedback|hh[-_]rlhf|[-_/](dpo|kto|orpo)\b", re.IGNORECASE)
"""Matches names of datasets that have chosen and rejected answers, or marked ones; TRL's SFTTrainer is rarely run on
them."""


class Likely(NamedTuple):
    """A run that training arguments may mean."""

    name: str
    pasted: Pasted
    """The configuration that is read for this run, with the program that the run would have."""
    parts: Mapping[str, Mapping[str, Any]]
    whose: Whose
    way_out: str
    """How the user says which run it is."""


def likely_runs(
    pasted: Pasted,
    parts: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    whose: Whose,
    unknown: Iterable[str],
) -> list[Likely]:
    """Other runs that the training arguments `given` may mean. `unknown`: those of their keys that were not read."""
    likely: list[Likely] = []
    adapters = {**parts, "training": {**given, "use_peft": True}}
    if not whose.sure:
        likely.append(Likely("a run of TRL's trainers, with their defaults", pasted, parts, TRL, ASK_WHOSE))
    if not whose.sure and {"lora_r", "lora_alpha", "lora_rank"} & set(given):
        name, way_out = "a run that trains adapters, as its lora_ keys say", "Say which by use_peft: true or false."
        likely.append(Likely(name, pasted, adapters, whose, way_out))
    if whose.trl and not pasted.program:
        likely += _of_other_methods(pasted, parts, given, whose)
    for key in unknown:
        if METHOD_BY_NAME.fullmatch(key) and given.get(key) not in (None, False, "False", "false", "", 0):
            likely.append(Likely(f"a run that trains adapters, as {key} may say", pasted, adapters, whose, SAY_METHOD))
            break
    return likely


def _of_other_methods(
    pasted: Pasted, parts: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], whose: Whose
) -> list[Likely]:
    """Runs of other trainers of TRL, which share nearly all arguments."""
    likely = []
    method = method_of("", given)
    if method == "dpo" and {key for key in KEYS_OF_METHODS["dpo"] if key in given} == {"beta"}:
        name = "a run of ORPO or CPO, which keep no reference, by beta"
        likely.append(Likely(name, replace(pasted, program="orpo.py"), parts, whose, ASK_METHOD))
    dataset = str(given.get("dataset_name", ""))
    if method == "sft" and PREFERENCES.search(dataset):
        other = "kto" if "kto" in dataset.lower() else "dpo"
        name = f"a run of {other.upper()}, as the dataset {dataset} suggests"
        likely.append(Likely(name, replace(pasted, program=f"{other}.py"), parts, whose, ASK_METHOD))
    return likely
