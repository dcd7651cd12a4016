"""How Megatron-LM splits a model into pipeline stages, and the two small languages in which its flags describe it."""

from __future__ import annotations

import re

from peakcast.dialects.common.translation import Settings

MAX_STAGES = 4096
"""A layout text with more stages is a mistake; it is refused before it is expanded."""


def binary_pattern(text: str) -> list[int] | None:
    """The zeros and ones of a pattern such as `"([0]*3+[1]*11)"` (`*2` may follow the whole); None if it is no such
    pattern."""
    text = text.replace(" ", "")
    whole = re.fullmatch(r"\((.*)\)(?:\*(\d{1,4}))?", text)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    pattern: list[int] = []
    for part in inner.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if match is None:
            return None
        pattern += [int(digit) for digit in match[1].split(",")] * int(match[2] or 1)
    return pattern * times


def layout_stages(text: str) -> list[str] | None:
    """The stages of `--pipeline-model-parallel-layout`, in model order: `"Et*2|(tt|)*2tmL"` gives Ett, tt, tt, tmL.

    E is the embedding, t a decoder layer, m a multi-token-prediction layer, L the loss; `x*n` and `(...)*n` repeat.
    Backslashes, which launch scripts need before `|` and brackets, are ignored. None if the text has another form.
    """
    text = text.replace(" ", "").replace(",", "").replace("\\", "")
    for pattern in (r"\(([EtmL|]*)\)\*(\d{1,3})", r"([EtmL|])\*(\d{1,3})"):
        while match := re.search(pattern, text):
            text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
            if len(text) > MAX_STAGES:
                return None
    return text.split("|") if re.fullmatch(r"[EtmL|]+", text) else None


def virtual_stages(settings: Settings, num_layers: int, pipeline: int) -> tuple[int, tuple[int, ...]]:
    """(virtual stages per rank, layers of each stage in model order; empty if the split is even).

    Raises: SpecError naming the flag whose split is not possible.
    """
    layout, per_stage, stages = (
        settings.text("pipeline_model_parallel_layout"),
        settings.integer("num_layers_per_virtual_pipeline_stage"),
        settings.integer("num_virtual_stages_per_pipeline_rank"),
    )
    first, last = (
        settings.integer("decoder_first_pipeline_num_layers", least=0),
        settings.integer("decoder_last_pipeline_num_layers", least=0),
    )
    embedding = settings.switch("account_for_embedding_in_pipeline_split")
    loss = settings.switch("account_for_loss_in_pipeline_split")
    hybrid = settings.text("hybrid_layer_pattern")
    if layout:
        return _from_layout(settings, layout, num_layers, pipeline)
    if "|" in hybrid:
        counts = tuple(len(stage) for stage in hybrid.split("|"))
        if len(counts) % pipeline:
            raise settings.refuse("hybrid_layer_pattern", f"must have a multiple of {pipeline} stages")
        return len(counts) // pipeline, counts
    if first is not None or last is not None:
        return stages or 1, _uneven(settings, num_layers, pipeline, stages or 1, first, last)
    total = num_layers + embedding + loss
    if total % pipeline:
        what = " with the embedding and loss that are counted as layers" if embedding or loss else ""
        raise settings.refuse(
            "pipeline_model_parallel_size", f"does not divide num-layers={num_layers}{what}; use a divisor of {total}", 1
        )
    virtual = _equal_stages(settings, total, pipeline, stages, per_stage)
    if not embedding and not loss:
        return virtual, ()
    layers = [total // (pipeline * virtual)] * (pipeline * virtual)
    layers[0] -= embedding
    layers[-1] -= loss
    return virtual, tuple(layers)


def _equal_stages(settings: Settings, total: int, pipeline: int, stages: int | None, per_stage: int | None) -> int:
    """The virtual stages per rank, whose number or whose `per_stage` layers are given, if all of them have as many of the
    `total` layers. Raises: SpecError if they cannot."""
    of_rank = total // pipeline
    if per_stage is not None and of_rank % per_stage:
        raise settings.refuse(
            "num_layers_per_virtual_pipeline_stage",
            f"does not divide the {of_rank} layers of a pipeline stage; use a divisor of {of_rank}",
        )
    virtual = stages or (of_rank // per_stage if per_stage else 1)
    if total % (pipeline * virtual):
        raise settings.refuse(
            "num_virtual_stages_per_pipeline_rank",
            f"times pipeline-model-parallel-size={pipeline} does not divide {total} layers; use a divisor",
        )
    return virtual


def _from_layout(settings: Settings, layout: str, num_layers: int, pipeline: int) -> tuple[int, tuple[int, ...]]:
    stages = layout_stages(layout)
    if stages is None:
        raise settings.refuse(
            "pipeline_model_parallel_layout", "must be made of E, t, m, L, |, (...)*n; for example 'Et*2|t*2L'"
        )
    if any("m" in stage for stage in stages[:-1]):
        settings.notes.unsupported.append(
            f"pipeline-model-parallel-layout={layout!r} has multi-token prediction before the last stage, which is not "
            "modelled.",
            "pipeline-model-parallel-layout",
        )
    counts = tuple(stage.count("t") for stage in stages)
    if len(counts) % pipeline or sum(counts) != num_layers:
        raise settings.refuse(
            "pipeline_model_parallel_layout",
            f"has {len(counts)} stages and {sum(counts)} layers; it must have a multiple of "
            f"pipeline-model-parallel-size={pipeline} stages and num-layers={num_layers} layers",
        )
    return len(counts) // pipeline, counts


def _uneven(
    settings: Settings, num_layers: int, pipeline: int, virtual: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    key = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
    middle_ranks = pipeline - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle_ranks < 0 or middle < 0 or (middle % middle_ranks if middle_ranks else middle):
        raise settings.refuse(
            key, f"leaves {middle} of num-layers={num_layers} for {middle_ranks} other stages; they must divide evenly"
        )
    each = [middle // middle_ranks] * middle_ranks if middle_ranks else []
    ranks = [first] * (first is not None) + each + [last] * (last is not None)
    if any(layers % virtual for layers in ranks if layers is not None):
        raise settings.refuse(key, f"must be a multiple of the {virtual} virtual stages per rank")
    return tuple((layers or 0) // virtual for _ in range(virtual) for layers in ranks)
