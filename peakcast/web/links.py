"""A question as the query of a link, and back: the same link asks the same question on any server."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict

from peakcast.core.errors import SpecError
from peakcast.web.asking import MOST_CHARACTERS, PageState

MOST_BYTES = 4 * MOST_CHARACTERS + 10_000
"""Largest size of an unpacked question: the text in UTF-8 and its knobs."""


def to_query(asked: PageState) -> str:
    """The value of `q`: letters, digits, - and _ only."""
    state = {**asdict(asked), "knobs": dict(asked.knobs)}
    packed = zlib.compress(json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode(), 9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def from_query(query: str) -> PageState:
    """The question of a link; it is unpacked only up to the largest size of a question. Raises: SpecError for anything
    else."""
    try:
        packed = base64.urlsafe_b64decode(query + "=" * (-len(query) % 4))
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError("it unpacks to more than a question")
        state = json.loads(data)
        asked = PageState(**state)
        texts = (asked.text, asked.model, asked.versions, asked.gpu)
        number = asked.num_gpus is None or type(asked.num_gpus) is int
        if not (all(isinstance(text, str) for text in texts) and isinstance(asked.knobs, dict) and number):
            raise ValueError("its parts have other types")
        return asked
    except (ValueError, TypeError, zlib.error) as error:
        raise SpecError(
            f"the link holds no question ({error}); it may have been cut. Ask anew and copy the new link.", parameter="q"
        ) from error
