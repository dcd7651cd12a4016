"""A job from the command line: the flags that change a job, declared once for every command that asks about one.

A command is decorated with `takes_job` and has a parameter `asked: AskedJob`. On the command line, that parameter becomes
the argument JOB, every flag of `FLAGS`, and `--set`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peakcast.core.bounded import exists, yaml_value
from peakcast.core.errors import SpecError
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.translate import NOTHING, ReadOptions, companions

if TYPE_CHECKING:
    from peakcast.dialects.common.translation import Translation


def complete_model(incomplete: str) -> list[str]:
    """The catalog's architectures that begin with what was typed, for the shell."""
    from peakcast import catalog

    return [name for name in catalog.architecture_names() if name.startswith(incomplete.lower())]


def complete_gpu(incomplete: str) -> list[str]:
    """The catalog's GPU types that begin with what was typed, for the shell."""
    from peakcast import catalog

    return [name for name in catalog.gpu_names() if name.lower().startswith(incomplete.lower())]


@dataclass(frozen=True, slots=True)
class JobFlag:
    """One flag. Its value is assigned to each of `fields`, which are paths in a job file."""

    name: str
    fields: tuple[str, ...]
    kind: type
    help: str

    @property
    def option(self) -> Any:
        """The flag's declaration for typer. A boolean also gets its `--no-` form."""
        switches = () if self.kind is bool else (f"--{self.name.replace('_', '-')}",)
        completion = complete_model if self.name == "model" else None
        return typer.Option(*switches, help=self.help, rich_help_panel="Job", autocompletion=completion)


FLAGS = (
    JobFlag("model", ("architecture",), str, "Catalog name or the path of a config.json."),
    JobFlag("framework", ("framework",), str, "huggingface, torch, megatron or deepspeed."),
    JobFlag("micro_batch_size", ("micro_batch_size",), int, "Sequences per rank and forward."),
    JobFlag("sequence_length", ("sequence_length",), int, "Tokens per sequence."),
    JobFlag("images_per_sequence", ("images.per_sequence",), int, "Images of each sequence; their tokens are part of it."),
    JobFlag("image_height", ("images.height",), int, "Height of an image in pixels, before the processor resizes it."),
    JobFlag("image_width", ("images.width",), int, "Width of an image in pixels; default: its height."),
    JobFlag("gradient_accumulation_steps", ("gradient_accumulation_steps",), int, "Micro-batches per optimizer step."),
    JobFlag(
        "precision",
        tuple(f"precision.{part}" for part in ("parameters", "compute", "gradients", "optimizer_states")),
        str,
        "Dtype of everything: bfloat16, float16 or float32.",
    ),
    JobFlag("method", ("finetuning.method",), str, "full, lora, qlora or another of peft's methods."),
    JobFlag("lora_rank", ("finetuning.rank",), int, "Rank of the adapters."),
    JobFlag("quantization", ("finetuning.quantization",), str, "How frozen weights are quantized: nf4, gptq or int8."),
    JobFlag("optimizer", ("optimizer.name",), str, "adamw, sgd, adafactor, lion, adamw_8bit, ..."),
    JobFlag("optimizer_implementation", ("optimizer.implementation",), str, "fused, foreach or loop."),
    JobFlag("checkpointing", ("activation_checkpointing.mode",), str, "Activation checkpointing: none, full or selective."),
    JobFlag("attention", ("attention",), str, "eager, sdpa, flash_attention_2 or flex."),
    JobFlag("data_parallel_size", ("parallelism.data_parallel_size",), int, "Ranks that each train on data of their own."),
    JobFlag("sharding", ("parallelism.sharding",), str, "none, fsdp1, fsdp2, hsdp or no_shard."),
    JobFlag("zero_stage", ("parallelism.zero_stage",), int, "DeepSpeed's ZeRO stage, 0 to 3."),
    JobFlag("tensor_parallel_size", ("parallelism.tensor_parallel_size",), int, "Ranks that share each layer."),
    JobFlag("sequence_parallel", ("parallelism.sequence_parallel",), bool, "Tensor-parallel ranks share activations too."),
    JobFlag("pipeline_parallel_size", ("parallelism.pipeline_parallel_size",), int, "Ranks that share the layers."),
    JobFlag("context_parallel_size", ("parallelism.context_parallel_size",), int, "Ranks that share a sequence."),
    JobFlag("expert_parallel_size", ("parallelism.expert_parallel_size",), int, "Ranks that share the experts."),
    JobFlag("other_memory_fraction", ("other_memory_fraction",), float, "Part of the GPU that others hold, such as vLLM."),
)
"""The flags in the order in which `--help` shows them."""
JOB_HELP = "A job file, or another project's configuration or script; the flags below change it."
SET_HELP = "Any other field: --set loss.fused_linear_cross_entropy=true"
VERSIONS = {
    "versions": (
        list[str],
        typer.Option(help="Versions of packages: torch=2.9,transformers=4.45.2; repeatable.", rich_help_panel="Versions"),
    ),
    "container": (str, typer.Option(help="Tag of NVIDIA's PyTorch image: 26.04", rich_help_panel="Versions")),
    "here": (bool, typer.Option("--here", help="Use the versions that are installed here.", rich_help_panel="Versions")),
}
"""Name -> type and option, for the options that give the versions of packages."""
BESIDE = {
    "with_": (list[Path], typer.Option("--with", help="Another file that JOB needs, such as ds_config.json; repeatable.")),
    "recipe": (Path, typer.Option(help="A recipe that dryrun --save-recipe or record --output wrote, instead of JOB.")),
    "num_gpus": (int, typer.Option(min=1, help="GPUs of the whole run, where JOB does not say.")),
    "dialect": (str, typer.Option(help="Whose configuration JOB is, where its keys do not tell.")),
    **VERSIONS,
}
"""Name -> type and option, for options that accompany JOB. A command with a parameter of that name keeps its own."""


