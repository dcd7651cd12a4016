"""The flat parameter of an FSDP1 unit: where the unit's tensors lie in it, and how large each rank's equal part is.

Source: torch 2.4-2.13 `distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`, `_get_aligned_numel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.core.units import round_up
from peakcast.models.ledger.layouts.base import StoredTensor

ALIGNMENT_BYTES = 16
"""With `use_orig_params`, each tensor begins at a multiple of this in the flat parameter."""


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """The sizes of one unit's flat parameter. It has one dtype; packed weights (4 bits) count as the bytes they are."""

    offsets: tuple[int, ...]
    """The element at which each tensor begins."""
    numel: int
    """Elements before sharding, padding included."""
    part_numel: int
    """Elements of a rank's part."""
    whole_bytes: int
    """Bytes before sharding."""
    part_bytes: int
    """Bytes of a rank's part as it is stored."""
    gathered_part_bytes: int
    """Bytes of a rank's part in the dtype in which it is gathered."""

    @classmethod
    def of(cls, tensors: Sequence[StoredTensor], shards: int, *, keeps_originals: bool) -> FlatParameter:
        """The flat parameter of `tensors`. `keeps_originals`: `use_orig_params`, with which the whole is padded to equal
        parts too, so that a reduction needs no padding."""
        offsets, numel = [], 0
        for tensor in tensors:
            if keeps_originals:
                numel = round_up(numel, ALIGNMENT_BYTES // tensor.gathered_bytes)
            offsets.append(numel)
            numel += tensor.numel
        if keeps_originals:
            numel = round_up(numel, shards)
        part_numel = -(-numel // shards)
        stored, gathered = [t.element_bytes for t in tensors], [t.gathered_bytes for t in tensors]
        return cls(
            tuple(offsets),
            numel,
            part_numel,
            numel * stored[0] if len(set(stored)) == 1 else _total_bytes(tensors, stored),
            part_numel * stored[0] if len(set(stored)) == 1 else -(-_total_bytes(tensors, stored) // shards),
            part_numel * gathered[0] if len(set(gathered)) == 1 else -(-_total_bytes(tensors, gathered) // shards),
        )


def _total_bytes(tensors: Sequence[StoredTensor], widths: Sequence[int]) -> int:
    """Bytes of `tensors` with elements of these widths."""
    return sum(tensor.numel * width for tensor, width in zip(tensors, widths, strict=True))
