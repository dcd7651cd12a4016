"""Whatever stands in a configuration, reading it ends in a job or in a sentence, never in a traceback."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.errors import PeakcastError
from peakcast.core.fields import flat
from peakcast.dialects.axolotl import keys as axolotl_keys
from peakcast.dialects.common.pasted import Pasted, nested
from peakcast.dialects.llamafactory import job as llamafactory
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import DIALECTS, ReadOptions, translated
from peakcast.doors.questions import translation_of

RECORDED = Path(__file__).parent / "recorded"
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [10**30, -(10**30), 0.5, float("inf"), float("nan"), "", "auto", "x", "1e9", "-1", [], [None], {}, {"a": 1}]
    ),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
)
FILES = {
    path: opened(path)
    for path in sorted(RECORDED.rglob("*"))
    if path.is_file() and path.name not in ("README.md", "expected.yaml", "dpo_lora.sh")
}
SLOW = settings(max_examples=150)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@SLOW
@given(st.data())
def test_a_changed_value_is_read_or_refused(data):
    pasted = FILES[data.draw(st.sampled_from(list(FILES)))]
    values = flat(pasted.values)
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(JUNK)
    with suppress(PeakcastError):
        options = ReadOptions(model=data.draw(st.sampled_from([None, "llama-3.1-8b"])))
        translated(replace(pasted, values=nested(values)), options)


@SLOW
@given(st.data())
def test_a_changed_section_is_read_or_refused(data):
    pasted = FILES[data.draw(st.sampled_from(list(FILES)))]
    key = data.draw(st.sampled_from(sorted(pasted.values)))
    with suppress(PeakcastError):
        translated(replace(pasted, values={**pasted.values, key: data.draw(JUNK)}), ReadOptions(num_gpus=8))


@SLOW
@given(st.data())
def test_any_file_is_read_or_refused_as_any_dialect(data):
    pasted = FILES[data.draw(st.sampled_from(list(FILES)))]
    with suppress(PeakcastError):
        translated(pasted, ReadOptions(dialect=data.draw(st.sampled_from(list(DIALECTS))), model="llama-3.1-8b"))


@SLOW
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    with suppress(PeakcastError):
        translation_of(text + "\n")


@SLOW
@given(st.data())
def test_a_damaged_script_is_read_or_refused(data):
    text = (RECORDED / "megatron" / "llama3_8b_fp8.sh").read_text(encoding="utf-8")
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 40))
    with suppress(PeakcastError):
        translation_of(
            text[:start] + data.draw(st.text(alphabet="\"'$(){}[]\\`#;&| \n-a1", max_size=4)) + text[start + length :]
        )


@SLOW
@given(st.dictionaries(st.text(max_size=12), JUNK, max_size=4))
def test_any_mapping_is_read_or_refused(values):
    with suppress(PeakcastError):
        translated(Pasted(values=values))


KEYS = {
    RECORDED / "axolotl" / "llama3_70b_qlora_fsdp.yaml": axolotl_keys.KERNELS
    | axolotl_keys.TRAINING
    | axolotl_keys.LESS
    | dict.fromkeys(axolotl_keys.MESH.values())
    | axolotl_keys.ADAPTER
    | dict.fromkeys(axolotl_keys.IGNORED),
    RECORDED / "llamafactory" / "llama3_lora_sft.yaml": llamafactory.UNSUPPORTED
    | llamafactory.TRAINING
    | llamafactory.ADAPTER
    | llamafactory.OPTIMIZERS
    | dict.fromkeys(llamafactory.IGNORED),
}


@pytest.mark.parametrize("path", KEYS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("value", [True, False, None, 3, "x", "true", [1], {"a": 1}], ids=repr)
def test_every_key_of_a_table_is_read_or_refused(path, value):
    for key in sorted(KEYS[path]):
        with suppress(PeakcastError):
            translation = translated(replace(FILES[path], values={**FILES[path].values, key: value}))
            assert key not in translation.unknown
