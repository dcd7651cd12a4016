"""`TrainingJob`: what is trained and how. Frozen, hashable, plain values; equal jobs are interchangeable.

Terms: a *rank* is a process on one GPU; *data_parallel_size* counts full replicas of the data stream (sharded or not);
sizes of 1 change nothing. A YAML or JSON job file has the same keys as the dataclasses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping, HashedOnce, require_not_negative, require_positive, to_mapping, unsaid
from peakcast.jobs.adapter_settings import RANKED, FinetuningMethod, settings_of
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.images import Images as Images
from peakcast.jobs.images import check_images
from peakcast.jobs.loss import Loss as Loss
from peakcast.jobs.loss import Reference
from peakcast.jobs.micro_batch import Batch as Batch
from peakcast.jobs.micro_batch import check_batch
from peakcast.jobs.parallelism import MOST_RANKS as MOST_RANKS
from peakcast.jobs.parallelism import Parallelism as Parallelism
from peakcast.jobs.parallelism import PipelineSchedule as PipelineSchedule
from peakcast.jobs.parallelism import check_layout

DEFAULT_LENGTH = 2048
"""Tokens of a sequence if the job does not give a length."""
Framework = Literal["huggingface", "torch", "megatron", "deepspeed"]
Dtype = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal[
    "adamw",
    "adam",
    "sgd",
    "lion",
    "adafactor",
    "adamw_8bit",
    "adamw_4bit",
    "paged_adamw_32bit",
    "lomo",
    "muon",
    "galore",
    "adagrad",
    "rmsprop",
    "rmsprop_8bit",
    "adamw_fp8",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "adalomo",
    "adam_mini",
    "ademamix",
    "ademamix_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Element types. `main_parameters` is a separate master copy (Megatron, ZeRO), null for none."""

    parameters: Dtype = "bfloat16"
    compute: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    gradients: Dtype = "bfloat16"
    optimizer_states: Dtype = "bfloat16"
    main_parameters: Dtype | None = None

    @property
    def wide_compute(self) -> Dtype:
        """The dtype between matrix products. float8 is only used for the products, whose inputs and outputs are bfloat16
        (torchao 0.18 float8/float8_linear.py; so does torchtitan's `mixed_precision_param`)."""
        return "bfloat16" if self.compute == "float8" else self.compute


