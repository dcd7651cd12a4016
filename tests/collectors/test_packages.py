"""A package that is missing is a sentence that says what needs it and how to install it."""


import importlib
import importlib.util
import json

import pytest

from peakcast.collectors.machine.packages import imported
from peakcast.collectors.stacks import build
from peakcast.core.errors import CollectorError
from peakcast.dialects.common.job_file import job_from_mapping


def test_what_is_there_is_imported():
    assert imported("json", "json", parameter="task", value="train") is json


def test_what_is_missing_is_named_with_what_needs_it():
    with pytest.raises(CollectorError) as raised:
        imported("no_such_package.inner", "no-such-package>=2", parameter="optimizer.name", value="lion")
    assert str(raised.value).startswith("optimizer.name='lion' needs no-such-package>=2 (")
    assert "pip install 'no-such-package>=2'." in str(raised.value)
    assert raised.value.parameter == "optimizer.name"
    assert raised.value.value == "lion"


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (ImportError("no datasets", name="datasets"), "pip install datasets."),  # which peakcast[collect] does not bring
        (ImportError("no peft", name="peft.tuners"), "pip install 'peakcast[collect]'."),
        (ImportError("`kernels` is not installed"), "install what it names."),
    ],
)
def test_what_a_stack_lacks_is_what_is_installed(monkeypatch: pytest.MonkeyPatch, error: ImportError, way_out: str) -> None:
    job = job_from_mapping({"architecture": "gpt2"})

    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(CollectorError) as raised:
        build(job, "cpu")
    assert str(raised.value).endswith(way_out)
