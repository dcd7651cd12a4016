"""Replaces packages that have no part in training, if a script imports them and this machine lacks them: loggers and
metrics by objects that do nothing, tiktoken by encodings that make a token of each byte."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from peakcast.collectors.dryrun import byte_tokenizers
from peakcast.collectors.dryrun.noted import DIRECTLY, RunFindings, asker

REPORTERS = (
    *("wandb", "tensorboardX", "mlflow", "comet_ml", "neptune", "swanlab", "trackio", "clearml", "aim"),
    *("evaluate", "nltk", "rouge_score", "sacrebleu", "seqeval", "jiwer", "colorama", "termcolor", "watermark", "dotenv"),
)
"""Packages whose functions may do nothing: loggers, metrics, colours and files of settings."""
TOKENIZER = "tiktoken"
BOARD = "torch.utils.tensorboard"


class Nothing:
    """Takes any call, attribute or item, and returns itself; as a number it is 0."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return self

    def __getitem__(self, _: Any) -> Nothing:
        return self

    def __setitem__(self, *_: Any) -> None:
        """Keeps nothing."""

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        """Lets errors pass."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __float__(self) -> float:
        return 0.0

    def __fspath__(self) -> str:
        return "nothing"

    def __format__(self, _: str) -> str:
        return ""


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for the script's own imports, after all other finders have failed. Libraries do not find them, so that
    they do as they would without the package."""

    def __init__(self, notes: RunFindings) -> None:
        self._notes = notes
        self._found: set[str] = set()

    def install(self) -> None:
        """Install the finder, for later imports of the script."""
        sys.meta_path.append(self)
        if importlib.util.find_spec("tensorboard") is None:
            torch.utils.tensorboard = sys.modules[BOARD] = _StubModule(BOARD)  # type: ignore[attr-defined]
            sys.modules[BOARD].used = functools.partial(self._say, "tensorboard")  # type: ignore[attr-defined]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The specification of a stub, if the script itself has asked for its package."""
        package = fullname.partition(".")[0]
        if package not in (*REPORTERS, TOKENIZER) or (package not in self._found and asker(DIRECTLY) is None):
            return None
        if package not in self._found:
            self._found.add(package)
            self._say(package)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """The stub."""
        return byte_tokenizers.module() if spec.name == TOKENIZER else _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: `create_module` has filled the stub."""

    def _say(self, package: str) -> None:
        does = "encodings that make a token of each byte" if package == TOKENIZER else "functions that do nothing"
        self._notes.add("script_part_skipped", "command", f"{package} is not installed here: {does} stood in for it.")


class _StubModule(types.ModuleType):
    """A module with anything in it; `used` is called when an attribute of it is read."""

    used: Callable[[], None] = staticmethod(lambda: None)

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        self.used()
        return Nothing()
