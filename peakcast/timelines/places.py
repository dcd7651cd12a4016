"""Places of a recorded network: the layers have odd numbers; what runs before, between and after them has even ones."""

from __future__ import annotations


def block_name(place: int, num_places: int) -> str:
    """The name of the block at a place of a network."""
    if place % 2:
        return f"layers.{place // 2}"
    return "embedding" if place == 0 else "head" if place == num_places - 1 else f"between.{place}"
