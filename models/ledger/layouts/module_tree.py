"""Where in a network a tensor or an operation belongs: blocks and their kinds, and the modules inside them as paths.

A tensor's name and an operation's label both begin with the path of their module ("self_attn.q_proj.weight",
"self_attn.q_proj.lora.add"). Layouts ask here what a name says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

ADAPTER = "lora"
"""How the names of an adapter's matrices begin, and the name of what its own code computes."""
LORA_A, LORA_B = f"{ADAPTER}_A", f"{ADAPTER}_B"
"""The two matrices of an adapter, in the order in which they run."""
ORIGINAL = "original_module"
"""What peft calls a module of which it trains a copy (`modules_to_save`); the copy has the module's own name here."""
CLONE = "clone"
"""The copy of a quantised matrix's output that peft makes for its adapter (peft 0.21 `tuners/lora/bnb.py`)."""
SUB_LAYERS = ("self_attn", "mlp")
"""Attention and feed-forward, the two parts of a layer beside its norms."""
WEIGHT, BIAS = "weight", "bias"
SUFFIXES = (WEIGHT, BIAS)


class BlockKind(Enum):
    """What a block of the network is. Both stacks of an encoder-decoder have an embedding and a head, under one name each:
    what ends the encoder is a head too."""

    EMBEDDING = "embedding"
    LAYER = "layers"
    HEAD = "head"
    OTHER = ""
    """A block of another network, such as a reference model, or one that represents all of this one."""


_OF_NAME = {"embedding": BlockKind.EMBEDDING, "head": BlockKind.HEAD}


@lru_cache(maxsize=4096)
def block_of(module: str) -> BlockKind:
    """The kind of the block that runs under the name `module`."""
    return _OF_NAME.get(module) or (BlockKind.LAYER if module.startswith(f"{BlockKind.LAYER.value}.") else BlockKind.OTHER)


def layer_index(module: str) -> int:
    """The index of the layer that runs under the name `module`."""
    return int(module.removeprefix(f"{BlockKind.LAYER.value}."))


class TransformerStack(Enum):
    """One of an encoder-decoder's two stacks."""

    ENCODER = "encoder"
    DECODER = "decoder"


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A module of a block, by the names of the modules around it and its own, the outermost first."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, dotted: str) -> ModulePath:
        """The path of a dotted name."""
        return cls(tuple(dotted.split(".")))

    @property
    def name(self) -> str:
        """The module's own name."""
        return self.names[-1]

    @property
    def parent(self) -> ModulePath:
        """The module around it."""
        return ModulePath(self.names[:-1])

    @property
    def outermost(self) -> str:
        """The name of the module that contains all the others; "" if the path has one name only."""
        return self.names[0] if len(self.names) > 1 else ""

    def is_inside(self, other: ModulePath) -> bool:
        """Whether this is `other` or a part of it."""
        return self.names[: len(other.names)] == other.names

    def child(self, name: str) -> ModulePath:
        """The module `name` of this one."""
        return ModulePath((*self.names, name))

    def beyond(self, other: ModulePath) -> tuple[str, ...]:
        """The names inside `other`, which this is a part of."""
        return self.names[len(other.names) :]

    @property
    def adapted(self) -> ModulePath:
        """The module itself without an adapter that the path leads into, and without the copy of its output."""
        names = self.names
        for index, name in enumerate(names[1:], start=1):
            if name.startswith(ADAPTER):
                names = names[:index]
                break
        return ModulePath(names[:-1] if names[-1] == CLONE else names)

    @property
    def is_adapter(self) -> bool:
        """Whether it leads into an adapter."""
        return any(name.startswith(f"{ADAPTER}_") for name in self.names)

    def __str__(self) -> str:
        return ".".join(self.names)


ENCODER = ModulePath((TransformerStack.ENCODER.value,))
TOKEN_TABLE = ModulePath(("embed_tokens",))
LM_HEAD = ModulePath(("lm_head",))


@lru_cache(maxsize=4096)
def module_of(tensor: str) -> ModulePath:
    """The module that a tensor of this name belongs to. A quantised weight's parts are named after the weight, so their
    names may end with it twice."""
    names = tensor.split(".")
    for suffix in ("weight", "weight", "bias"):
        if len(names) > 1 and names[-1] == suffix:
            names.pop()
    return ModulePath(tuple(names))


@lru_cache(maxsize=4096)
def path_of(label: str) -> ModulePath:
    """The path that the label of an operation is: its module, and what the operation does there."""
    return ModulePath.of(label)