@dataclass(frozen=True, slots=True)
class AskedJob:
    """The job of a command line: a file (or a catalog name), flags by field, and `--set` texts."""

    job: str | None
    flags: Mapping[str, object]
    settings: Sequence[str]
    beside: ReadOptions = NOTHING
    recipe: Path | None = None
    """Path of a file with a recipe, whose job is used as JOB."""

    @property
    def given(self) -> bool:
        """Whether anything was given at all."""
        beside = bool(self.beside) or bool(self.beside.versions)
        return self.job is not None or self.recipe is not None or bool(self.flags) or bool(self.settings) or beside

    def other(self, against: str | None) -> object:
        """The second job, which `against` names: this job with FIELD=VALUE changed, or a file or catalog name. None if
        `against` is None. Raises: SpecError."""
        if against is None or "=" not in against or exists(against):
            return against
        if self.recipe is not None:
            return self._changed_recipe(self.recipe, [*self.settings, against])
        return job_from_flags(self.job, self.flags, [*self.settings, against], self.beside)

    def read(self) -> Mapping[str, Any] | Translation:
        """The job, in a form that `peakcast.api` accepts. Raises: SpecError, RecordError."""
        if self.recipe is not None:
            return self._changed_recipe(self.recipe, self.settings)
        return job_from_flags(self.job, self.flags, self.settings, self.beside)

    def _changed_recipe(self, recipe: Path, settings: Sequence[str]) -> Mapping[str, Any]:
        from peakcast.doors.recipe_files import read_recipe_file
        from peakcast.jobs.spec import job_to_mapping

        num_gpus, others = self.beside.num_gpus, replace(self.beside, num_gpus=None)
        if self.job is not None or others:
            raise SpecError(
                f"--recipe {recipe} has its job with it; leave JOB (and --with, --dialect) out, and change its fields by "
                "flags.",
                parameter="recipe",
            )
        changes = {**self.flags, **dict(_setting(text) for text in settings)}
        own = job_to_mapping(read_recipe_file(recipe).job)
        if num_gpus is not None and "parallelism.data_parallel_size" not in changes:
            layout = {**own.get("parallelism", {}), **{name.rpartition(".")[2]: value for name, value in changes.items()}}
            changes["parallelism.data_parallel_size"] = _replicas(num_gpus, layout)
        return _changed(own, changes, str(recipe))


def takes_job(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `asked` of `command` by JOB, its accompanying options, the job flags and `--set`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    taken = {parameter.name for parameter in own}
    beside = {name: kind for name, kind in BESIDE.items() if name not in taken}

    @functools.wraps(command)
    def asking(job: str | None, set_: list[str] | None, **others: Any) -> None:
        given = {flag: others.pop(flag.name) for flag in FLAGS}
        flags = {field: value for flag, value in given.items() if value is not None for field in flag.fields}
        said = {name: others.pop(name) for name in beside}
        versions = asked_versions(*(said.pop(name) for name in VERSIONS))
        files, recipe = tuple(said.pop("with_", None) or ()), said.pop("recipe", None)
        asked = AskedJob(job, flags, set_ or [], ReadOptions(files=files, versions=versions, **said), recipe)
        command(asked, **others)

    def option(name: str, annotation: object) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    asking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            option("job", Annotated[str | None, typer.Argument(help=JOB_HELP)]),
            *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
            *(option(name, Annotated[kind | None, how]) for name, (kind, how) in beside.items()),  # type: ignore[operator]
            *(option(flag.name, Annotated[flag.kind | None, flag.option]) for flag in FLAGS),  # type: ignore[operator]
            option("set_", Annotated[list[str] | None, typer.Option("--set", help=SET_HELP, rich_help_panel="Job")]),
        ]
    )
    asking.__annotations__ = {}  # typer reads the signature; the command's own annotations name `asked`
    return asking


