"""Shortens the generation of transformers' decoders: the first tokens and the last ones are generated, not those between.

What grows from token to token is the cache of keys and values, and most is held with the last token. A dry run spends as
long on a token as on a step's forward, so that a thousand of them would take minutes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.machine.imports import when_imported

FEW = 8
"""Tokens that are generated at either end."""


def install(notes: RunFindings) -> None:
    """Shorten what is generated in this process, and note it."""
    when_imported("transformers.generation.utils", functools.partial(_shorten, notes))


def _shorten(notes: RunFindings, module: Any) -> None:
    generate = module.GenerationMixin.generate

    @functools.wraps(generate)
    def generate_ends(
        self: Any, inputs: Any = None, generation_config: Any = None, *arguments: Any, **keywords: Any
    ) -> Any:
        ids = inputs if inputs is not None else keywords.get("input_ids")
        config = _config(self, generation_config, keywords)
        left_out = _left_out(self, ids, config) if not arguments else 0
        if left_out <= 0:
            return generate(self, inputs, generation_config, *arguments, **keywords)
        given = {name: value for name, value in keywords.items() if name not in ("input_ids", *_ASKED)}
        begins = copy.deepcopy(config)
        begins.max_new_tokens, begins.return_dict_in_generate = FEW, True
        begun = generate(self, ids, begins, **given)
        cache, sequences = begun.past_key_values, begun.sequences
        del begun
        sequences = torch.cat([sequences, sequences[:, -1:].expand(-1, left_out)], dim=-1)
        _grow(cache, left_out)
        if (mask := given.get("attention_mask")) is not None:
            given["attention_mask"] = torch.cat(
                [mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], dim=-1
            )
        ends = copy.deepcopy(config)
        ends.max_new_tokens = FEW
        notes.add(
            "script_part_skipped",
            "generate",
            f"of {config.max_new_tokens:,} tokens that are generated the first and the last {FEW} were followed, the last "
            "with the whole cache of keys and values; what the allocator keeps in pieces from those between is not seen.",
            "more",
        )
        return generate(self, sequences, ends, past_key_values=cache, **given)

    module.GenerationMixin.generate = generate_ends


def _grow(cache: Any, num_tokens: int) -> None:
    """Let `cache` have as many tokens more, as if they had been generated."""
    for layer in cache.layers:
        keys, values = (one[..., -1:, :].expand(*one.shape[:-2], num_tokens, -1) for one in (layer.keys, layer.values))
        layer.update(keys, values)


_ASKED = ("max_new_tokens", "max_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "num_beams")
"""Settings of generation that scripts give as arguments."""


def _config(network: Any, given: Any, keywords: dict[str, Any]) -> Any:
    """The settings of one call: those of the network, of its configuration, and of its arguments."""
    config = copy.deepcopy(given if given is not None else network.generation_config)
    config.update(**{name: keywords[name] for name in _ASKED if name in keywords})
    return config


def _left_out(network: Any, ids: Any, config: Any) -> int:
    """Number of tokens between the first and the last ones; 0 if the network does not generate in the usual way: a decoder
    with a growing cache, which gives the sequences alone."""
    usual = (
        isinstance(ids, torch.Tensor)
        and not network.config.is_encoder_decoder
        and config.use_cache is not False
        and config.cache_implementation in (None, "dynamic")
        and (config.num_beams or 1) == 1
        and not config.return_dict_in_generate
        and not config.assistant_early_exit
    )
    if not usual:
        return 0
    if config.max_new_tokens is None:
        if config.max_length is None:
            return 0
        config.max_new_tokens = config.max_length - ids.shape[1]
        config.max_length = None
    return int(config.max_new_tokens) - 2 * FEW
