"""Reads peakcast's own job files (YAML or JSON) and mappings, and architectures in all forms in which they can be named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast import catalog
from peakcast.core.bounded import exists, is_file, is_folder
from peakcast.core.errors import CatalogError, SpecError, near_misses
from peakcast.core.fields import FrozenMapping, build
from peakcast.core.findings import Finding
from peakcast.core.versions import check_versions
from peakcast.dialects.common import hub, text
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions
from peakcast.dialects.common.foreign import foreign
from peakcast.dialects.common.litgpt_targets import PROJECTIONS, litgpt_targets
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Translation
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import check_framework_options, conventions, conventions_of
from peakcast.jobs.parallelism import layers_beside_ends
from peakcast.jobs.spec import DEFAULT_LENGTH, TrainingJob
from peakcast.networks.config import architecture_from_hf_config, is_unknown, left_out_of


def job_from_mapping(mapping: Mapping[str, Any]) -> TrainingJob:
    """A `TrainingJob` from the mapping of a job file; keys are the fields of `TrainingJob`.

    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(f"a job must be a mapping of keys to values, not {type(mapping).__name__}.", value=mapping)
    values = dict(mapping)
    if "architecture" not in values:
        raise SpecError(
            "architecture is required and missing; give a catalog name such as 'llama-3.1-8b', the path of a "
            "config.json, or its mapping.",
            parameter="architecture",
        )
    values["architecture"] = resolve_architecture(values["architecture"])
    if "versions" in values:
        values["versions"] = check_versions(values["versions"])
    values |= _shorter_default(values)
    job = _with_fused_qkv_of_stack(_checkpointing_as_released(build(TrainingJob, _with_stage_layers(values)), values))
    if set(job.finetuning.targets) & set(PROJECTIONS):
        named = litgpt_targets(job.finetuning.targets, job.architecture)
        job = job.replace(finetuning=replace(job.finetuning, targets=named))
    check_framework_options(job)
    return job


def _shorter_default(values: Mapping[str, Any]) -> dict[str, int]:
    """The sequence length of a job without one, if its network has a table of fewer positions than the default length."""
    most = values["architecture"].most_positions
    return {"sequence_length": most} if "sequence_length" not in values and most and most < DEFAULT_LENGTH else {}


def _checkpointing_as_released(job: TrainingJob, values: Mapping[str, Any]) -> TrainingJob:
    """`job` with reentrant or non-reentrant checkpointing, by the default of its release, if the job does not give it.
    TRL's preference trainers make it reentrant for adapters under ZeRO-3."""
    given = values.get("activation_checkpointing")
    if job.activation_checkpointing.mode == "none" or (isinstance(given, Mapping) and "use_reentrant" in given):
        return job
    chosen = conventions(job)
    adapts = job.finetuning.method != "full" and job.parallelism.zero_stage == 3 and job.loss.kind != "cross_entropy"
    reentrant = bool(chosen.get("reentrant_checkpoints") or (adapts and chosen.get("trl_reentrant_in_zero3")))
    return job.replace(activation_checkpointing=replace(job.activation_checkpointing, use_reentrant=reentrant))


def _with_fused_qkv_of_stack(job: TrainingJob) -> TrainingJob:
    """`job` with the network as its stack implements it: with one matrix for queries, keys and values, whose parts get
    separate adapters (the convention `networks_fuse_qkv`)."""
    network = job.architecture
    if network.kind != "decoder" or network.mla is not None or job.finetuning.method != "full":
        return job
    if not conventions(job).get("networks_fuse_qkv"):
        return job
    return job.replace(architecture=replace(network, fused_qkv=True))


