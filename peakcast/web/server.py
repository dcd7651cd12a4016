"""Serves the page and the accuracy reports on this machine (loopback unless another host is given)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.doors.destinations import checkout_folder
from peakcast.web.guard import Guard
from peakcast.web.page import page

MOST_CONNECTIONS = 200
"""Most connections at a time; a page has two."""


def application(reports: Path | None, host: str = "127.0.0.1") -> Any:
    """The ASGI application. `reports`: the folder of the accuracy reports, None if there is none; `host`: the name under
    which it is served."""
    import gradio as gr
    from fastapi import FastAPI
    from starlette.staticfiles import StaticFiles

    app = FastAPI(docs_url=None, redoc_url=None)
    if reports is not None:
        app.mount("/reports", StaticFiles(directory=reports, html=True))
    system = ["system-ui", "sans-serif"]  # Gradio's own themes fetch their fonts from the network
    theme = gr.themes.Default(font=system, font_mono=["ui-monospace", "monospace"])
    style = files("peakcast.web").joinpath("style.css").read_text(encoding="utf-8")
    mounted = gr.mount_gradio_app(
        app,
        page(reports=reports is not None),
        path="/",
        theme=theme,
        css=style,
        footer_links=[],
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        max_file_size=0,
    )
    return Guard(mounted, host)


def serve(host: str, port: int, reports: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Serve until interrupted; `say` gets the address. Raises: SpecError when the port cannot be had."""
    import os
    import socket

    import uvicorn

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the page promises that no data leaves this machine

    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise SpecError(
            f"port={port} of {host} cannot be opened: {error.strerror}; name another with --port (0: any free one).",
            parameter="port",
            value=port,
        ) from error
    app = application(reports, host)
    say(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/")
    config = uvicorn.Config(app, log_level="warning", limit_concurrency=MOST_CONNECTIONS, ws="none", server_header=False)
    uvicorn.Server(config).run(sockets=[listening])


def reports_folder() -> Path | None:
    """The folder of the accuracy reports, if this is a checkout that has them; else None."""
    try:
        folder = checkout_folder("reports")
    except Exception:
        return None
    return folder if (folder / "index.html").is_file() else None
