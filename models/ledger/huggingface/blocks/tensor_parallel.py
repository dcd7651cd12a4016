"""What tensor parallelism adds to a Hugging Face block: narrower matrices, and the collectives around them.

Source: transformers 5.17 `distributed/tensor_parallel.py`, torch 2.13 `distributed/tensor/parallel/style.py` and
`distributed/tensor/_redistribute.py`. Both use DTensors, whose collectives make new tensors. Along any dimension but the
first, a gather is followed by a `cat` of its parts, and a scatter is preceded by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.parameters.tensor import ParameterTensor
from peakcast.models.ledger.tape.tape import Output, Tape, Tensor
from peakcast.networks.families import family_of

Split = Literal["", "columns", "rows"]
"""How a matrix is split: not at all, by its outputs, or by its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How the network looks on one rank of a tensor-parallel group; the default is a rank that holds everything."""

    ranks: int = 1
    sequence: bool = False
    """Whether between the matrices each rank has only its part of the sequence."""
    table: bool = False
    """Whether the token table is split by rows (always if the lm_head shares it)."""
    table_reduced: bool = False
    """Whether FSDP or DDP takes this rank's rows out of the table's gradient as soon as it exists; every rank makes it for
    all rows. Otherwise each operation of the optimizer does so, and the whole gradient lives until then."""
    loss: bool = False
    """Whether the loss is computed on logits that stay split by vocabulary."""
    makes_weights: bool = False
    """Whether DDP makes the split weights from plain ones in each forward. They are then not leaves, so autocast caches no
    narrow copies of them (torch 2.13 `tensor/parallel/ddp.py` _reconstruct_dtensor)."""
    whole_parts: frozenset[str] = frozenset()
    """Parts of a layer that gather the outputs of their column-split matrices, and split them again before the last
    matrix."""

    def layer(self, architecture: Architecture) -> Architecture:
        """The architecture of a rank's part of a layer: its heads (at least one, even if there are fewer than ranks), and
        its part of the feed-forward."""
        if self.ranks == 1:
            return architecture
        if "self_attn" not in self.whole_parts:
            architecture = replace(
                architecture,
                num_attention_heads=architecture.num_attention_heads // self.ranks,
                num_key_value_heads=max(1, architecture.num_key_value_heads // self.ranks),
            )
        if "mlp" not in self.whole_parts:
            architecture = replace(architecture, intermediate_size=max(1, architecture.intermediate_size // self.ranks))
        return architecture

    def gathers(self, name: str) -> bool:
        """Whether the outputs of the column-split matrix `name` are gathered."""
        return name.partition(".")[0] in self.whole_parts

    def part(self, size: int) -> int:
        """Length of the first rank's part of a dimension; no rank has more."""
        return -(-size // self.ranks)

    def shape(self, tensor: ParameterTensor) -> tuple[int, ...]:
        """Shape of the first rank's part of a parameter."""
        dim = tensor.tensor_parallel_dim
        if self.ranks == 1 or dim is None or tensor.role == "norm" or (tensor.role == "embedding" and not self.table):
            return tensor.shape
        return (*tensor.shape[:dim], self.part(tensor.shape[dim]), *tensor.shape[dim + 1 :])


WHOLE = TensorParallel()


def tensor_parallel(job: TrainingJob) -> TensorParallel:
    """How the job's framework splits: `base_model_tp_plan` in transformers, torchtitan's plan in a torch loop."""
    layout = job.parallelism
    if layout.tensor_parallel_size == 1:
        return WHOLE
    return TensorParallel(
        ranks=layout.tensor_parallel_size,
        sequence=layout.sequence_parallel,
        table=job.framework == "torch" or job.architecture.tie_word_embeddings,
        table_reduced=layout.num_replicas > 1 and (layout.pipeline_parallel_size == 1 or layout.sharding == "none"),
        loss=bool(conventions(job).get("loss_parallel")),
        makes_weights=layout.num_replicas > 1 and layout.sharding == "none",
        whole_parts=frozenset(family_of(job.architecture).modules.gathered_parts if job.framework == "huggingface" else ()),
    )


def gather_sequence(tape: Tape, x: Tensor, group: TensorParallel, name: str) -> Tensor:
    """x for the whole sequence, of which each rank has a part; backward sums and scatters."""
    if not group.sequence:
        return x
    whole = x.num_bytes * group.ranks
    return tape.operation(
        f"{name}.all_gather",
        [x],
        whole,
        gradients=[(x, x.num_bytes)],
        forward_temporary_bytes=whole,
        backward_temporary_bytes=whole,
    )


def enter_columns(tape: Tape, x: Tensor, group: TensorParallel, name: str) -> Tensor:
    """x before a matrix that is split by columns; if all ranks have all of x, backward sums their gradients."""
    if group.ranks == 1 or group.sequence:
        return x
    return tape.operation(f"{name}.all_reduce_gradient", [x], Output.view(x))


def leave_rows(tape: Tape, x: Tensor, group: TensorParallel, name: str) -> Tensor:
    """The sum over ranks of the outputs of a matrix that is split by rows; with `sequence`, each rank's part of it."""
    if group.ranks == 1:
        return x
    if not group.sequence:
        return tape.operation(f"{name}.all_reduce", [x], x.num_bytes, gradients=[(x, None)])
    return tape.operation(
        f"{name}.reduce_scatter",
        [x],
        Output(x.num_bytes // group.ranks, kind="reduce_scatter"),
        gradients=[(x, x.num_bytes)],
        forward_temporary_bytes=x.num_bytes,
        backward_temporary_bytes=x.num_bytes,
    )


def gather_columns(tape: Tape, x: Tensor, whole_bytes: int, name: str) -> Tensor:
    """All columns of x, of which each rank has some; backward takes this rank's part of the gradient."""
    return tape.operation(
        f"{name}.all_gather", [x], whole_bytes, gradients=[(x, x.num_bytes)], forward_temporary_bytes=whole_bytes
    )


def split_columns(tape: Tape, x: Tensor, group: TensorParallel, name: str) -> Tensor:
    """This rank's part of x, of which every rank has all columns; backward gathers."""
    return tape.operation(
        f"{name}.split",
        [x],
        x.num_bytes // group.ranks,
        gradients=[(x, x.num_bytes)],
        backward_temporary_bytes=x.num_bytes,
    )
