"""What the server accepts: requests from its own page, of limited size, to the few addresses that the page needs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from peakcast.core.units import MIB

MOST_BODY_BYTES = 2 * MIB
"""Largest body of a request: a pasted configuration and its knobs take a tenth of that."""
POSTED_TO = ("/gradio_api/queue/join", "/gradio_api/call/ask", "/gradio_api/reset", "/gradio_api/cancel")
"""The only addresses that accept POST (Gradio 6 routes.py). Uploads are not among them: the page needs no files."""
CLOSED = (
    "/gradio_api/upload", "/gradio_api/file", "/gradio_api/proxy", "/gradio_api/stream", "/gradio_api/component_server",
    "/gradio_api/dev", "/gradio_api/vibe", "/gradio_api/custom_component", "/gradio_api/deep_link", "/login", "/monitoring",
)  # fmt: skip
"""Prefixes of Gradio's addresses that the page does not need."""
HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of every response. Gradio's own code needs inline scripts; no script comes from elsewhere."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """An ASGI application that wraps another one. `host` is the name on which the server was asked to listen."""

    def __init__(self, app: Any, host: str = "127.0.0.1") -> None:
        self._app = app
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        code, why = self._refusal(scope["method"], scope["path"], headers)
        if code:
            await _answer(send, code, why)
            return
        body = _Body(receive, send)
        await self._app(scope, body.receive, body.send)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """(status, sentence) with which a request is refused; (0, "") if it is accepted."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return 421, "this server answers under its address or localhost only; other names may be another site's trick."
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "another page may not ask this server."
        site = headers.get("sec-fetch-site", "none")
        if origin is None and method != "GET" and site not in ("same-origin", "none"):
            return 403, "another page may not ask this server."
        if path.startswith(CLOSED) or (method == "POST" and path not in POSTED_TO):
            return 404, "there is nothing here; the page takes texts and no files."
        if method not in ("GET", "HEAD", "POST"):
            return 405, "only GET, HEAD and POST are answered."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY_BYTES:
            return 413, f"a request has at most {MOST_BODY_BYTES:,} bytes."
        return 0, ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name)
        except ValueError:
            return host != "" and name in self._names if "[" not in host else False
        return True


class _Body:
    """A request's body, which is cut off if it is too long, and the response with this server's headers."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        return message if self._bytes <= MOST_BODY_BYTES else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message.get("headers", ()), *ours]}
        await self._send(message)


async def _answer(send: Send, code: int, why: str) -> None:
    headers = [(name.encode(), value.encode()) for name, value in {"content-type": "text/plain", **HEADERS}.items()]
    await send({"type": "http.response.start", "status": code, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})
