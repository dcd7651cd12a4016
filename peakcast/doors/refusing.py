"""Predicts before a training run starts whether it fits, and refuses a run that surely does not. A refused run costs
seconds; one that runs out of memory costs the loading of its weights and the time in the queue.

    peakcast.preflight({"huggingface": {"config": name, "training_arguments": arguments, "peft": lora}})
    model = AutoModelForCausalLM.from_pretrained(name)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from peakcast import catalog
from peakcast.answers.remarks import verdict_reason, verdict_words
from peakcast.catalog import Device
from peakcast.core.errors import DoesNotFitError, SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import format_gib
from peakcast.core.versions import check_versions
from peakcast.dialects.common.asked_versions import OF_THIS_RUN
from peakcast.doors.answering import answer
from peakcast.doors.doctor import known_gpu
from peakcast.doors.questions import Question, question

if TYPE_CHECKING:
    from peakcast.answers.prediction import Prediction
    from peakcast.dialects.common.translation import Translation

Say = Callable[[str], None]
Mode = Literal["refuse", "warn", "off"]
VARIABLE = "PEAKCAST_PREFLIGHT"
"""The environment variable that decides whether a run that surely does not fit is refused, if the script does not."""
MODES: dict[str, Mode] = {"refuse": "refuse", "warn": "warn", "off": "off"}


def preflight(
    job: object, gpu: str | Device | None = None, *, refuse: bool | None = None, say: Say | None = None
) -> Prediction | None:
    """Predict the run that is about to start, say in one line whether it fits, and refuse it when it surely does not.

    `job`: all that `peakcast.predict` takes. In a mapping of the form `{"huggingface": {...}}` the values may be objects
    of the script itself: a config of transformers, TrainingArguments or a config of TRL's, a config of peft; `num_gpus` is
    then WORLD_SIZE, unless it is given. Packages whose versions the job does not name have those installed here. `gpu`: a
    GPU type (None: that of this machine). `refuse`: whether to raise an error; if it is None, the environment variable
    PEAKCAST_PREFLIGHT decides: `refuse` (the default), `warn` or `off`. `say` is called with the line; without it the
    first rank prints it. A run that may or may not fit is never refused.

    Returns: the prediction, or None if PEAKCAST_PREFLIGHT=off. Raises: DoesNotFitError, whose `prediction` says why;
    SpecError or CatalogError for a job that cannot be predicted.
    """
    chosen = mode_of(refuse, "refuse")
    if chosen == "off":
        return None
    asked = question(in_plain_values(job), device_at(gpu), versions=OF_THIS_RUN)
    prediction = answer(asked)
    verdict = f"{verdict_words(prediction)} on {asked.device.name}: {verdict_reason(prediction)}"
    (say or print_on_first_rank)(f"peakcast: {verdict}")
    if chosen == "refuse":
        refuse_what_does_not_fit(asked, prediction)
    return prediction


def mode_of(refuse: bool | None, otherwise: Mode) -> Mode:
    """What to do about a run that surely does not fit: decided by the script's `refuse`, else by PEAKCAST_PREFLIGHT, else
    `otherwise`. Raises: SpecError."""
    if refuse is not None:
        return "refuse" if refuse else "warn"
    value = os.environ.get(VARIABLE, otherwise)
    if value not in MODES:
        raise SpecError(f"{VARIABLE}={value!r} must be one of {', '.join(MODES)}.", parameter=VARIABLE, value=value)
    return MODES[value]


def refuse_what_does_not_fit(asked: Question, prediction: Prediction) -> None:
    """Raises: DoesNotFitError when the run surely does not fit."""
    if prediction.fits != "no":
        return
    from peakcast.answers.advised import counted_from
    from peakcast.explaining.advice import first_to_try

    tried = first_to_try(asked.job, asked.device, prediction.rank)
    advice = counted_from(tried, prediction.peak_allocated_bytes.point)
    steps = "; ".join(step.sentence.rstrip(".") for step in advice)
    first = f" First to try, together: {steps}: {format_gib(advice[-1].peak_bytes)} allocated then." if advice else ""
    raise DoesNotFitError(
        f"this run does not fit on {asked.device.name}: {verdict_reason(prediction)}.{first} {VARIABLE}=warn starts it all "
        "the same.",
        prediction=prediction,
    )


def device_at(gpu: str | Device | None) -> Device:
    """The named GPU type, or that of this machine's first GPU. Raises: SpecError or CatalogError."""
    if gpu is not None:
        return gpu if isinstance(gpu, Device) else catalog.gpu(gpu)
    from peakcast.collectors.machine import installed
    from peakcast.collectors.stacks.steps.observing import Observation

    if (name := Observation.gpu_name()) is not None:
        return catalog.gpu(name)
    for reading in installed.nvml_gpus()[1]:
        return known_gpu(reading["name"], reading["memory_bytes"]) or catalog.gpu(reading["name"])
    raise SpecError("gpu is required where there is no GPU; name its type, such as gpu='H100-80GB'.", parameter="gpu")