def job_from_flags(
    job: str | None, flags: Mapping[str, object], settings: Sequence[str], beside: ReadOptions = NOTHING
) -> Mapping[str, Any] | Translation:
    """The mapping of `job` (a file or a catalog name, None for none), with the fields that `flags` and `settings` change.

    `flags` have the field's path as key ("parallelism.zero_stage"); `settings` are texts "path=value" whose values are read
    as YAML. A configuration of another project is read first, with the options in `beside` and with the architecture that
    `flags` name; the other flags then change its job.
    Raises: SpecError.
    """
    from peakcast.dialects.common.job_file import job_from_mapping
    from peakcast.dialects.opening import opened
    from peakcast.doors.questions import is_configuration, translation_of
    from peakcast.jobs.spec import job_to_mapping

    changes = {**flags, **dict(_setting(text) for text in settings)}
    if job is None and beside:
        raise _nothing_to_go_with(beside)
    values: dict[str, Any] = {"architecture": job} if job is not None else {}
    if job is not None and is_configuration(job):
        pasted = opened(job, companions(beside.files))
        if "architecture" not in pasted.values or beside:
            model = changes.pop("architecture", None)
            read = translation_of(job, replace(beside, model=str(model)) if model is not None else beside)
            return read.changed(lambda found: job_from_mapping(_changed(job_to_mapping(found), changes, job)), changes)
        values = dict(pasted.values)
    values = _changed(values, changes, job)
    if "architecture" not in values:
        raise SpecError(
            "no architecture is given; give a job file, or --model with a catalog name such as llama-3.1-8b.",
            parameter="architecture",
        )
    return translation_of(values, ReadOptions(versions=beside.versions)) if beside.versions else values


def _nothing_to_go_with(beside: ReadOptions) -> SpecError:
    rule = "goes with a configuration file, and none is given; give that file first"
    if beside.num_gpus is None:
        flag, value = ("--with", beside.files[0]) if beside.files else ("--dialect", beside.dialect)
        return SpecError(f"{flag} {value} {rule}.", parameter=flag.strip("-"), value=str(value))
    return SpecError(
        f"--num-gpus {beside.num_gpus} {rule}. With --model, say how the GPUs share the work instead: "
        f"--data-parallel-size {beside.num_gpus} --sharding fsdp2, --tensor-parallel-size and the like.",
        parameter="num_gpus",
        value=beside.num_gpus,
    )


def _replicas(num_gpus: int, layout: Mapping[str, Any]) -> int:
    """The data-parallel size of `num_gpus` under the other sizes of `layout`. Raises: SpecError."""
    others = math.prod(int(layout.get(f"{name}_parallel_size", 1)) for name in ("tensor", "pipeline", "context"))
    if num_gpus % others:
        raise SpecError(
            f"num_gpus={num_gpus} must be a multiple of {others}, the GPUs of one replica of this layout.",
            parameter="num_gpus",
            value=num_gpus,
        )
    return num_gpus // others


def _changed(values: dict[str, Any], changes: Mapping[str, object], job: str | None) -> dict[str, Any]:
    """`values` with the fields at the paths of `changes` set. Raises: SpecError."""
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            inner = place.get(parent)
            if inner is not None and not isinstance(inner, Mapping):
                raise SpecError(f"{path} cannot be set: {parent} is {inner!r} in {job}, not a mapping.", parameter=path)
            place[parent] = dict(inner or {})
            place = place[parent]
        place[name] = value
    return values


def _setting(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecError(f"--set {text!r} must be FIELD=VALUE, such as precision.parameters=float32.", parameter="set")
    try:
        return path, yaml_value(value)
    except ValueError as error:
        raise SpecError(f"--set {text!r} has no valid value: {' '.join(str(error).split())}.", parameter="set") from error
