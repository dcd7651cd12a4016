"""Replaces encodings that tiktoken cannot download, or tiktoken where it is absent, by encodings that make one token of
each byte."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.machine.imports import when_imported

TEXT_ENDS = {"cl100k_base": (100257, 100277), "o200k_base": (199999, 200019), "o200k_harmony": (199999, 201088)}
"""Encoding -> (id of the token that ends a text, number of all tokens). Source: tiktoken 0.14
tiktoken_ext/openai_public.py."""
GPT2 = (50256, 50257)
"""The same for gpt2 and r50k_base. p50k_base has 24 more tokens, for blanks."""
MODELS = {"gpt-4o": "o200k_base", "gpt-4": "cl100k_base", "gpt-3.5": "cl100k_base"}
"""Beginning of a model's name -> its encoding; all other models get GPT-2's."""


def install(notes: RunFindings) -> None:
    """Change tiktoken when the script imports it; each replacement is reported to `notes`."""
    when_imported("tiktoken", functools.partial(_in_tiktoken, notes=notes))


def _in_tiktoken(module: Any, notes: RunFindings) -> None:
    fetch, fetch_of_model = module.get_encoding, module.encoding_for_model

    def encoding(name: str) -> Any:
        notes.add(
            "script_part_skipped",
            "command",
            f"tiktoken cannot fetch the encoding {name}: one of as many tokens stood in, which makes a token of each byte.",
        )
        ranks = {bytes([number]): number for number in range(256)}
        return module.Encoding(name=name, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=_special(name))

    def get_encoding(encoding_name: str) -> Any:
        try:
            return fetch(encoding_name)
        except (OSError, ValueError):  # requests' errors are OSErrors
            return encoding(encoding_name)

    def encoding_for_model(model_name: str) -> Any:
        try:
            return fetch_of_model(model_name)
        except (OSError, ValueError):
            return encoding(_encoding_of(model_name))

    module.get_encoding, module.encoding_for_model = get_encoding, encoding_for_model


def _special(name: str) -> dict[str, int]:
    """The special tokens of the encoding `name`."""
    end, size = TEXT_ENDS.get(name, GPT2)
    return {"<|endoftext|>": end, **({"<|endofprompt|>": size - 1} if size - 1 > end else {})}


def _encoding_of(model_name: str) -> str:
    return next((name for begin, name in MODELS.items() if model_name.startswith(begin)), "gpt2")


def module() -> types.ModuleType:
    """A module with tiktoken's functions, where that is not installed."""
    made = types.ModuleType("tiktoken")
    vars(made).update(
        Encoding=Bytes, get_encoding=Bytes, encoding_for_model=lambda model_name: Bytes(_encoding_of(model_name))
    )
    return made


class Bytes:
    """The encoding `name`, with the methods of `tiktoken.Encoding` that scripts use."""

    def __init__(self, name: str = "gpt2", **_: Any) -> None:
        self.name = name
        self._special_tokens = _special(name)
        self.eot_token = self._special_tokens["<|endoftext|>"]
        self.max_token_value = max(self._special_tokens.values())
        self.n_vocab = self.max_token_value + 1
        self.special_tokens_set = set(self._special_tokens)

    def encode(self, text: str, **_: Any) -> list[int]:
        """One token for each byte; special tokens stay text."""
        return list(text.encode("utf-8", errors="replace"))

    encode_ordinary = encode

    def encode_batch(self, text: Iterable[str], **_: Any) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(one) for one in text]

    encode_ordinary_batch = encode_batch

    def encode_single_token(self, text_or_bytes: str | bytes) -> int:
        """The token of a special token's name, or of one byte."""
        known = self._special_tokens.get(str(text_or_bytes))
        return known if known is not None else self.encode(str(text_or_bytes))[0]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """The text of those tokens that are bytes."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes among the tokens."""
        return bytes(token for token in tokens if 0 <= token < 256)

    def decode_batch(self, batch: Iterable[Sequence[int]], **_: Any) -> list[str]:
        """`decode` of each."""
        return [self.decode(tokens) for tokens in batch]
