"""The config.json of a network on the Hugging Face hub: from the local cache, else from the hub by one GET request without
a token and, if that is refused, by a second one with the user's token."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import Any

from peakcast.core.errors import CatalogError
from peakcast.core.units import MIB
from peakcast.dialects.common.text import files_are_read, parse, read_text

TIMEOUT_SECONDS = 5.0
MAX_BYTES = MIB
"""A config.json larger than this is refused (the largest known are under 100 kB)."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_REFUSED = (401, 403)
_WHY = {
    401: "it is not there, or is gated or private",
    403: "it is gated: its licence must be accepted first",
    404: "there is no such model",
}


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like a hub id: owner/name."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def config_of(hub_id: str) -> dict[str, Any]:
    """The config.json of `hub_id`, from the cache that Hugging Face's libraries share, else from the hub.

    `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` hold as in huggingface_hub. The user's token is sent only
    if the hub refuses a request without one, huggingface_hub is installed, and the question is the user's own (not one from
    another person, see `text.no_files`).

    Raises: CatalogError saying which of the two failed and what to do instead.
    """
    cached = _cached(hub_id)
    if cached is not None:
        return _mapping(read_text(cached, named=False), hub_id)
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _refusal(hub_id, "HF_HUB_OFFLINE is set, so the hub is not asked")
    url = f"{endpoint}/{hub_id}/resolve/main/config.json"
    text, why = _fetched(url)
    if why in (_WHY[code] for code in _REFUSED):
        token, way_in = _token(f"{endpoint}/{hub_id}")
        if token:
            text, why = _fetched(url, token)
        why = f"{why}. {way_in}" if why else ""
    if why == _WHY[404]:  # an adapter's repository need not have one
        adapter, missing = _fetched(f"{endpoint}/{hub_id}/resolve/main/adapter_config.json")
        text, why = (adapter, "") if not missing else (text, why)
    if why:
        raise _refusal(hub_id, f"{endpoint} gives no config.json: {why}")
    return _mapping(text, hub_id)


def _token(page: str) -> tuple[str, str]:
    """(the user's token or "", a sentence on how to get access to the gated model whose page is `page`)."""
    accept = f"Accept its licence on {page}"
    if not files_are_read():  # the question may come from another person
        return "", f"{accept} and give its config.json"
    try:
        from huggingface_hub import get_token
    except ImportError:
        return "", f"{accept}, install huggingface_hub and log in (hf auth login): your token is used then"
    token = get_token() or ""
    if token:
        return token, f"{accept} with the account of your token, which does not open it yet"
    return "", f"{accept} and log in (hf auth login, or HF_TOKEN): your token is used then"


def _cached(hub_id: str) -> Path | None:
    """The newest cached config.json of `hub_id`, an adapter's before a network's; None if there is none."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    try:
        snapshots = cache / f"models--{hub_id.replace('/', '--')}" / "snapshots"
        found = list(snapshots.glob("*/adapter_config.json")) or list(snapshots.glob("*/config.json"))
        return max(found, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


@functools.lru_cache(maxsize=256)
def _fetched(url: str, token: str = "") -> tuple[str, str]:
    """(the text at `url` or "", the reason if there is none). Each URL is requested only once, failures included."""
    import http.client
    import urllib.error
    import urllib.request

    if not url.startswith(("https://", "http://")):
        return "", "HF_ENDPOINT is no web address"
    request = urllib.request.Request(url, headers={"User-Agent": "peakcast", "Accept": "application/json"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # not sent to other hosts on a redirect
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            body, end = b"", time.monotonic() + 3 * TIMEOUT_SECONDS
            while len(body) <= MAX_BYTES and time.monotonic() < end and (part := answer.read1(2**16)):
                body += part
    except urllib.error.HTTPError as error:
        return "", _WHY.get(error.code, f"it answers {error.code} {error.reason}")
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", None) or error
        return "", f"it cannot be reached ({' '.join(str(reason).split()) or type(error).__name__})"
    if time.monotonic() >= end:
        return "", "the answer takes too long"
    if len(body) > MAX_BYTES:
        return "", f"the answer is larger than {MAX_BYTES:,} bytes"
    return body.decode("utf-8", "replace"), ""


def _mapping(text: str, hub_id: str) -> dict[str, Any]:
    value = parse(text, "JSON", f"the config.json of {hub_id}")
    if not isinstance(value, dict):
        raise _refusal(hub_id, "its config.json is no mapping")
    return value


def _refusal(hub_id: str, why: str) -> CatalogError:
    return CatalogError(
        f"architecture={hub_id!r} is neither in the catalog nor in the Hugging Face cache, and {why}. Give the network's "
        "config.json instead: by its path (--model, also beside a configuration) or as its mapping.",
        parameter="architecture",
        value=hub_id,
    )
