"""In which order ZeRO-3's hooks run on a block's modules. Modules without parameters count too, since each may gather
ahead.

Source: DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`, `_register_deepspeed_module`; peft 0.21
`tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.networks.families import counted_as

ACTIVATIONS = ("silu", "relu", "gelu", "bloom_gelu", "act_fn", "activation")
"""Names of a feed-forward's activation, which is a module of its own."""
WITHIN = dict.fromkeys(("qkv_split", "relative_position", "relative_position_bucket"), "self_attn")
"""The modules of operations whose names do not tell it."""

FUNCTIONS = ("logits", "softcap")
"""First parts of operation names in the head that are not modules but the network's own code and the loss."""
ADAPTED = " with its adapter"
CALLED = {"post_attention_layernorm": "pre_feedforward_layernorm", "norm": "final_norm"}
"""Modules whose operations have a different name: module -> first part of the operation's name."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A module's forward or backward, from instant `begins` until before `ends`."""

    begins: int
    ends: int
    tensors: tuple[StoredTensor, ...] = ()
    """Its own parameters; a module that only contains others has none."""
    name: str = ""
    """The module's name, by which the order recognises it."""
    leaf: bool = False
    """Whether DeepSpeed treats it and all modules inside it as one."""
    done: Mapping[str, int] = field(default_factory=dict)
    """For a leaf: by tensor name, the instants at which their own operations end."""
    inside: tuple[StoredTensor, ...] = ()
    """If it is a layer or the network: the tensors of all modules inside it."""
    releases: bool = True
    """Whether it releases its tensors when it is done. False if no gradient flows on, as the releasing hook is on its
    input's gradient."""
    computes_again: bool = False
    """Whether it is a recomputation for checkpointing."""
    starts: bool = False
    """Whether the network's forward begins with it, whether or not a backward follows."""
    enters: bool = True
    """False for the second turn of a module that reads another module's weight and holds it until it is done."""
    stays: bool = False
    """Whether other modules cannot release what it holds before it is done, which is a second turn with `enters` false."""
    alone: bool = False
    """A module without weights, which is done when its operation is."""

    def later(self, instants: int) -> Turn:
        """The same turn, `instants` later."""
        done = {name: at + instants for name, at in self.done.items()} if self.done else self.done
        flags = self.releases, self.computes_again, self.starts, self.enters, self.stays, self.alone
        tensors, name, leaf, inside = self.tensors, self.name, self.leaf, self.inside
        return Turn(self.begins + instants, self.ends + instants, tensors, name, leaf, done, inside, *flags)


def turns_of(
    block: str,
    labels: Sequence[str],
    begins: int,
    tensors: Sequence[StoredTensor],
    *,
    around: int = 0,
    leaf: str = "",
    again: bool = False,
    backward: bool = False,
    family: str = "",
) -> list[Turn]:
    """The turns of the modules in a block's forward or backward. `labels`: its operations, the first at instant `begins`.
    Tensors that no label names are used throughout the block and belong to the first turn, except adapters, which are then
    switched off. `around`: how many modules are entered before. `leaf`: a module that has the parameters of all modules
    inside it. `again`: the block is recomputed. `family`: the network's `model_type`, which says what runs after what."""
    turns = _turns_from_0(block, tuple(labels), tuple(tensors), around, leaf, again, backward, family)
    return [turn.later(begins) for turn in turns]


