"""Packages that only some commands need: which extra of peakcast installs each, and the error if one is missing.

`pip install peakcast` installs what a prediction needs (`dependencies` of pyproject.toml). Every function of the API that
needs more calls `need` first, so that a missing package is reported at once.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from peakcast.core.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Package:
    """A package by its name for pip, and the extra of peakcast that installs it."""

    name: str
    extra: str


PACKAGES = {
    "sklearn": Package("scikit-learn", "fit"),
    "scipy": Package("scipy", "fit"),
    "matplotlib": Package("matplotlib", "report"),
    "jinja2": Package("jinja2", "report"),
    "mlflow": Package("mlflow", "track"),
    "pandas": Package("pandas", "track"),
    "torch": Package("torch", "collect"),
    "transformers": Package("transformers", "collect"),
    "cloudpickle": Package("cloudpickle", "collect"),
    "gradio": Package("gradio", "web"),
    "mcp": Package("mcp", "mcp"),
}
"""The module that is imported -> its package."""

USES = {
    "fit": "fitting and judging calibrations",
    "report": "pictures and reports",
    "track": "recording in MLflow",
    "collect": "measuring, traces, dry runs and recording recipes",
    "web": "the web page",
    "mcp": "the server for assistants",
}
"""Extra -> its use, as shown by `peakcast doctor`."""


def is_installed(module: str) -> bool:
    """Whether the top-level `module` can be imported. It is only searched, not imported."""
    return importlib.util.find_spec(module) is not None


def need(what: str, *modules: str) -> None:
    """Refuse `what` (such as "a trace") unless all top-level `modules`, keys of `PACKAGES`, can be imported.

    Raises: MissingPackageError naming every missing package and the one command that installs them.
    """
    missing = [PACKAGES[module] for module in modules if not is_installed(module)]
    if not missing:
        return
    names = [package.name for package in missing]
    extras = ",".join(dict.fromkeys(package.extra for package in missing))
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    raise MissingPackageError(
        f"{what} needs {listed}, which {'are' if names[1:] else 'is'} not installed here; install "
        f"{'them' if names[1:] else 'it'} with: {command(extras)}.",
        parameter="extra",
        value=extras,
    )


def command(extras: str) -> str:
    """The command that adds `extras` (one, or several with commas) to the installed peakcast."""
    return f"pip install 'peakcast[{extras}]'"


def missing_extras() -> list[str]:
    """The extras with a package that is not installed here, in the order of `USES`."""
    return [
        extra
        for extra in USES
        if not all(is_installed(module) for module, package in PACKAGES.items() if package.extra == extra)
    ]
