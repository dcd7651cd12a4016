"""Replaces texts and rows that a script downloads and that cannot be fetched by made-up ones, with a note for the user."""

from __future__ import annotations

import email.message
import io
import tempfile
import urllib.parse
import urllib.request
import urllib.response
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun import file_rows
from peakcast.collectors.dryrun.noted import RunFindings, asker
from peakcast.collectors.dryrun.token_files import words
from peakcast.collectors.machine.imports import when_imported

BY_ITSELF = frozenset({"peakcast", "requests", "urllib"})
"""Packages between a line of the script and a download that it makes."""

OF_THE_HUB = "/resolve/"
"""Part of the addresses from which libraries fetch a tokenizer's words, which other stand-ins replace."""


class Downloads:
    """Texts, and rows of `lengths` words, in the place of downloads that fail; each is reported to `notes`. Other kinds of
    files fail as they would."""

    def __init__(self, notes: RunFindings, lengths: tuple[int, int]) -> None:
        self._notes = notes
        self._lengths = lengths

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
                if (made := self._stands_in(address)) is None:
                    raise
                return urllib.response.addinfourl(io.BytesIO(made), email.message.Message(), address, 200)

        return opened

    def _in_requests(self, module: Any) -> None:
        fetch = module.Session.request

        def request(session: Any, method: Any, url: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return fetch(session, method, url, *arguments, **keywords)
            except OSError:  # as all errors of requests are
                if (made := self._stands_in(str(url))) is None:
                    raise
                answer = module.Response()
                answer.status_code, answer.url, answer.encoding = 200, str(url), "utf-8"
                answer.raw = io.BytesIO(made)
                return answer

        module.Session.request = request

    def _stands_in(self, address: str) -> bytes | None:
        """What stands in for what is at `address`; None if nothing does."""
        path = urllib.parse.urlparse(address).path
        name = path.rpartition("/")[2]
        if asker(BY_ITSELF) is None and OF_THE_HUB in path:
            return None
        if name.endswith(".txt"):
            made, said = words().encode(), "a text of words"
        elif file_rows.holds_rows(path):
            made, said = self._rows(name), f"{file_rows.NUM_ROWS} rows"
        else:
            return None
        sentence = f"{name} cannot be downloaded here: {said} stood in for it."
        self._notes.add("script_part_skipped", "command", sentence)
        return made

    def _rows(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file_rows.write(place := Path(folder) / "rows", name, *self._lengths)
            return place.read_bytes()
