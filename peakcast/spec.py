"""`TrainingJob`: what is trained and how. Frozen, hashable, plain values; equal means interchangeable.

Words settled here: a *rank* is a process on one GPU; *data_parallel_size* counts full replicas of the data stream
(sharded or not); sizes of 1 change nothing. A YAML or JSON job file has the same keys as the dataclasses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from peakcast.allocator import Allocator
from peakcast.architecture import Architecture
from peakcast.errors import SpecError
from peakcast.fields import FrozenMapping, HashedOnce, require_not_negative, require_positive, to_mapping, unsaid
from peakcast.loss import Loss as Loss
from peakcast.loss import Reference

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
    "adamw_fp8",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "adalomo",
]


MOST_RANKS = 2**20
MOST_TOKENS = 2**36
"""Of a job, and of a micro-batch: far beyond any that was run, and small enough that an answer takes a bounded time and
its bytes can be counted in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Element types. `main_parameters` is a separate master copy (Megatron, ZeRO), null for none."""

    parameters: Dtype = "bfloat16"
    compute: Literal["float32", "bfloat16", "float16", "float8"] = "bfloat16"
    gradients: Dtype = "bfloat16"
    optimizer_states: Dtype = "bfloat16"
    main_parameters: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer and how it is implemented (which decides its temporaries)."""

    name: OptimizerName = "adamw"
    implementation: Literal["fused", "foreach", "loop"] = "foreach"
    momentum: float = 0.0
    """SGD's only; above 0 it keeps one state per parameter."""

    def __post_init__(self) -> None:
        require_not_negative(self, "momentum", where="optimizer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuning:
    """Which parameters train. `adapter_dtype` null means the framework's default."""

    method: Literal["full", "lora", "qlora"] = "full"
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    """Names of the projections that get an adapter (`q_proj`, ...); empty means the method's usual default."""
    dropout: float = 0.0
    adapter_dtype: Dtype | None = None
    quantization: Literal["nf4", "gptq", "int8"] | None = None
    double_quantization: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "rank", where="finetuning.")
        require_not_negative(self, "dropout", "alpha", where="finetuning.")
        if self.method != "full" and self.rank is None:
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


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The layout. `sharding` is of PyTorch's FSDP, `zero_stage` of DeepSpeed (1 with Megatron: distributed optimizer)."""

    data_parallel_size: int = 1
    sharding: Literal["none", "fsdp1", "fsdp2", "hsdp", "no_shard"] = "none"
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_pipeline_stages: int = 1
    pipeline_layers: tuple[int, ...] = ()
    """Layers on each virtual stage in model order; empty means an even split."""
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """null means `tensor_parallel_size`."""
    zero_stage: int = 0

    def __post_init__(self) -> None:
        require_positive(
            self,
            "data_parallel_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "virtual_pipeline_stages",
            "context_parallel_size",
            "expert_parallel_size",
            "expert_tensor_parallel_size",
            where="parallelism.",
        )
        if self.zero_stage not in (0, 1, 2, 3):
            raise SpecError(
                f"parallelism.zero_stage={self.zero_stage} must be 0, 1, 2 or 3.",
                parameter="parallelism.zero_stage",
                value=self.zero_stage,
            )

    @property
    def num_replicas(self) -> int:
        """Ranks that train the same weights on different tokens: they reduce gradients, and FSDP shards over them."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def sequence_sharing_ranks(self) -> int:
        """Ranks among which each sequence is divided between a layer's matrices."""
        return self.context_parallel_size * (self.tensor_parallel_size if self.sequence_parallel else 1)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return (
            self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a micro-batch of `micro_batch_size` sequences looks like to the model."""

    form: Literal["rows", "masked", "padding_free"] = "rows"
    """`rows`: as many full rows of `sequence_length`, and attention needs no mask but the causal one. `masked`: rows in
    which attention must leave something out, padding or the other sequences of a packed row. `padding_free`: all sequences
    in one row without padding, told apart by their positions (transformers' DataCollatorWithFlattening, trl's
    padding_free)."""
    num_tokens: int | None = None
    """Tokens of a micro-batch that are no padding; null means micro_batch_size × sequence_length, the most there can be."""
    shortest_sequence: int | None = unsaid(None)
    """Where lengths change from step to step: tokens of the shortest sequence; `sequence_length` is the longest. null means
    that every step has the same lengths."""
    seed: int = unsaid(0)
    """Which lengths are drawn (`lengths.py`)."""

    def __post_init__(self) -> None:
        require_positive(self, "num_tokens", "shortest_sequence", where="batch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What lives in host memory instead."""

    parameters: bool = False
    optimizer: bool = False
    activations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """For `task: inference`: a prefill of `prompt_length` tokens, then `new_tokens` decoded."""

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
    """Package versions (`torch: "2.4.1"`) and the stack whose conventions hold, where they matter."""
    micro_batch_size: int = 1
    sequence_length: int = 2048
    """Tokens of each sequence of a micro-batch; of an encoder-decoder, what the encoder reads."""
    decoder_sequence_length: int | None = unsaid(None)
    """Tokens of each of an encoder-decoder's targets; null means `sequence_length`."""
    batch: Batch = unsaid(Batch())  # noqa: RUF009  # a frozen value
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step and rank (with pipelining: those in flight come out of these)."""
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    finetuning: Finetuning = Finetuning()
    attention: Literal["eager", "sdpa", "flash_attention_2", "flex"] = "sdpa"
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    loss: Loss = Loss()  # noqa: RUF009  # a frozen value
    compile: bool = False
    parallelism: Parallelism = Parallelism()
    offload: Offload = Offload()
    allocator: Allocator = field(default_factory=Allocator)
    inference: Inference = Inference()
    framework_options: FrozenMapping = field(default_factory=FrozenMapping)
    """Switches that only one framework has; each must be a known convention of `framework` (catalog/frameworks.toml)."""

    def __post_init__(self) -> None:
        require_positive(
            self, "micro_batch_size", "sequence_length", "decoder_sequence_length", "gradient_accumulation_steps"
        )
        self._check_size()
        self._check_batch()
        self.loss.reference_beside(adapters=self.finetuning.method != "full")
        self._check_layout()

    @property
    def reference(self) -> Reference:
        """Where the loss has a reference's log-probabilities from (`loss.reference`, or what its kind needs)."""
        return self.loss.reference_beside(adapters=self.finetuning.method != "full")

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch that are no padding."""
        return self.batch.num_tokens or self.micro_batch_size * self.sequence_length

    def _check_size(self) -> None:
        """Refuse what nobody runs."""
        tokens, longest = self.micro_batch_size * self.sequence_length, max(self.micro_batch_size, self.sequence_length)
        if tokens > MOST_TOKENS:
            name = "sequence_length" if longest == self.sequence_length else "micro_batch_size"
            raise SpecError(
                f"{name}={longest} makes micro_batch_size × sequence_length={tokens:,} tokens and must leave them at most "
                f"{MOST_TOKENS:,}; lower it.",
                parameter=name,
                value=longest,
            )
        if self.parallelism.world_size > MOST_RANKS:
            raise SpecError(
                f"parallelism of {self.parallelism.world_size:,} ranks must be of at most {MOST_RANKS:,}; lower "
                f"data_parallel_size={self.parallelism.data_parallel_size} or another of its sizes.",
                parameter="parallelism.data_parallel_size",
                value=self.parallelism.data_parallel_size,
            )

    def _check_batch(self) -> None:
        most, asked = self.micro_batch_size * self.sequence_length, self.batch.num_tokens
        if asked is not None and (asked > most or self.batch.form == "rows"):
            rule = (
                f"exceeds micro_batch_size × sequence_length={most}; raise one of them"
                if asked > most
                else "needs rows with padding, or none; set batch.form to masked or padding_free"
            )
            raise SpecError(f"batch.num_tokens={asked} {rule}.", parameter="batch.num_tokens", value=asked)
        self._check_lengths()

    def _check_lengths(self) -> None:
        shortest, batch = self.batch.shortest_sequence, self.batch
        if shortest is None and batch.seed:
            raise SpecError(
                f"batch.seed={batch.seed} draws the lengths that batch.shortest_sequence asks for; give it or leave the "
                "seed out.",
                parameter="batch.seed",
                value=batch.seed,
            )
        if shortest is not None and (shortest > self.sequence_length or batch.num_tokens is not None):
            rule = (
                f"exceeds sequence_length={self.sequence_length}, the longest; lower it"
                if shortest > self.sequence_length
                else f"draws how many tokens a step has, and batch.num_tokens={batch.num_tokens} fixes it; leave one out"
            )
            raise SpecError(
                f"batch.shortest_sequence={shortest} {rule}.", parameter="batch.shortest_sequence", value=shortest
            )

    def _check_layout(self) -> None:
        layout, architecture = self.parallelism, self.architecture
        t, p = layout.tensor_parallel_size, layout.pipeline_parallel_size
        if architecture.num_attention_heads % t:
            raise SpecError(
                f"tensor_parallel_size={t} does not divide num_attention_heads={architecture.num_attention_heads} of "
                f"{architecture.name!r}; use a divisor of {architecture.num_attention_heads}.",
                parameter="parallelism.tensor_parallel_size",
                value=t,
            )
        if p == 1 and layout.virtual_pipeline_stages > 1:
            raise SpecError(
                f"parallelism.virtual_pipeline_stages={layout.virtual_pipeline_stages} divides the stages of a "
                "pipeline, and pipeline_parallel_size=1 is none; use 1, or a larger pipeline_parallel_size.",
                parameter="parallelism.virtual_pipeline_stages",
                value=layout.virtual_pipeline_stages,
            )
        if layout.zero_stage and layout.sharding in ("fsdp1", "fsdp2", "hsdp") and self.framework != "megatron":
            raise SpecError(
                f"parallelism.sharding={layout.sharding!r} and zero_stage={layout.zero_stage} shard the same things, the "
                "one of PyTorch, the other of DeepSpeed; set sharding: none or zero_stage: 0.",
                parameter="parallelism.sharding",
                value=layout.sharding,
            )
        num_stages = p * layout.virtual_pipeline_stages
        if layout.pipeline_layers:
            if len(layout.pipeline_layers) != num_stages or sum(layout.pipeline_layers) != architecture.num_hidden_layers:
                raise SpecError(
                    f"parallelism.pipeline_layers={list(layout.pipeline_layers)} must list {num_stages} stages that add "
                    f"up to num_hidden_layers={architecture.num_hidden_layers} of {architecture.name!r}.",
                    parameter="parallelism.pipeline_layers",
                    value=list(layout.pipeline_layers),
                )
        elif architecture.num_hidden_layers % num_stages:
            raise SpecError(
                f"pipeline_parallel_size={p} × virtual_pipeline_stages={layout.virtual_pipeline_stages} does not divide "
                f"num_hidden_layers={architecture.num_hidden_layers} of {architecture.name!r}; use a divisor or give "
                "parallelism.pipeline_layers.",
                parameter="parallelism.pipeline_parallel_size",
                value=p,
            )
        if self.sequence_length % layout.sequence_sharing_ranks:
            raise SpecError(
                f"sequence_length={self.sequence_length} is not divisible by the ranks that share it "
                f"(context_parallel_size={layout.context_parallel_size}"
                + (f" × tensor_parallel_size={t}" if layout.sequence_parallel else "")
                + "); use a multiple.",
                parameter="sequence_length",
                value=self.sequence_length,
            )
        if architecture.moe is None and layout.expert_parallel_size > 1:
            raise SpecError(
                f"expert_parallel_size={layout.expert_parallel_size} needs a mixture-of-experts architecture and "
                f"{architecture.name!r} is dense; use 1.",
                parameter="parallelism.expert_parallel_size",
                value=layout.expert_parallel_size,
            )
        if architecture.moe is not None and architecture.moe.num_experts % layout.expert_parallel_size:
            raise SpecError(
                f"expert_parallel_size={layout.expert_parallel_size} does not divide num_experts="
                f"{architecture.moe.num_experts} of {architecture.name!r}; use a divisor.",
                parameter="parallelism.expert_parallel_size",
                value=layout.expert_parallel_size,
            )

    @cached_property
    def config_hash(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON: equal jobs, equal hashes."""
        return hashlib.sha256(canonical_json(job_to_mapping(self)).encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> TrainingJob:
        """The same job with `changes`."""
        return replace(self, **changes)


def canonical_json(value: object) -> str:
    """`value` as JSON with sorted keys and no spaces, for hashing and for CSV cells."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def job_to_mapping(job: TrainingJob) -> dict[str, Any]:
    """The job as a plain mapping, every default written out; `dialects.job_file.job_from_mapping` reads it back."""
    mapping: dict[str, Any] = to_mapping(job)
    return mapping


def job_in_words(job: TrainingJob) -> str:
    """The architecture's name, then whatever differs from the defaults, as a job file would say it (versions left out)."""
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