def _with_stage_layers(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the layers of each pipeline stage, if they are not given and the stack has its own way to split them
    (the convention `pipeline_split`), like torchtitan, in which 126 layers on 8 stages are a normal job."""
    layout = values.get("parallelism")
    if values.get("framework") != "torch" or not isinstance(layout, Mapping) or layout.get("pipeline_layers"):
        return values
    sizes = layout.get("pipeline_parallel_size", 1), layout.get("virtual_pipeline_stages", 1)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[0] == 1:
        return values
    versions, options = (
        FrozenMapping(given if isinstance(given := values.get(key), Mapping) else {})
        for key in ("versions", "framework_options")
    )
    network = values["architecture"]
    facts = FrozenMapping({"model_type": network.model_type})
    if conventions_of("torch", versions, facts, options)["pipeline_split"] != "ends":
        return values
    layers = layers_beside_ends(network.num_hidden_layers, sizes[0] * sizes[1])
    return {**values, "parallelism": {**layout, "pipeline_layers": layers}}


def from_job(pasted: Pasted) -> Translation:
    """The job of a job file, with the same signature as the readers of other dialects. Raises: SpecError."""
    changed = {} if pasted.model is None else {"architecture": pasted.model}
    read = read_job({**pasted.values, **changed}, pasted.versions)
    job = read.job
    if pasted.num_gpus is not None and pasted.num_gpus != job.parallelism.world_size:
        raise SpecError(
            f"num_gpus={pasted.num_gpus} is not the {job.parallelism.world_size} ranks of {pasted.where}, which says its "
            "layout itself; change parallelism.data_parallel_size there.",
            parameter="num_gpus",
            value=pasted.num_gpus,
        )
    return read


def load_job(path: Path) -> TrainingJob:
    """The job of a YAML or JSON file. Raises: SpecError naming the file."""
    return job_from_mapping(read_mapping(path))


def resolve_architecture(value: object) -> Architecture:
    """An `Architecture` from a catalog name, a hub id, a config.json (or its folder), or a mapping (of a config.json, or of
    peakcast's own form)."""
    if isinstance(value, Architecture):
        return value
    if isinstance(value, Mapping):
        if "norm_placement" in value:  # a key that only peakcast's own form has
            return build(Architecture, value, "architecture.")
        return architecture_from_hf_config(value)
    if isinstance(value, str):
        return _architecture_named(value)
    raise SpecError(
        f"architecture={value!r} must be a catalog name, the path of a config.json, or its mapping.",
        parameter="architecture",
        value=value,
    )


def note_network(value: object, notes: Notes) -> None:
    """Note keys of the `config.json` that `value` is, or names, if no `Architecture` contains them. Raises: SpecError."""
    config = network_config(value)
    if not config or is_unknown(config):  # of an unknown network the answer says what was assumed
        return
    left = left_out_of(config)
    if left.keys:
        notes.assumptions.append(f"keys of the network's configuration that are not read: {', '.join(left.keys)}.")
    for key in left.deviating:
        notes.unsupported.append(f"{key} of the network's configuration is not modelled.", key.partition("=")[0])


def read_job(mapping: Mapping[str, Any], asked: AskedVersions = NO_VERSIONS) -> Translation:
    """The job of `job_from_mapping`, with notes on keys of its network's configuration that are left out. `asked`: the
    versions that the question gives; their defaults apply to settings that the job does not give. Raises: SpecError."""
    notes = Notes()
    job = job_from_mapping(_of_versions(mapping, asked))
    note_network(mapping["architecture"], notes)
    _note_stored_dtype(mapping, job, notes)
    read = notes.finish(job)
    if "sequence_length" in mapping or job.sequence_length == DEFAULT_LENGTH:
        return read
    sentence = (
        f"sequence_length is not given, and {job.sequence_length} is assumed instead of {DEFAULT_LENGTH}: "
        f"{job.architecture.name!r} has no more positions."
    )
    return replace(read, findings=(*read.findings, Finding("default_changed", "sequence_length", "either", sentence)))


def _note_stored_dtype(mapping: Mapping[str, Any], job: TrainingJob, notes: Notes) -> None:
    """Warn of a precision that is not given where transformers would load the network in float32: of a catalog's network
    whose checkpoint is so, and of a config.json that says so, or says nothing, as BERT's (`from_pretrained`)."""
    named = mapping["architecture"]
    if "precision" in mapping or job.framework != "huggingface" or job.task != "train":  # DeepSpeed's engine casts them
        return
    config = network_config(named)
    stored = config.get("dtype") or config.get("torch_dtype") if config else _stored_dtype(named)
    if config and stored is None:
        why = ("the configuration does not name a dtype, and transformers uses the checkpoint's, which is float32 in old "
            "ones")
    elif str(stored).removeprefix("torch.") == "float32":
        why = f"transformers loads {job.architecture.name} in float32, as it is stored"
    else:
        return
    notes.warnings.append(
        f"precision is not given, and {job.precision.parameters} is counted; {why}, which needs about twice as much "
        "(--precision float32).",
        "precision",
        "more",
    )


def _stored_dtype(named: object) -> str:
    """The dtype in which the checkpoint of the catalog's network `named` is stored; "" for a network of another kind."""
    return catalog.checkpoint_dtype(named) if isinstance(named, str) else ""


def _of_versions(mapping: Mapping[str, Any], asked: AskedVersions) -> Mapping[str, Any]:
    """`mapping` with the versions of `asked` beside its own; one that is refused for another reason stays as it is."""
    if not asked or not isinstance(mapping, Mapping):
        return mapping
    framework, own = mapping.get("framework", TrainingJob.framework), mapping.get("versions") or {}
    return {**mapping, "versions": asked.of(framework, check_versions(own))} if isinstance(framework, str) else mapping


def _file_named(name: str) -> Path | None:
    """The config.json to which the path `name` leads, directly or as its folder; None if there is none. In an adapter's
    folder it is the adapter_config.json, as for transformers' `from_pretrained`."""
    path = Path(name)
    if is_folder(path):
        found = (path / file for file in ("adapter_config.json", "config.json"))
        path = next(filter(is_file, found), path)
    return path if path.suffix == ".json" or is_file(path) else None


def network_config(value: object) -> Mapping[str, Any]:
    """The keys of the config.json that `value` is or leads to (as a path, a folder or a hub id); {} for a network of the
    catalog or in peakcast's own form. Raises: SpecError or CatalogError."""
    config = _config_named(value) if isinstance(value, str) else value
    return config if isinstance(config, Mapping) and "norm_placement" not in config else {}


def _config_named(name: str) -> dict[str, Any] | None:
    """The config.json in the file or folder `name`, else that of the hub id `name`; None if the catalog has the network."""
    if (file := _file_named(name)) is not None:
        return read_mapping(file)
    try:
        catalog.architecture(name)
        return None
    except CatalogError:
        module = "." in name and "/" not in name  # such as nemo.collections.llm.recipes.llama3_8b
        if module and (sentence := foreign((), {}, name)):
            raise SpecError(f"{name} {sentence}", parameter="architecture", value=name) from None
        if not hub.is_hub_id(name) or exists(Path(name)):
            raise
    try:
        return hub.config_of(name)
    except CatalogError as error:
        near = near_misses(name.rsplit("/", 1)[-1], catalog.architecture_names())
        raise CatalogError(error.message + near.replace("; did", " Did"), parameter="architecture", value=name) from error


def _architecture_named(name: str) -> Architecture:
    """The network in the file or folder `name`, else the one with that catalog name, else with that hub id."""
    config = _config_named(name)
    if config is None:
        return catalog.architecture(name)
    if (file := _file_named(name)) is None:
        return architecture_from_hf_config(config, name=name)
    called = file.absolute().parent.name if file.stem == "config" else ""
    return architecture_from_hf_config(config, name=called or file.stem)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file, parsed without running anything (YAML's safe subset).

    Raises: SpecError when the file is missing, too large, malformed, or not a mapping.
    """
    content = text.read_text(path)
    kind = text.format_of(content, path.suffix)
    value = text.parse(content, kind if kind in ("JSON", "TOML") else "YAML", str(path))
    if not isinstance(value, dict):
        raise SpecError(f"{path} must hold a mapping of keys to values, not {type(value).__name__}.")
    return value
