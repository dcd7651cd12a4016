"""The networks of transformers as a job asks for them: which class, random weights, adapters of peft, float8 of torchao."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from peakcast.collectors.machine.packages import imported
from peakcast.collectors.stacks.frozen import frozen_modules
from peakcast.collectors.stacks.layouts import torchtitan_expert_parallel, torchtitan_experts
from peakcast.core.errors import CollectorError
from peakcast.core.versions import release
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.images import IMAGE_CLASSIFIER
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.adapter_targets import default_adapter_targets
from peakcast.networks.reverse import hf_config_of
from peakcast.networks.trained_parts import trained_network
from peakcast.networks.undescribed import configuration_of

AUTO_MODELS = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "encoder_decoder": "AutoModelForSeq2SeqLM",
    "hybrid": "AutoModelForCausalLM",
}
"""Kind of architecture -> the class of transformers that trains it."""
CLASSIFIERS = {
    "sequence_classifier": "AutoModelForSequenceClassification",
    "token_classifier": "AutoModelForTokenClassification",
}
"""Head of an architecture -> the class of transformers that has it."""
VISION_LANGUAGE = "AutoModelForImageTextToText"
OF_SOUND = "AutoModelForSpeechSeq2Seq"
OF_IMAGES = ("AutoModelForZeroShotImageClassification", "AutoModelForImageClassification")
"""Classes of networks that compare images with captions, and of those that see images alone. The second has some of the
first too, without their part for captions."""


def _has_no_targets(job: TrainingJob) -> CollectorError:
    return CollectorError(
        f"decoder_sequence_length={job.decoder_sequence_length} is the length of an encoder-decoder's targets, and "
        f"{job.architecture.name!r} is none; give sequence_length alone.",
        parameter="decoder_sequence_length",
        value=job.decoder_sequence_length,
    )


def model_of(job: TrainingJob, *, padded: bool = True) -> Any:
    """The job's network with random weights in `precision.parameters`. With `padded` false it has no padding token:
    transformers sets that token's row to zero (5.17 modeling_utils.py `_init_weights`), and cannot if zero.Init has
    partitioned the table."""
    attention: str | None = {"flex": "flex_attention"}.get(job.attention, job.attention)
    if attention == "sdpa":
        attention = str(conventions(job).get("sdpa", "sdpa"))
    types = job.architecture.layer_types
    if types and not any("attention" in parts for parts in types):
        attention = None
    architecture = _trainable(job.architecture)
    told = configuration_of(architecture) or hf_config_of(architecture)
    config = transformers.AutoConfig.for_model(**told)
    if job.decoder_sequence_length and not config.is_encoder_decoder:
        raise _has_no_targets(job)
    begins_padded = architecture.kind == "encoder_decoder"  # T5 shifts targets by its padding, whose row is like others
    for part in (config, config.get_text_config()):
        rows = getattr(part, "vocab_size", None) or architecture.vocab_size
        if not (padded or begins_padded) or (getattr(part, "pad_token_id", None) or 0) >= rows:
            part.pad_token_id = None  # the family's default, which a smaller vocabulary does not have
    dtype = getattr(torch, job.precision.parameters)
    network = trained_network(job)
    if network.head in CLASSIFIERS and architecture.kind in ("decoder", "encoder"):
        config.num_labels, config.pad_token_id = network.num_labels, 0
        auto = getattr(transformers, CLASSIFIERS[network.head])
        return auto.from_config(config, attn_implementation=attention, **_of_dtype(dtype))
    if architecture.kind in ("undescribed", "multimodal"):
        return _undescribed(config, attention, dtype)
    auto = getattr(transformers, AUTO_MODELS[architecture.kind])
    if architecture.configuration and type(config) not in auto._model_mapping:  # an encoder whose keys are Llama's
        return _undescribed(config, attention, dtype)
    model = auto.from_config(config, attn_implementation=attention, **_of_dtype(dtype))
    if torchtitan_experts.has_torchtitan_experts(job):
        torchtitan_experts.put_in_place(model, job)
        if torchtitan_experts.are_divided(job):
            torchtitan_expert_parallel.divide(model, job)
    return model


def _of_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The keyword argument that tells this release of transformers the weights' dtype (4.56 renamed it)."""
    return {"dtype" if release(transformers.__version__) >= (4, 56) else "torch_dtype": dtype}


