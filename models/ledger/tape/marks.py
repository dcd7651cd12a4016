"""Operations of a block that code outside the block looks up.

A block marks them while it appends them to its tape (`Tape.marked`), and its template says at which instants they run
(`Template.forward_marks`, `Template.backward_marks`) and which tensors they make (`Template.made_by`). A mark says what an
operation is, its name only where it is: it begins with the path of its module, which layouts (`layouts/module_tree.py`) and
offloading read.
"""

from __future__ import annotations

from enum import Enum, auto


class Mark(Enum):
    """What an operation is to code outside its block."""

    LM_HEAD = auto()
    """The lm_head with what belongs to its module, or a loss that includes it; Megatron-LM's output layer."""
    TIED_TABLE = auto()
    """Backward adds the two gradients of a table that embedding and lm_head share."""
    LOG_PROBABILITIES = auto()
    """Preference training's head multiplies by parts of the lm_head's weight."""
    OUTPUT_SCALING = auto()
    """A decoder scales its output before the lm_head."""
    LAST_POSITION = auto()
    """Generation takes the last position's hidden states."""
    NEXT_TOKEN_LOGITS = auto()
    """Generation makes the logits from which the next token is chosen."""
    CACHED_CAST = auto()
    """Autocast makes a narrow copy of a weight, which its cache keeps until forward ends."""
    WIDENED_OUTPUTS = auto()
    """accelerate makes the outputs fp32, once autocast's context has been left."""
    ATTENTION = auto()
    """A Hugging Face layer's attention, with its projections, without the norm before it."""
    ROTATION = auto()
    """A layer rotates its queries and keys."""
    KEY_CACHE = auto()
    VALUE_CACHE = auto()
    """A layer updates its cache."""
    CACHED = auto()
    """What a layer caches in training: the model's outputs refer to it."""
    CACHED_NARROW = auto()
    """... in a dtype that accelerate makes fp32."""
    RELATIVE_POSITIONS = auto()
    """A stack's first layer looks up the bias of relative positions."""
    NORM = auto()
    """A norm of a Hugging Face network, whose input is the stream itself; a projection's is a view of it."""
    ATTENTION_ADD = auto()
    """A Megatron-LM layer adds attention's output to the residual stream."""
    RESIDUAL_ADD = auto()
    """A Megatron-LM layer adds any sub-layer's output to the residual stream."""
    FEED_FORWARD_NORM = auto()
    """The norm before a Megatron-LM feed-forward."""
    RECOMPUTED_FEED_FORWARD = auto()
    """A whole recomputed feed-forward, written down as one operation."""
    RECOMPUTED_EXPERTS = auto()
    """A whole recomputed mixture of experts, written down as one operation."""
    FEED_FORWARD = auto()
    """A Megatron-LM layer's dense feed-forward, with its norm and its residual addition."""
    ROUTER = auto()
    """The router of a Megatron-LM mixture of experts, with the norm before it and the shared expert."""
    EXPERTS = auto()
    """What a Megatron-LM mixture of experts does with routed tokens, with its residual addition."""
    PERMUTATION = auto()
    """A mixture of experts sorts tokens, or their probabilities, by expert before it sends them."""
    DISPATCH = auto()
    """A mixture of experts sends tokens to their experts."""