@lru_cache(maxsize=4096)
def _turns_from_0(
    block: str,
    labels: tuple[str, ...],
    tensors: tuple[StoredTensor, ...],
    around: int,
    leaf: str,
    again: bool,
    backward: bool,
    family: str,
) -> tuple[Turn, ...]:
    """`turns_of`, with the first operation at 0."""
    modules: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight").removesuffix(".weight").removesuffix(".bias")  # quantised: two suffixes
        name = leaf if leaf and name.startswith(f"{leaf}.") else name
        does = CALLED.get(name, name)
        if does != name and any(f"{label}.".startswith(f"{does}.") for label in labels):
            name = does if f"{does}.weight" not in {t.name for t in tensors} else name
        modules.setdefault(name, []).append(tensor)
    turns = [Turn(0, 1, name=f"{block} within {depth}", inside=tensors) for depth in range(around)]
    switched_off = not any(".lora_A" in label for label in labels)
    entered: tuple[str, ...] = ()
    order = counted_as(family).modules
    last, inside, named, run_after = "", "", set[str](), order.run_after
    read_by = {module: tuple(modules.get(reads, ())) for module, reads in order.reads.items()}
    for index, label in enumerate(labels):
        owner = _owner(label, modules)
        left, linear = inside, label.partition(".lora")[0].removesuffix(".clone")
        inside = linear if linear in run_after else owner
        path = (leaf,) if leaf and owner == leaf else tuple(_path(label, owner, modules, family))
        done_with = [module for module in entered if module in read_by and module not in path]
        turns += [Turn(index - 1, index, read_by[module], f"{block} {module}", enters=False) for module in done_with]
        if inside != left:
            after = run_after.get(inside if backward else left, ())
            at = max(index - 1, 0) if backward else index  # dropout's own operation
            turns += [Turn(at, at + 1, name=f"{block} {name}", alone=True) for name in after]
        for module in path:
            if module == owner:
                if owner != last and owner.removesuffix(".lora_A") == last.removesuffix(".lora_A"):
                    dropout = f"{block} {owner.removesuffix('.lora_A')}.dropout"  # between a Linear and its adapter
                    turns.append(Turn(index, index + 1, name=dropout))
                if owner != last or owner not in entered:
                    own, of_leaf = tuple(modules[owner]), bool(leaf) and owner == leaf
                    held = own in read_by.values()
                    turns.append(Turn(index, index + 1, own, f"{block} {owner}", leaf=of_leaf, releases=not held))
                else:
                    turns[-1] = replace(turns[-1], ends=index + 1)
            elif module not in entered:  # peft reads lora_A's dtype here, so this module has that weight too, and keeps it
                read = modules.get(f"{module.removesuffix(ADAPTED)}.lora_A", ()) if module.endswith(ADAPTED) else ()
                done, holds = not read or switched_off, read_by.get(module, ())
                name = f"{block} {module}"
                turns.append(Turn(index, index + 1, (*read, *holds), name, releases=done and not holds, stays=bool(holds)))
                turns += [Turn(index, index + 1, name=f"{block} {module}.{name}") for name in run_after.get(module, ())]
        if leaf and owner == leaf:
            turns[-1] = replace(turns[-1], done={**turns[-1].done, label: index + 1})
        entered, last = path, owner or last
        named.add(owner)
    if not backward:
        ends = len(labels)
        turns += [Turn(ends - 1, ends, name=f"{block} {name}") for name in run_after.get(inside, ())]
    rest = tuple(t for name, found in modules.items() if name not in named and ".lora_" not in name for t in found)
    turns = [Turn(0, len(labels), rest, block, enters=bool(rest)), *turns]
    return tuple(replace(turn, computes_again=True) for turn in turns) if again else tuple(turns)


def within_first(turns: Sequence[Turn], again: Sequence[Turn], asks: int) -> list[Turn]:
    """The turns of a backward in which a recomputation runs. It starts when an operation, at instant `asks`, first reads a
    saved tensor: an operation of the first module with weights, which is done when that operation is, or a dropout before
    it, which is done first. `again`: the turns of the recomputation."""
    found = (index for index, turn in enumerate(turns) if index and turn.tensors and turn.releases)
    first = next(found, len(turns) - 1)
    begins = again[0].begins
    if turns[first].begins > asks:
        first = next(index for index, turn in enumerate(turns) if index and turn.begins > asks)
        before = [replace(turn, begins=begins, ends=begins + 1) for turn in turns[1:first]]
        done = [replace(turn, enters=False) for turn in turns[1:first][-1:] if turn.alone and turn.begins == asks]
        return [turns[0], *before, *again, *done, *turns[first:]]
    before = [replace(turn, begins=begins, ends=begins + 1) for turn in turns[1 : first + 1]]
    before[-1] = replace(before[-1], stays=True, releases=False)
    return [turns[0], *before, *again, replace(turns[first], enters=False), *turns[first + 1 :]]


def _owner(label: str, modules: Mapping[str, object]) -> str:
    """The module with parameters that runs the operation `label`, or "". Adding an adapter's output belongs to neither
    part, nor does copying a quantised matrix's output for it."""
    found = [name for name in modules if label == name or label.startswith(f"{name}.")]
    owner = max(found, key=len, default="")
    return "" if label.startswith((f"{owner}.lora.", f"{owner}.clone")) else owner


def _path(label: str, owner: str, modules: Mapping[str, object], family: str) -> Iterator[str]:
    """The modules inside the block that run the operation `label`, the outermost first."""
    parts = label.split(".")
    outer = WITHIN.get(label, parts[0] if len(parts) > 1 else "")
    code = counted_as(family)
    inline = code.layer.inline_feed_forward and outer == "mlp"
    if outer and outer not in modules and outer not in FUNCTIONS and not inline:
        yield outer
        around = code.modules.around_inner
        if around and "".join(parts[1:2]) not in around:
            yield f"{outer}.inner"
    linear = label.partition(".lora")[0].removesuffix(".clone")
    if f"{linear}.lora_A" in modules:
        yield linear + ADAPTED
    if not owner and len(parts) > 1 and parts[1].startswith(ACTIVATIONS):
        yield ".".join(parts[:2])
    if owner:
        yield owner
