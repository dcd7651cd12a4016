"""Replaces texts that a script downloads and that cannot be fetched by texts of words, with a note for the user."""

from __future__ import annotations

import email.message
import io
import urllib.parse
import urllib.request
import urllib.response
from collections.abc import Callable
from typing import Any

from peakcast.collectors.dryrun.noted import RunFindings, asker
from peakcast.collectors.dryrun.token_files import words
from peakcast.collectors.machine.imports import when_imported

BY_ITSELF = frozenset({"peakcast", "requests", "urllib"})
"""Packages between a line of the script and a download that it makes."""

OF_THE_HUB = "/resolve/"
"""Part of the addresses from which libraries fetch a tokenizer's words, which other stand-ins replace."""


class Downloads:
    """Texts in the place of downloads that fail; each is reported to `notes`. Other kinds of files fail as they would."""

    def __init__(self, notes: RunFindings) -> None:
        self._notes = notes

    def install(self) -> None:
        """Install it in this process."""
        urllib.request.urlopen = self._opening(urllib.request.urlopen)
        when_imported("requests.sessions", self._in_requests)

    def _opening(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def opened(url: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return fetch(url, *arguments, **keywords)
            except OSError:
                address = url.full_url if isinstance(url, urllib.request.Request) else str(url)
                if not self._stands_in(address):
                    raise
                return urllib.response.addinfourl(io.BytesIO(words().encode()), email.message.Message(), address, 200)

        return opened

    def _in_requests(self, module: Any) -> None:
        fetch = module.Session.request

        def request(session: Any, method: Any, url: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return fetch(session, method, url, *arguments, **keywords)
            except OSError:  # as all errors of requests are
                if not self._stands_in(str(url)):
                    raise
                answer = module.Response()
                answer.status_code, answer.url, answer.encoding = 200, str(url), "utf-8"
                answer.raw = io.BytesIO(words().encode())
                return answer

        module.Session.request = request

    def _stands_in(self, address: str) -> bool:
        """Whether a text stands in for what is at `address`."""
        path = urllib.parse.urlparse(address).path
        name = path.rpartition("/")[2]
        if not name.endswith(".txt") or (asker(BY_ITSELF) is None and OF_THE_HUB in path):
            return False
        self._notes.add(
            "script_part_skipped", "command", f"{name} cannot be downloaded here: a text of words stood in for it."
        )
        return True
