"""The collectives of one pipeline stage (`CollectiveCall`), and the argument of the rules that list them (`StageOfJob`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.answers.explanation import CollectiveName
from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.pipeline import Chunk, stage_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """`count` calls per micro-batch, or per iteration if `once` is set."""

    axis: str
    function: CollectiveName
    what: str
    where: str
    group_size: int
    message_bytes: int
    count: int
    source: str
    once: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """A value that is equal for the same kind of communication on another stage."""
        return (self.axis, self.function, self.what, self.where)


@dataclass(frozen=True, slots=True)
class StageOfJob:
    """One pipeline stage of a job. `rows`: tokens of a micro-batch on one context-parallel rank."""

    job: TrainingJob
    stage: int
    chunks: tuple[Chunk, ...]
    convention: Mapping[str, Any]

    @classmethod
    def of(cls, job: TrainingJob, stage: int) -> StageOfJob:
        """The share of pipeline stage `stage`."""
        chunks = stage_chunks(job.architecture.num_hidden_layers, job.parallelism, stage)
        return cls(job, stage, chunks, conventions(job))

    @property
    def rows(self) -> int:
        return self.job.micro_batch_size * self.job.sequence_length // self.job.parallelism.context_parallel_size

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the hidden states that are sent: of the narrower of compute and weights, as autocast
        computes in the compute dtype."""
        precision = self.job.precision
        return int(max(2, min(DTYPE_BYTES[precision.parameters], DTYPE_BYTES[precision.compute])))

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one whole [rows, hidden_size] tensor."""
        return self.rows * self.job.architecture.hidden_size * self.element_bytes

    @property
    def layers(self) -> list[int]:
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @property
    def is_first(self) -> bool:
        return any(chunk.is_first for chunk in self.chunks)

    @property
    def is_last(self) -> bool:
        return any(chunk.is_last for chunk in self.chunks)

    def recomputed_layers(self) -> int:
        """Number of layers of the stage whose whole forward is recomputed in backward."""
        recompute = self.job.activation_checkpointing
        if recompute.mode != "full":
            return 0
        if self.job.framework != "megatron":
            return sum(layer % recompute.every_n_layers == 0 for layer in self.layers)
        if recompute.method == "block":
            return sum(min(recompute.num_layers or 1, len(chunk.layers)) for chunk in self.chunks)
        return len(self.layers)

    def recomputed_attention(self) -> int:
        """Number of layers whose attention core is recomputed in backward."""
        selective = self.job.activation_checkpointing.mode == "selective"
        modules = self.job.activation_checkpointing.modules
        return len(self.layers) if selective and (not modules or "core_attn" in modules) else self.recomputed_layers()
