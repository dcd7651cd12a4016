"""Packages that peakcast can do without until a certain command is asked for: which extra brings each, and the sentence
where one is missing.

`pip install peakcast` brings what a prediction needs (`dependencies` of pyproject.toml). Every door that needs more calls
`need` before it does anything else, so that a missing package is said in the first second.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from peakcast.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Package:
    """A package as pip calls it, and the extra of peakcast that brings it."""

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
"""By the module that is imported."""

USES = {
    "fit": "fitting and judging calibrations",
    "report": "pictures and reports",
    "track": "recording in MLflow",
    "collect": "measuring, traces, dry runs and recording recipes",
    "web": "the web page",
    "mcp": "the server for assistants",
}
"""What each extra is for, in the words of `peakcast doctor`."""


def is_installed(module: str) -> bool:
    """Whether the top-level `module` can be imported. It is looked for, not imported."""
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
    """The command that adds `extras` (one, or several with commas) to the peakcast that is installed."""
    return f"pip install 'peakcast[{extras}]'"


def missing_extras() -> list[str]:
    """The extras of which a package is not installed here, in the order of `USES`."""
    return [
        extra
        for extra in USES
        if not all(is_installed(module) for module, package in PACKAGES.items() if package.extra == extra)
    ]
