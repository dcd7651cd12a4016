"""A package that is missing is a sentence that says what needs it and how to install it."""


import json

import pytest

from peakcast.collectors.packages import imported
from peakcast.errors import CollectorError


def test_what_is_there_is_imported():
    assert imported("json", "json", parameter="task", value="train") is json


def test_what_is_missing_is_named_with_what_needs_it():
    with pytest.raises(CollectorError) as raised:
        imported("no_such_package.inner", "no-such-package>=2", parameter="optimizer.name", value="lion")
    assert str(raised.value).startswith("optimizer.name='lion' needs no-such-package>=2 (")
    assert "pip install 'no-such-package>=2'." in str(raised.value)
    assert raised.value.parameter == "optimizer.name"
    assert raised.value.value == "lion"
