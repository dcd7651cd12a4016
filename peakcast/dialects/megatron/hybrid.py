"""Megatron-LM's hybrids: patterns of state-space, attention and feed-forward layers, and the mixer's sizes.

Source: megatron-core 0.20 `ssm/mamba_hybrid_layer_allocation.py` (symbols), `transformer/transformer_config.py` and
megatron/training/arguments.py (mamba_state_dim 128, mamba_head_dim 64, mamba_num_groups 8), `ssm/mamba_mixer.py` (expand 2,
a convolution over 4 tokens). megatron-core 0.12 has ratios in the place of a pattern.
"""

from __future__ import annotations

from peakcast.dialects.common.translation import Settings
from peakcast.jobs.architecture import StateSpace

SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
CONV_KERNEL = 4
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")


def hybrid_pattern(settings: Settings) -> str:
    """The symbols of all layers, without separators of pipeline stages and without the part for multi-token prediction."""
    return _whole_pattern(settings).replace("|", "").split("/")[0]


def is_hybrid(settings: Settings) -> bool:
    """Whether the flags describe a hybrid: by a flag that only hybrids have, or by a layer specification of Mamba's."""
    given = [settings.given(key) for key in (*PATTERNS, *RATIOS, "is_hybrid_model", "mamba_num_heads")]
    return any(given) or "mamba" in settings.text("spec")


def _whole_pattern(settings: Settings) -> str:
    given = [settings.text(key) for key in PATTERNS]
    pattern = next(filter(None, given), "")
    return pattern.strip("\\\"' ") or _spread(settings)  # without the extra quotes that YAML and shells need


def _spread(settings: Settings) -> str:
    """The layers of a hybrid that is described by the shares of its attention and feed-forward layers, or by nothing but
    Mamba's layer specification: each kind at equal distances, attention first, the rest state-space layers; "" if it is
    described in neither way. Source: megatron-core 0.12 `ssm/mamba_hybrid_layer_allocation.py` `_allocate_auto`."""
    attention, feed_forward = (settings.number(key) for key in RATIOS)
    layers = settings.integer("num_layers")
    if layers is None or (attention is None and feed_forward is None and "mamba" not in settings.text("spec")):
        return ""
    kinds = ["M"] * layers
    for symbol, ratio, ends in (("*", attention, 1), ("-", feed_forward, 0)):
        count, places = round(layers * (ratio or 0.0)), kinds.count("M")
        if not 0 <= count <= places:
            raise settings.refuse(RATIOS[0], f"and {settings.spell(RATIOS[1])} must be shares of at most 1 together", ratio)
        distance = left = (places - count) / max(count + ends, 1)
        for layer in range(layers) if count else ():
            if kinds[layer] != "M":
                continue
            kinds[layer], left = (symbol, left + distance) if left < 0.5 else ("M", left - 1)
    return "".join(kinds)


def hybrid_parts(settings: Settings) -> tuple[str, ...]:
    """The kind of each layer; () if a kind is not modelled, for which a note is added."""
    pattern = hybrid_pattern(settings)
    whole = _whole_pattern(settings)
    others = sorted(set(pattern) - SYMBOLS.keys())
    layers = settings.integer("num_layers")
    reason = ""
    if not pattern:
        reason = "without a layer pattern"
    elif others:
        reason = f"with the layers {' '.join(others)} in its pattern"
    elif "/" in whole:
        reason = "with multi-token prediction in its pattern"
    elif layers is not None and layers != len(pattern):
        reason = f"whose pattern has {len(pattern)} layers, not num-layers={layers}"
    elif settings.switch("multi_latent_attention"):
        reason = "with multi-latent attention"
    if not reason and "E" in pattern and not settings.integer("num_experts", least=0):
        raise settings.refuse("num_experts", "must be given for the layers E of the hybrid's pattern")
    if reason:
        settings.notes.unsupported.append(f"A hybrid (Mamba) model {reason} is not modelled.")
        return ()
    return tuple(SYMBOLS[symbol] for symbol in pattern)


def state_space(settings: Settings, hidden: int, tensor: int) -> StateSpace:
    """The Mamba-2 mixer. Raises: SpecError naming the flag that cannot be divided over `tensor` ranks."""
    head_dim, groups = settings.size("mamba_head_dim", 64), settings.size("mamba_num_groups", 8)
    heads = settings.integer("mamba_num_heads")
    inner = heads * head_dim if heads else 2 * hidden
    if inner % head_dim:
        raise settings.refuse("mamba_head_dim", f"must divide the inner width {inner}, twice hidden-size", head_dim)
    heads = inner // head_dim
    for key, number in (("mamba_num_groups", groups), ("mamba_num_heads", heads)):
        if number % tensor:
            raise settings.refuse(key, f"must be a multiple of tensor-model-parallel-size={tensor}", number)
    return StateSpace(
        version=2,
        inner_size=inner,
        state_size=settings.size("mamba_state_dim", 128),
        conv_kernel=CONV_KERNEL,
        num_heads=heads,
        num_groups=groups,
        norm="gated",
    )
