"""The dtypes of a Hugging Face run: of the weights as loaded, of mixed precision, and of adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.core.versions import release
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.dialects.huggingface import keys
from peakcast.dialects.huggingface.adapters import adapter_of
from peakcast.dialects.huggingface.parallelism import fsdp_version, mapping_at
from peakcast.jobs.spec import Dtype, Finetuning, Precision

Widened = Literal["none", "trained", "all"]
"""Which weights of 16 bits a launcher casts to float32."""

CHECKPOINTS = "that of the checkpoint"
"""Value of `dtype_if_unsaid` that means dtype="auto": the dtype of the checkpoint's tensors, in any release."""

FROM_PRETRAINED = "that of from_pretrained"
"""Value of `torch_dtype` if the program itself loads the network, without a dtype: the trainer's default then does not
apply."""


def with_auto_dtype(training: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Training arguments that keep a dtype of "auto", which other keys lose as a word for their default."""
    if not isinstance(training, Mapping) or "auto" not in (str(training.get(key)) for key in ("dtype", "torch_dtype")):
        return training
    return {**training, "dtype_if_unsaid": CHECKPOINTS}


def weights_dtype(
    model: Mapping[str, Any], name: str, training: Settings, notes: Notes, *, is_modern: bool, quantized: bool = False
) -> Dtype:
    """The dtype in which the weights are loaded. `model`: the keys of config.json, if given; `name`: the network's;
    `is_modern`: whether transformers 5 loads them.

    If no setting asks for a dtype, transformers 5 uses the configuration's, else that of the checkpoint's tensors (5.17
    modeling_utils.py `_get_dtype`, `from_pretrained(dtype="auto")`); transformers 4 uses float32 whatever those are, and
    float16 for what bitsandbytes and GPTQ quantise (4.57 modeling_utils.py `from_pretrained`, quantizers `update_dtype`).
    """
    for key in ("dtype", "torch_dtype"):
        if (asked := training.raw(key)) is not None and str(asked) not in ("auto", FROM_PRETRAINED):
            return _dtype_named(key, asked)
    unsaid = training.text("dtype_if_unsaid")  # in any release the configuration's, and else this one
    if not is_modern and not unsaid:
        dtype: Dtype = "float16" if quantized else "float32"
        ways = "" if quantized else " (torch_dtype: bfloat16 halves them)"
        notes.assumptions.append(f"torch_dtype is not given; transformers 4 loads weights in {dtype}{ways}.")
        return dtype
    if (configured := model.get("dtype") or model.get("torch_dtype")) is not None and str(configured) != "auto":
        dtype = _dtype_named("the configuration's dtype", configured)
        notes.assumptions.append(f"the weights are loaded as {dtype}, as the configuration says.")
        return dtype
    if not model and name in catalog.architecture_names():
        dtype = _dtype_named("checkpoint_dtype", catalog.checkpoint_dtype(name))
        notes.assumptions.append(f"torch_dtype is not given; {name}'s weights are loaded in {dtype}, as they are stored.")
        return dtype
    return _unsaid_dtype(model, unsaid, notes)


def _unsaid_dtype(model: Mapping[str, Any], unsaid: str, notes: Notes) -> Dtype:
    """The dtype of weights if neither settings nor a configuration give one: `unsaid`, if that is a dtype; else the
    checkpoint's. Checkpoints older than the key, such as those of BERT, GPT-2 and T5, are float32."""
    of_checkpoint = unsaid in ("", CHECKPOINTS)
    dtype = _dtype_named("dtype_if_unsaid", "float32" if of_checkpoint else unsaid)
    nor = "the configuration" if model else "dtype"
    notes.assumptions.append(f"neither torch_dtype nor {nor} says in which dtype weights are loaded: {dtype} is counted.")
    if of_checkpoint:
        notes.warnings.append(
            f"neither torch_dtype nor {nor} says the weights' dtype, which is then the checkpoint's: float32 is counted, "
            "as in checkpoints older than that key; one in 16 bits needs half of it.",
            "torch_dtype",
            "less",
        )
    return dtype


def _dtype_named(source: str, value: object) -> Dtype:
    """The dtype that `value` names. Raises: SpecError."""
    if str(value) not in keys.DTYPES:
        raise SpecError(f"{source}={value!r} must be one of float32, bfloat16, float16.", parameter=source, value=value)
    return keys.DTYPES[str(value)]


def half_dtype(training: Settings, engine: Settings | None, shards: Settings | None, notes: Notes) -> Dtype | None:
    """The 16-bit dtype of mixed precision; None if no setting asks for one."""
    mixed = shards.text("mixed_precision", "no") if shards else "no"
    bf16, fp16 = (
        any([training.switch(key), mixed == key, _enabled(engine, key)])  # a list: each is read, and refused if invalid
        for key in ("bf16", "fp16")
    )
    if bf16 and fp16:
        raise training.refuse("fp16", "cannot be given together with bf16; keep one", True)
    if mixed == "fp8":
        notes.unsupported.append("FP8 training (mixed_precision=fp8) is not modelled.", "mixed_precision")
    return "bfloat16" if bf16 else "float16" if fp16 else None


def finetuning_of(
    adapter: Settings | None,
    weights: Dtype,
    quantization: Mapping[str, Any],
    notes: Notes,
    options: dict[str, Any],
    widens: bool,
) -> Finetuning:
    """Which parameters train. `widens`: whether peft makes adapters in float32 by default, as it does since 0.12."""
    kind: Literal["nf4", "gptq", "int8"] | None = None
    if quantization.get("load_in_8bit"):
        kind = "int8"
    elif quantization.get("quant_method") == "gptq":
        kind = "gptq"
        options["gptq_group_size"] = int(quantization.get("group_size", 128))
    elif quantization.get("load_in_4bit"):
        kind = "nf4"
    elif quantization:
        named = quantization.get("quant_method", dict(quantization))
        notes.unsupported.append(
            f"Quantization {named!r} is not modelled: the weights count in 16 bits.", "quantization_config", "less"
        )
    if adapter is None:
        if kind:
            notes.warnings.append(
                "quantized weights cannot train without peft; they are read as unquantized.", "quantization_config", "less"
            )
        return Finetuning()
    dtype = _adapter_dtype(adapter, kind, weights, quantization, widens)
    return adapter_of(adapter, kind, dtype, quantization, notes)


def _adapter_dtype(
    adapter: Settings, kind: str | None, weights: Dtype, quantization: Mapping[str, Any], widens: bool
) -> Dtype | None:
    """The dtype of adapters; None for peft's default, float32. Before peft 0.12 they had the dtype of the weight to which
    they are attached, if that is a floating-point type (peft 0.11.1 `tuners/lora/layer.py` update_layer)."""
    if not widens:
        return weights if kind is None else None
    return None if adapter.switch("autocast_adapter_dtype", True) else _base_dtype(kind, weights, quantization, adapter)


def _base_dtype(kind: str | None, weights: Dtype, quantization: Mapping[str, Any], adapter: Settings) -> Dtype:
    """The dtype of adapters that peft 0.21 leaves in the dtype of their layer: for bitsandbytes' 4 bits, the dtype of
    computation; other integer weights do not determine it (`_move_adapter_to_device_of_base_layer`)."""
    if kind is None:
        return weights
    return (quantized_compute(quantization, adapter) or weights) if kind == "nf4" else "float32"


def quantized_compute(quantization: Mapping[str, Any], settings: Settings) -> Dtype | None:
    """The dtype in which bitsandbytes' 4-bit layers multiply; None if `quantization` does not say. Raises: SpecError."""
    asked = str(quantization.get("bnb_4bit_compute_dtype") or "auto").removeprefix("torch.")
    if asked != "auto" and asked not in keys.DTYPES:
        raise settings.refuse("bnb_4bit_compute_dtype", f"must be one of {', '.join(keys.DTYPES)}", asked)
    return keys.DTYPES.get(asked)


def widened_under_fsdp(shards: Settings | None, versions: Mapping[str, str], prepared: Collection[int]) -> Widened:
    """Which weights accelerate casts to float32 where FSDP mixes precisions. `prepared`: the versions of FSDP that its own
    functions prepare.

    FSDP1: those that train (accelerator.py, "upcasting"). FSDP2 (utils/fsdp_utils.py `fsdp2_prepare_model`): the whole
    model until 1.12; 1.13 casts into names that it drops, so none; from 1.14 on those that train.
    """
    if shards is None or fsdp_version(shards) not in prepared:
        return "none"
    if fsdp_version(shards) != 2:
        return "trained"
    accelerate = release(versions.get("accelerate", "1.15"))[:2]
    if accelerate == (1, 13):
        return "none"
    return "trained" if not accelerate or accelerate > (1, 13) else "all"


def note_release_of_accelerate(
    shards: Settings, versions: Mapping[str, str], weights: Dtype, finetuning: Finetuning, notes: Notes
) -> None:
    """Note that older releases of accelerate, which run with the transformers that is asked for, also cast frozen
    weights."""
    frozen = finetuning.method != "full" and finetuning.quantization is None
    if frozen and weights != "float32" and fsdp_version(shards) == 2 and "accelerate" not in versions:
        notes.warnings.append(
            "The release of accelerate is not given: from 1.13 on it leaves frozen weights as they are, as counted here; "
            f"before, FSDP2 held those of {weights} in float32: --versions accelerate=1.12 counts that.",
            "fsdp_version",
            "more",
        )


def widened_adapters(
    finetuning: Finetuning, half: Dtype | None, shards: Settings | None, widened: Widened, notes: Notes
) -> Finetuning:
    """`finetuning` with adapters in float32 if accelerate casts them: trained parameters, except with FSDP2 and
    bitsandbytes' 4 bits."""
    if half is None or shards is None or widened == "none" or finetuning.adapter_dtype in (None, "float32"):
        return finetuning
    if finetuning.quantization == "nf4" and fsdp_version(shards) == 2:
        return finetuning
    notes.assumptions.append(f"accelerate widens adapters of {finetuning.adapter_dtype} to float32: FSDP mixes precisions.")
    return replace(finetuning, adapter_dtype=None)


def precision_of(
    weights: Dtype,
    half: Dtype | None,
    engine: Settings | None,
    widened: Widened,
    finetuning: Finetuning,
    notes: Notes,
    options: dict[str, Any],
) -> Precision:
    if engine is not None and half is not None:  # the engine casts the model and keeps a master copy
        return Precision(
            parameters=half, compute=half, gradients=half, optimizer_states="float32", main_parameters="float32"
        )
    whole = widened == "all" and finetuning.quantization is None
    if half is not None and weights != "float32" and (whole or (finetuning.method == "full" and widened != "none")):
        frozen = "" if finetuning.method == "full" else ", frozen ones too before 1.13"
        notes.assumptions.append(f"accelerate widens weights of {weights} to float32, since FSDP mixes precisions{frozen}.")
        weights = "float32"
    trained: Dtype = weights
    if finetuning.method != "full" and weights != "float32" and finetuning.adapter_dtype in (None, "float32"):
        trained = "float32"  # peft's autocast_adapter_dtype
    options["autocast"] = half is not None  # also with 16-bit weights: it runs norms and losses in fp32
    compute = half if options.get("autocast") and half else weights
    return Precision(parameters=weights, compute=compute, gradients=trained, optimizer_states=trained)


def _enabled(engine: Settings | None, key: str) -> bool:
    inner = mapping_at(engine, key) if engine is not None else {}
    if engine is None or inner.get("enabled") == "auto":
        return False
    return Settings(inner, engine.notes, "DeepSpeed", lambda name: f"{key}.{name}").switch("enabled")