def _undescribed(config: Any, attention: str | None, dtype: torch.dtype) -> Any:
    """A network of which only the configuration is known, made by the first auto class that has it. Its attention is
    `attention`, or another if the network has no code for sdpa. It trains without a cache, as under the Trainer
    (`config.use_cache`), whatever its configuration says."""
    config.use_cache = config.get_text_config().use_cache = False
    classes = dict.fromkeys([VISION_LANGUAGE, *AUTO_MODELS.values(), *OF_IMAGES])
    if any(name.endswith(IMAGE_CLASSIFIER) for name in config.architectures or ()):  # without a part for captions
        classes = dict.fromkeys([OF_IMAGES[1]])
    if getattr(config, "is_encoder_decoder", False):  # some of these can also be a decoder alone
        classes = dict.fromkeys([AUTO_MODELS["encoder_decoder"], OF_SOUND, *classes])
    for auto in classes:
        known = getattr(transformers, auto, None)  # releases before 4.45 have no class of vision-language models
        if known is not None and type(config) in known._model_mapping:
            try:
                return known.from_config(copy.deepcopy(config), attn_implementation=attention, **_of_dtype(dtype))
            except ValueError:
                return known.from_config(config, attn_implementation="eager", **_of_dtype(dtype))
    raise CollectorError(
        f"transformers {transformers.__version__} has no class of model_type={config.model_type!r} that trains words, "
        "classes of images or captions; run your own script without a GPU instead (peakcast dryrun), or trace a step of "
        "yours (peakcast explain --module).",
        parameter="model_type",
        value=config.model_type,
    )


def _trainable(architecture: Architecture) -> Architecture:
    whole = architecture.kind == "multimodal" and bool(architecture.configuration)
    if architecture.kind not in (*AUTO_MODELS, "undescribed") and not whole:
        raise CollectorError(
            f"architecture={architecture.name!r} is of kind={architecture.kind!r}; collected are {', '.join(AUTO_MODELS)}.",
            parameter="architecture",
            value=architecture.name,
        )
    if architecture.model_type not in transformers.CONFIG_MAPPING:
        raise CollectorError(
            f"model_type={architecture.model_type!r} is not part of transformers {transformers.__version__} (its code is "
            f"on the hub and is not run here), so {architecture.name!r} cannot be built; if a script of yours trains it, "
            "ask with that (`peakcast dryrun`).",
            parameter="model_type",
            value=architecture.model_type,
        )
    return architecture


def in_float8(model: Any, job: TrainingJob) -> Any:
    """Convert `model` as accelerate's torchao backend does, every nn.Linear but the first and the last, or as torchtitan's
    files ask for (`filter_fqns`), all but the last."""
    float8 = imported("torchao.float8", "torchao", parameter="precision.compute", value="float8")
    from accelerate.utils.ao import filter_linear_layers

    linears = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    ends = [linears[0], linears[-1]] if job.framework == "huggingface" else [linears[-1]]
    recipe = conventions(job).get("float8_recipe", "tensorwise")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=bool(conventions(job).get("fsdp_float8_all_gather")))
    if recipe != "tensorwise":
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda part, name: filter_linear_layers(part, name, layers_to_filter=ends),
    )


TASK_TYPES = {"encoder_decoder": "SEQ_2_SEQ_LM", "encoder": None}
"""Kind of network -> peft's name for its task, for kinds that do not generate; peft has none for masked-word training."""


def _task_type(model: Any, job: TrainingJob) -> str | None:
    if (head := trained_network(job).head) != "language_model":
        return {"sequence_classifier": "SEQ_CLS", "token_classifier": "TOKEN_CLS"}[head]
    if not hasattr(model, "prepare_inputs_for_generation"):  # peft needs it for networks that generate
        return None
    return TASK_TYPES.get(job.architecture.kind, "CAUSAL_LM")


def _assumed_targets(model: Any, job: TrainingJob) -> list[str] | None:
    """Targets of adapters where the job names none: None where peft has defaults for the family; else, since peft raises an
    error then, those that every answer assumes and says so."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    return None if model.config.model_type in DEFAULTS else list(default_adapter_targets(job.architecture))


ADAPTED = ("lora", "qlora", "dora")
"""Methods of adapters that are built."""


def with_adapters(model: Any, job: TrainingJob) -> Any:
    """`model` with the adapters of `job`. Raises: CollectorError for a method of peft that is not built."""
    peft = imported("peft", "peft", parameter="finetuning.method", value=job.finetuning.method)
    tuning = job.finetuning
    if tuning.method not in ADAPTED:
        raise CollectorError(
            f"finetuning.method={tuning.method!r} has no collector yet; measure one of {', '.join(ADAPTED)}.",
            parameter="finetuning.method",
            value=tuning.method,
        )
    targets: str | list[str] | None = list(tuning.targets) or _assumed_targets(model, job)
    if targets == ["all-linear"]:
        targets = "all-linear"
    excluded = {"exclude_modules": frozen} if (frozen := frozen_modules(model, job)) else {}  # since peft 0.14
    config = peft.LoraConfig(
        r=tuning.rank or 8,
        lora_alpha=tuning.alpha or 16,
        lora_dropout=tuning.dropout,
        use_dora=tuning.method == "dora",
        target_modules=targets,
        task_type=_task_type(model, job),
        **excluded,
        modules_to_save=list(tuning.modules_to_save) or None,
    )
    if job.activation_checkpointing.mode != "none":
        model.enable_input_require_grads()
    return peft.get_peft_model(model, config, autocast_adapter_dtype=tuning.adapter_dtype in (None, "float32"))