DECAYING_GRADIENTS: tuple[OptimizerName, ...] = ("adam", "sgd", "rmsprop", "adagrad")
"""Optimizers of torch whose weight decay is coupled: `grad.add(param, alpha=weight_decay)`."""
PAGED: tuple[OptimizerName, ...] = (
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
)
"""Optimizers of bitsandbytes with states in managed memory, which the driver moves between host and GPU."""
IN_8_BITS: tuple[OptimizerName, ...] = (
    "adamw_8bit",
    "lion_8bit",
    "ademamix_8bit",
    "rmsprop_8bit",
    "paged_adamw_8bit",
    "paged_lion_8bit",
    "paged_ademamix_8bit",
)
"""Optimizers with states of 8 bits, of bitsandbytes or torchao."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer and how it is implemented (which decides its temporaries)."""

    name: OptimizerName = "adamw"
    implementation: Literal["fused", "foreach", "loop"] = "foreach"
    momentum: float = 0.0
    """Only for SGD; above 0 it has one state per parameter."""
    weight_decay: float = unsaid(0.0)
    """Only for optimizers of torch that add it to copies of the gradients (`DECAYING_GRADIENTS`); AdamW's costs nothing."""

    def __post_init__(self) -> None:
        require_not_negative(self, "momentum", where="optimizer.")
        require_not_negative(self, "weight_decay", where="optimizer.")

    @property
    def decays_gradients(self) -> bool:
        """Whether weight decay is added to copies of the gradients; a fused step adds it inside its kernel."""
        return self.name in DECAYING_GRADIENTS and self.weight_decay > 0 and self.implementation != "fused"

    @property
    def is_paged(self) -> bool:
        """Whether the states are in managed memory (`PAGED`)."""
        return self.name in PAGED

    @property
    def in_8_bits(self) -> bool:
        """Whether the states have 8 bits (`IN_8_BITS`)."""
        return self.name in IN_8_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuning:
    """Which parameters train. `adapter_dtype` null means the framework's default."""

    method: FinetuningMethod = "full"
    """All weights, or one of peft's adapter methods; qlora is lora over quantised weights."""
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    """Names of the projections that get an adapter (`q_proj`, ...); empty means the method's usual default."""
    dropout: float = 0.0
    adapter_dtype: Dtype | None = None
    quantization: Literal["nf4", "gptq", "int8"] | None = None
    double_quantization: bool = False
    settings: FrozenMapping = unsaid(FrozenMapping())  # noqa: RUF009  # a frozen value
    """The method's sizes other than its rank, under peft's names (`decompose_factor`, `n_frequency`, ...)."""
    frozen: tuple[str, ...] = unsaid(())
    """Parts whose weights do not train, nor get adapters: `vision`, `projector` or `language` of a vision-language model,
    or names of modules (`embed_tokens`)."""
    modules_to_save: tuple[str, ...] = unsaid(())
    """Names of modules (`embed_tokens`, `lm_head`) of which a copy trains with all its weights, beside the adapters."""

    def __post_init__(self) -> None:
        require_positive(self, "rank", where="finetuning.")
        require_not_negative(self, "alpha", where="finetuning.")
        if not 0 <= self.dropout < 1:
            raise SpecError(
                f"finetuning.dropout={self.dropout} must be at least 0 and below 1, the part of adapters' inputs that is "
                "zeroed.",
                parameter="finetuning.dropout",
                value=self.dropout,
            )
        settings_of(self.method, self.settings)
        if self.rank is None and RANKED.get(self.method):
            raise SpecError(
                f"finetuning.rank is missing and finetuning.method={self.method!r} needs it; give the adapter rank, "
                "for example rank: 16.",
                parameter="finetuning.rank",
            )
        if self.method == "qlora" and self.quantization is None:
            raise SpecError(
                "finetuning.quantization is missing and finetuning.method='qlora' needs it; use nf4, gptq or int8.",
                parameter="finetuning.quantization",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """What is recomputed in backward. `every_n_layers` checkpoints each n-th layer of mode `full`."""

    mode: Literal["none", "full", "selective"] = "none"
    use_reentrant: bool = False
    every_n_layers: int = 1
    num_layers: int | None = None
    """Megatron's `recompute-num-layers`: layers per checkpointed group (uniform) or per stage (block)."""
    method: Literal["uniform", "block"] = "uniform"
    modules: tuple[str, ...] = ()
    """For `selective`: what is recomputed; empty means the attention core."""

    def __post_init__(self) -> None:
        require_positive(self, "every_n_layers", "num_layers", where="activation_checkpointing.")

    def recomputes(self, index: int) -> bool:
        """Whether decoder layer `index` is checkpointed, so that its forward runs again in backward."""
        return self.mode != "none" and index % self.every_n_layers == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What is kept in host memory instead of on the GPU."""

    parameters: bool = False
    optimizer: bool = False
    activations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """For `task: inference`: a prefill of `prompt_length` tokens, then `new_tokens` are decoded."""

    prompt_length: int | None = None
    new_tokens: int | None = None
    cache: Literal["dynamic", "static"] = "dynamic"

    def __post_init__(self) -> None:
        require_positive(self, "prompt_length", where="inference.")
        require_not_negative(self, "new_tokens", where="inference.")


@dataclass(frozen=True, kw_only=True)
class TrainingJob(HashedOnce):
    """One training (or inference) job, the same for every rank. Job files are read by `dialects.job_file`."""

    __hash__ = HashedOnce.__hash__

    architecture: Architecture
    task: Literal["train", "inference"] = "train"
    framework: Framework = "huggingface"
    versions: FrozenMapping = field(default_factory=FrozenMapping)
    """Package versions (`torch: "2.4.1"`) and the stack whose conventions apply, if they matter."""
    micro_batch_size: int = 1
    sequence_length: int = DEFAULT_LENGTH
    """Tokens of each sequence of a micro-batch; for an encoder-decoder, of the encoder's input."""
    decoder_sequence_length: int | None = unsaid(None)
    """Tokens of each target of an encoder-decoder; null means `sequence_length`."""
    batch: Batch = unsaid(Batch())  # noqa: RUF009  # a frozen value
    images: Images = unsaid(Images())  # noqa: RUF009  # a frozen value
    """The images of each sequence; their tokens are part of `sequence_length`."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step and rank (with pipelining, those in flight are among them)."""
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    finetuning: Finetuning = Finetuning()
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex"] = "sdpa"
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    loss: Loss = Loss()  # noqa: RUF009  # a frozen value
    compile: bool = False
    parallelism: Parallelism = Parallelism()  # noqa: RUF009  # a frozen value
    offload: Offload = Offload()
    allocator: Allocator = field(default_factory=Allocator)
    inference: Inference = Inference()
    other_memory_fraction: float = unsaid(0.0)
    """Fraction of the GPU's memory that other processes hold all the time: vLLM for the same training, another process, a
    display."""
    framework_options: FrozenMapping = field(default_factory=FrozenMapping)
    """Switches that only one framework has; each must be a known convention of `framework` (catalog/frameworks.toml)."""

    def __post_init__(self) -> None:
        require_positive(
            self, "micro_batch_size", "sequence_length", "decoder_sequence_length", "gradient_accumulation_steps"
        )
        if not 0 <= self.other_memory_fraction < 1:
            raise SpecError(
                f"other_memory_fraction={self.other_memory_fraction} must be at least 0 and below 1, the whole GPU.",
                parameter="other_memory_fraction",
                value=self.other_memory_fraction,
            )
        self._check_what_has_no_effect()
        check_batch(self.batch, self.micro_batch_size, self.sequence_length)
        check_images(self.images, self.architecture, whole_rows=self.batch == Batch() and self.task == "train")
        self.loss.reference_beside(adapters=self.finetuning.method != "full")
        check_layout(self.parallelism, self.architecture, self.framework, self.sequence_length)

    def _check_what_has_no_effect(self) -> None:
        """Refuse settings that contradict the rest of the job and would have no effect."""
        targets = ("encoder_decoder", "undescribed")  # of an undescribed network only the library knows what it is
        if self.decoder_sequence_length is not None and self.architecture.kind not in targets:
            raise SpecError(
                f"decoder_sequence_length={self.decoder_sequence_length} is the length of an encoder-decoder's targets, "
                f"and {self.architecture.name!r} is none; give sequence_length alone.",
                parameter="decoder_sequence_length",
                value=self.decoder_sequence_length,
            )
        if self.task == "train" and self.finetuning.quantization and self.finetuning.method == "full":
            raise SpecError(
                f"finetuning.quantization={self.finetuning.quantization!r} with finetuning.method='full': quantised "
                "weights cannot train; use method: qlora for adapters on them, or leave quantization out.",
                parameter="finetuning.quantization",
                value=self.finetuning.quantization,
            )

    @property
    def reference(self) -> Reference:
        """Source of the reference's log-probabilities (`loss.reference`, or what its kind needs)."""
        return self.loss.reference_beside(adapters=self.finetuning.method != "full")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a micro-batch without padding."""
        return self.batch.num_tokens or self.micro_batch_size * self.sequence_length

    @cached_property
    def _canonical(self) -> str:
        return canonical_json(job_to_mapping(self))

    @cached_property
    def config_hash(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON; equal jobs have equal hashes."""
        return hashlib.sha256(self._canonical.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> TrainingJob:
        """The same job with `changes`."""
        return replace(self, **changes)


def canonical_json(value: object) -> str:
    """`value` as JSON with sorted keys and no spaces, for hashing and for CSV cells."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def job_to_mapping(job: TrainingJob) -> dict[str, Any]:
    """The job as a plain mapping, every default written out; `dialects.common.job_file.job_from_mapping` reads it back."""
    mapping: dict[str, Any] = to_mapping(job)
    return mapping


def canonical_job(job: TrainingJob) -> str:
    """The job as canonical JSON, every default written out: the text that `config_hash` is of, made once for each job."""
    return job._canonical


def job_in_words(job: TrainingJob) -> str:
    """The architecture's name, then everything that differs from the defaults, under the keys of a job file (without
    versions)."""
    plain = job_to_mapping(TrainingJob(architecture=job.architecture))
    asked = job_to_mapping(job)
    words = [job.architecture.name]
    for key in asked:
        if key not in ("architecture", "versions") and asked[key] != plain.get(key):
            words += _differences(key, asked[key], plain.get(key))
    return ", ".join(words)


def _differences(key: str, value: Any, default: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{key}={value}"]
    known = default if isinstance(default, dict) else {}
    return [
        words
        for name, item in value.items()
        if item != known.get(name)
        for words in _differences(f"{key}.{name}", item, known.get(name))
    ]
