"""Shorter imports of transformers leave it as it is."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from peakcast.collectors.machine import quick_imports


def test_what_files_export_is_read_from_the_end():
    transformers = pytest.importorskip("transformers")
    from transformers.utils import import_utils

    if not hasattr(import_utils, "fetch__all__"):
        pytest.skip("transformers before 5 imports in another way")
    whole = inspect.unwrap(import_utils.fetch__all__)  # conftest.py shortens it
    module = SimpleNamespace(fetch__all__=whole)
    quick_imports._read_ends(module)
    files = sorted(Path(transformers.__file__).parent.glob("models/[a-d]*/*.py"))
    texts = ["", '__all__ = ["a"]', '__all__ = ["a"]\n__all__ = [\n    "b",\n]\n', "# __all__\n", "x\r\n__all__ = ('a',)"]
    texts += [file.read_text(encoding="utf-8") for file in files]
    assert len(texts) > 100
    for text in texts:
        assert module.fetch__all__(text) == whole(text)


def test_assignments_are_those_of_scipy():
    pytest.importorskip("scipy")
    rows, columns = quick_imports._assigned([[4, 1], [2, 3]])
    assert (list(rows), list(columns)) == ([0, 1], [1, 0])