def print_on_first_rank(line: str) -> None:
    """Print `line`, in a run of several processes only in the first one."""
    if os.environ.get("RANK", "0") == "0":
        print(line)


def in_plain_values(job: object, program: str = "") -> object:
    """`job` with all objects in its `huggingface` mapping replaced by their own mappings. For a run of TRL's trainers,
    whose steps differ (DPO, KTO, GRPO, ...), it is the translation of that run: of the trainer that `program` names, or
    that the class of the arguments is for. Raises: SpecError."""
    if not isinstance(job, Mapping) or not isinstance(job.get("huggingface"), Mapping):
        return job
    form = {key: _plain(value) for key, value in job["huggingface"].items()}
    arguments = job["huggingface"].get("training_arguments")
    engine = getattr(arguments, "hf_deepspeed_config", None)
    if engine is not None:  # the mapping has the path of a file, the object its content
        form.setdefault("deepspeed", dict(engine.config))
        form["training_arguments"].pop("deepspeed", None)
    form.setdefault("num_gpus", int(os.environ.get("WORLD_SIZE", "1")))
    program = program or trl_program(type(arguments))
    return _run_of_trl(form, program) if program and "config" in form else {**job, "huggingface": form}


def trl_program(arguments: type) -> str:
    """The name of a program that runs a TRL trainer with arguments of this class, such as `dpo.py` for DPOConfig and those
    derived from it; "" for other arguments."""
    for kind in arguments.__mro__:
        if kind.__module__.partition(".")[0] == "trl" and (words := kind.__name__.removesuffix("Config")):
            return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", words).lower() + ".py"
    return ""


def _run_of_trl(form: Mapping[str, Any], program: str) -> Translation:
    """The run of `program` that the `huggingface` mapping `form` describes. Raises: SpecError."""
    from peakcast.dialects.common.pasted import Pasted
    from peakcast.dialects.huggingface.trainer import from_trl

    network = form["config"]
    parts = {"hf_config": network if isinstance(network, Mapping) else None}
    parts |= {key: form.get(key) for key in ("peft", "deepspeed")}
    values = form["training_arguments"]
    told = {*values, *(values.get("model_init_kwargs") or {})}
    if isinstance(network, Mapping) and not {"dtype", "torch_dtype"} & told:  # a network that the script loads itself
        values = {"dtype": "auto", **values}
    pasted = Pasted(
        values=values,
        where="the run",
        companions={key: value for key, value in parts.items() if value is not None},
        model=network if isinstance(network, str) else None,
        num_gpus=form["num_gpus"],
        program=program,
        versions=replace(OF_THIS_RUN, given=FrozenMapping(check_versions(form.get("versions") or {}))),
    )
    return from_trl(pasted)


def _plain(value: Any) -> Any:
    """The mapping of an object of transformers or peft. As in their files, sets inside (peft's `target_modules`) become
    lists, and members of enumerations become their values."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
