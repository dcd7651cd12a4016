"""Which modules outside of a network's blocks FSDP gathers together, as accelerate chooses them by class and by what the
network calls its embedding, its final norm and its lm_head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from peakcast.collectors.tracing.stretches import blocks_of

CLASS, TABLE, TAIL, ELSEWHERE = "class", "table", "tail", "elsewhere"
"""A module of a class that is never split, as blocks are; the token embedding; final norm and lm_head, with the token
embedding where they share its weight; modules outside of these that hold one of their weights."""


class ModuleGroup(NamedTuple):
    """Modules that are gathered together, by name, in accelerate's order, and their parameters."""

    role: str
    modules: tuple[str, ...]
    weights: tuple[Any, ...]


def wraps_blocks(model: Any) -> bool:
    """Whether FSDP makes a unit of each block: accelerate and the Trainer use the classes that the network names."""
    named = _classes(model)
    return all(type(block).__name__ in named for _, block in blocks_of(_network(model)))


def groups_of(model: Any) -> list[ModuleGroup]:
    """The groups outside of the blocks. A tail has its table's weight too if they share one. FSDP2 cannot make them where a
    module of a class contains the table, or where modules elsewhere hold it."""
    names = {id(part): name for name, part in model.named_modules()}
    found = [_group(CLASS, names, part) for part in _of_classes(model)]
    table, head, norm = _part(model, "get_input_embeddings"), _part(model, "get_output_embeddings"), _final_norm(model)
    shared = table is not None and head is not None and getattr(head, "weight", None) is table.weight
    if table is not None and not shared:
        found.append(_group(TABLE, names, table))
    tail = [part for part in (norm, table if shared else None, head) if part is not None]
    found += [_group(TAIL, names, *tail)] if tail else []
    grouped = {id(weight): weight for group in found for weight in group.weights}
    within = {id(one) for group in found for name in group.modules for one in model.get_submodule(name).modules()}
    others = [
        (name, weight)
        for name, part in model.named_modules()
        for weight in part.parameters(recurse=False)
        if id(part) not in within and id(weight) in grouped
    ]
    if others:
        names_of, weights = zip(*others, strict=True)
        found.append(ModuleGroup(ELSEWHERE, tuple(names_of), tuple(weights)))
    return found


def _group(role: str, names: dict[int, str], *parts: Any) -> ModuleGroup:
    weights = {id(weight): weight for part in parts for weight in part.parameters()}
    return ModuleGroup(role, tuple(names[id(part)] for part in parts), tuple(weights.values()))


def _of_classes(model: Any) -> Iterator[Any]:
    """The outermost modules of a class that is never split, which are not blocks and have none inside."""
    named, blocks = _classes(model), [block for _, block in blocks_of(_network(model))]
    inside = {id(part) for block in blocks for part in block.modules()}
    blocks_by_id = {id(block) for block in blocks}
    for part in model.modules():
        own = {id(one) for one in part.modules()}
        if type(part).__name__ in named and id(part) not in inside and own.isdisjoint(blocks_by_id):
            inside |= own
            yield part


def _classes(model: Any) -> frozenset[str]:
    return frozenset(getattr(_network(model), "_no_split_modules", None) or ())


def _network(model: Any) -> Any:
    """The network without an adapter's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _part(model: Any, asked: str) -> Any:
    """The part that the model's method `asked` returns; None if the model does not have it."""
    try:
        return getattr(model, asked)()
    except NotImplementedError:
        return None


def _final_norm(model: Any) -> Any:
    """The final norm that accelerate finds; None without an accelerate that looks for one."""
    try:
        from accelerate.utils.fsdp_utils import _find_final_norm
    except ImportError:
        return None
    return _find_final_norm(model)
