"""Shards merged into tables, tables found in folders: nothing is lost, and what fails leaves everything as it was."""

import os
import subprocess
import sys

import pytest

from peakcast.core.errors import RecordError
from peakcast.measurements import store


def test_merge_adds_and_never_loses(tmp_path, row, table):
    target, shard = tmp_path / "h100.csv", tmp_path / "a.jsonl"
    table(target, row("kept"), row("renewed", peak_allocated_bytes=1))
    for measurement in (row("new"), row("renewed", peak_allocated_bytes=2), row("kept", observed="2020-01-01")):
        store.append(shard, measurement)
    with shard.open("ab") as file:
        file.write(b"torn")
    report = store.merge([shard], target)
    assert (report.kept, report.added, report.replaced) == (2, 1, 1)
    assert [(path, line.line) for path, line in report.bad_lines] == [(shard, 4)]
    peaks = {measurement.case: measurement.peak_allocated_bytes for measurement in store.read_csv(target)}
    assert peaks == {"kept": 123_456, "new": 123_456, "renewed": 2}
    before = target.read_bytes()
    assert store.merge([shard], target).added == 0
    assert target.read_bytes() == before


def test_merge_touches_nothing_when_the_table_cannot_be_read(tmp_path, row, table):
    target, shard = table(tmp_path / "h100.csv", row()), tmp_path / "a.jsonl"
    store.append(shard, row("new"))
    target.write_bytes(target.read_bytes()[:-7])
    before = target.read_bytes()
    with pytest.raises(RecordError, match="the last line is cut off"):
        store.merge([shard], target)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "h100.csv"]


def test_a_failed_replacement_leaves_the_old_table_and_no_litter(tmp_path, monkeypatch, row, table):
    path = table(tmp_path / "a.csv", row())
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RecordError, match=r"a\.csv cannot be written: No space left on device"):
        store.write_csv(path, [row("b")])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path, row):
    (tmp_path / "file").write_text("")
    for write in (store.append, lambda path, measurement: store.write_csv(path, [measurement])):
        with pytest.raises(
            RecordError, match=r"a\.csv cannot be written: a file is where its folder should be; check"
        ) as error:
            write(tmp_path / "file" / "a.csv", row())
        assert error.value.parameter == "path"


def test_load_reads_every_table_but_no_source_file(tmp_path, row, table):
    table(tmp_path / "h100" / "a.csv", row("a"))
    table(tmp_path / "published" / "b.csv", row("b", gpu="A100-80GB"))
    (tmp_path / "published" / "sources").mkdir()
    (tmp_path / "published" / "sources" / "raw.csv").write_text("x,y\n1,2\n")
    assert [measurement.case for measurement in store.load(tmp_path)] == ["a", "b"]
    assert [measurement.case for measurement in store.load(tmp_path, gpu="A100-80GB")] == ["b"]
    with pytest.raises(RecordError, match="is not a folder of tables"):
        store.load(tmp_path / "none")


def test_the_datasets_folder_is_named_by_the_environment_or_the_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("PEAKCAST_DATASETS", raising=False)
    assert (store.datasets_folder() / "README.md").is_file()
    monkeypatch.setenv("PEAKCAST_DATASETS", str(tmp_path))
    assert store.datasets_folder() == tmp_path
    monkeypatch.setenv("PEAKCAST_DATASETS", str(tmp_path / "none"))
    with pytest.raises(RecordError, match=r"PEAKCAST_DATASETS='.*none' is not a folder; create it or unset"):
        store.datasets_folder()
    monkeypatch.delenv("PEAKCAST_DATASETS")
    monkeypatch.setattr(store, "__file__", str(tmp_path / "site-packages" / "peakcast" / "measurements" / "store.py"))
    with pytest.raises(RecordError, match="set PEAKCAST_DATASETS to a folder"):
        store.datasets_folder()


def test_importing_the_store_loads_nothing_heavy():
    heavy = "('torch', 'pandas', 'numpy', 'mlflow')"
    program = f"import sys, peakcast.measurements.store; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
