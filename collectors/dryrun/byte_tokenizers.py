"""Replaces encodings that tiktoken cannot download by encodings that make one token of each byte."""

from __future__ import annotations

import functools
from typing import Any

from peakcast.collectors.dryrun.imports import when_imported
from peakcast.collectors.dryrun.noted import Notes

TEXT_ENDS = {"cl100k_base": (100257, 100277), "o200k_base": (199999, 200019), "o200k_harmony": (199999, 201088)}
"""Encoding -> (id of the token that ends a text, number of all tokens). Source: tiktoken 0.14
tiktoken_ext/openai_public.py."""
GPT2 = (50256, 50257)
"""The same for gpt2 and r50k_base. p50k_base has 24 more tokens, for blanks."""
MODELS = {"gpt-4o": "o200k_base", "gpt-4": "cl100k_base", "gpt-3.5": "cl100k_base"}
"""Beginning of a model's name -> its encoding; all other models get GPT-2's."""


def install(notes: Notes) -> None:
    """Change tiktoken when the script imports it; each replacement is reported to `notes`."""
    when_imported("tiktoken", functools.partial(_in_tiktoken, notes=notes))


def _in_tiktoken(module: Any, notes: Notes) -> None:
    fetch, fetch_of_model = module.get_encoding, module.encoding_for_model

    def encoding(name: str) -> Any:
        end, size = TEXT_ENDS.get(name, GPT2)
        notes.add(
            "script_part_skipped",
            "command",
            f"tiktoken cannot fetch the encoding {name}: one of as many tokens stood in, which makes a token of each byte.",
        )
        special = {"<|endoftext|>": end, **({"<|endofprompt|>": size - 1} if size - 1 > end else {})}
        ranks = {bytes([number]): number for number in range(256)}
        return module.Encoding(name=name, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)

    def get_encoding(encoding_name: str) -> Any:
        try:
            return fetch(encoding_name)
        except (OSError, ValueError):  # requests' errors are OSErrors
            return encoding(encoding_name)

    def encoding_for_model(model_name: str) -> Any:
        try:
            return fetch_of_model(model_name)
        except (OSError, ValueError):
            return encoding(next((name for begin, name in MODELS.items() if model_name.startswith(begin)), "gpt2"))

    module.get_encoding, module.encoding_for_model = get_encoding, encoding_for_model
