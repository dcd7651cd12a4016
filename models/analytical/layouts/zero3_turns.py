"""In which order ZeRO-3's hooks meet a block's modules, those without parameters too: each of them fetches ahead.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`, `_register_deepspeed_module`; peft 0.21
`tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from peakcast.models.analytical.layouts.base import StoredTensor

ACTIVATIONS = ("silu", "gelu", "act_fn", "activation")
"""What a feed-forward's activation is called, which is a module of its own."""

ADAPTED = " with its adapter"
CALLED = {"post_attention_layernorm": "pre_feedforward_layernorm", "norm": "final_norm"}
"""Modules whose operations are named after what they do."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A module's forward or backward, from the instant `begins` until before `ends`."""

    begins: int
    ends: int
    tensors: tuple[StoredTensor, ...] = ()
    """Its own parameters; a module that holds others has a turn of its own, without any."""
    releases: bool = True
    """Not where no gradient flows on: the hook that would release hangs on its input's."""
    computes_again: bool = False
    """Forward once more, for checkpointing."""


def turns_of(labels: Sequence[str], begins: int, tensors: Sequence[StoredTensor], *, around: int = 0) -> list[Turn]:
    """The turns of modules in a block's forward or backward, whose operations have these labels, the first at `begins`.
    What no label names is used throughout, and has the first turn. `around`: how many modules are entered before."""
    modules: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight").removesuffix(".bias")
        does = CALLED.get(name, name)
        if does != name and any(label.startswith(f"{does}.") for label in labels):
            name = does if f"{does}.weight" not in {t.name for t in tensors} else name
        modules.setdefault(name, []).append(tensor)
    turns = [Turn(begins, begins + 1)] * around
    inside: tuple[str, ...] = ()
    last, named = "", set[str]()
    for index, label in enumerate(labels, begins):
        owner = _owner(label, modules)
        path = tuple(_path(label, owner, modules))
        for module in path:
            if module == owner:
                if {last, owner} == {owner.removesuffix(".lora_A"), f"{last.removesuffix('.lora_A')}.lora_A"}:
                    turns.append(Turn(index, index + 1))  # between a Linear and its adapter, dropout
                if owner != last or owner not in inside:
                    turns.append(Turn(index, index + 1, tuple(modules[owner])))
                else:
                    turns[-1] = Turn(turns[-1].begins, index + 1, turns[-1].tensors)
            elif module not in inside:  # peft reads the dtype of lora_A, which is then this module's too, and not released
                read = modules.get(f"{module.removesuffix(ADAPTED)}.lora_A", ()) if module.endswith(ADAPTED) else ()
                turns.append(Turn(index, index + 1, tuple(read), releases=not read))
        inside, last = path, owner or last
        named.add(owner)
    rest = tuple(t for name, found in modules.items() if name not in named for t in found)
    return [Turn(begins, begins + len(labels), rest), *turns]


def _owner(label: str, modules: Mapping[str, object]) -> str:
    """The module with parameters whose operation this is, "" for none: what adds an adapter is of neither part."""
    found = [name for name in modules if label == name or label.startswith(f"{name}.")]
    owner = max(found, key=len, default="")
    return "" if label.startswith(f"{owner}.lora.") else owner


def _path(label: str, owner: str, modules: Mapping[str, object]) -> Iterator[str]:
    """The modules within the block that run this operation, the outermost first."""
    outer = label.partition(".")[0]
    if outer != label and outer not in modules:
        yield outer
    linear = label.partition(".lora")[0]
    if f"{linear}.lora_A" in modules:
        yield linear + ADAPTED
    if label.rpartition(".")[2] in ACTIVATIONS:
        yield label
    if owner:
        yield owner
