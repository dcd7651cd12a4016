"""Tables: bytes that do not move, damage that is refused by file, line, column, value and rule."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from peakcast.core.errors import RecordError
from peakcast.jobs.spec import Finetuning
from peakcast.measurements import store
from peakcast.measurements.rows import COLUMNS


def test_a_table_is_sorted_has_lf_ends_and_integers(tmp_path, row, table):
    path = table(tmp_path / "h100.csv", row("b"), row("a"), row("c", job=row().job.replace(micro_batch_size=3)))
    data = path.read_bytes()
    assert b"\r" not in data
    assert data.endswith(b"\n")
    records = list(csv.DictReader(io.StringIO(data.decode())))
    assert list(records[0]) == list(COLUMNS)
    order = [(record["config_hash"], record["key"]) for record in records]
    assert order == sorted(order)
    assert {record["peak_allocated_bytes"] for record in records} == {"123456"}
    assert {record["peak_reserved_bytes"] for record in records} == {""}
    assert json.loads(records[0]["job"])["architecture"]["hidden_size"] == 64


def test_writing_what_was_read_moves_no_byte(tmp_path, row, table):
    path = table(tmp_path / "a.csv", *(row(f"case {i}", rank=i, environment={"é": [i, None, "\u2028"]}) for i in range(20)))
    before = path.read_bytes()
    store.write_csv(path, reversed(store.read_csv(path)))
    assert path.read_bytes() == before


def test_one_row_a_key_the_newest_then_the_last(tmp_path, row, table):
    old, new = row(observed="2024-01-01", peak_allocated_bytes=1), row(observed="2025-01-01", peak_allocated_bytes=2)
    again = replace(new, peak_allocated_bytes=3)
    assert store.read_csv(table(tmp_path / "a.csv", new, old)) == [new]
    assert store.read_csv(table(tmp_path / "a.csv", old, new, again)) == [again]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "'quoted", "\t=1", "line\nbreak", "cr\r", 'say "x", y'])
def test_texts_that_a_spreadsheet_could_run_are_escaped_and_come_back(tmp_path, text, row, table):
    measurement = row(case=text, out_of_scope=text)
    path = table(tmp_path / "a.csv", measurement)
    cells = next(csv.DictReader(io.StringIO(path.read_text(), newline="")))
    assert cells["case"][0] not in "=+-@\t\r\n"
    assert path.read_bytes().count(b"\n") == 2
    assert store.read_csv(path) == [measurement]


def test_an_int_where_a_float_belongs_reads_back_under_the_same_key(tmp_path, row, table):
    job = row().job.replace(finetuning=Finetuning(method="lora", rank=8, alpha=16))
    measurement = row(job=job)
    store.append(tmp_path / "a.jsonl", measurement)
    table(tmp_path / "a.csv", measurement)
    ((appended,), _), (written,) = store.read_shard(tmp_path / "a.jsonl"), store.read_csv(tmp_path / "a.csv")
    assert appended.key == written.key


def edited(path: Path, column: str, value: str) -> None:
    records = list(csv.reader(io.StringIO(path.read_text(), newline="")))
    records[1][COLUMNS.index(column)] = value
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(records)
    path.write_text(buffer.getvalue())


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("peak_allocated_bytes", "-5", r"line 2: peak_allocated_bytes=-5 must be a whole number from 0 to \d+ \(bytes"),
        ("peak_allocated_bytes", "nan", r"line 2: peak_allocated_bytes='nan' must be a whole number written in digits"),
        ("peak_allocated_bytes", "1e9", r"line 2: peak_allocated_bytes='1e9' must be a whole number written in digits"),
        ("peak_allocated_bytes", "٣", r"line 2: peak_allocated_bytes='٣' must be a whole number written in digits"),
        ("peak_allocated_bytes", "9" * 17, r"line 2: peak_allocated_bytes=9+ must be a whole number from 0"),
        ("peak_allocated_bytes", "9" * 5000, r"line 2: peak_allocated_bytes='9+\.\.\. must be a whole number"),
        ("rank", "-1", r"line 2: rank=-1 must be a whole number"),
        ("rank", "", r"line 2: key='\w{16}' does not match the row"),  # the largest of all ranks, which is another row
        ("provenance", "mesured", r"line 2: provenance='mesured' must be one of measured, .*did you mean 'measured'"),
        ("outcome", "", r"line 2: outcome='' must be one of ok"),
        ("schema_version", "2", r"line 2: schema_version=2 must be 1; update peakcast or convert the file"),
        ("schema_version", "", r"line 2: schema_version=None must be 1"),
        ("case", "=cmd|' /C calc'!A0", r"line 2: case=.* could be run as a spreadsheet formula"),
        ("case", "'oops", r"line 2: case=.* begins with ' and must then hold a JSON text"),
        ("case", "renamed", r"line 2: key='\w{16}' does not match the row, whose key is \w{16}: a cell was edited"),
        ("config_hash", "0" * 16, r"line 2: config_hash='0{16}' does not match"),
        ("environment", "{", r"line 2: environment='\{' is not valid JSON"),
        ("environment", "[]", r"line 2: environment=\[\] must be a mapping"),
        ("environment", '{"a":1,"a":2}', r"line 2: environment=.*\(a key appears twice"),
        ("environment", '{"a":NaN}', r"line 2: environment=.*\(NaN is not a number"),
        ("environment", "[" * 100_000, r"line 2: environment=.* is not valid JSON"),
        ("environment", "x" * 140_000, r"not valid CSV \(field larger than field limit"),
        ("assumptions", "[1]", r"line 2: assumptions=\[1\] must be a list of texts"),
        ("job", '{"architecture":{}}', r"line 2: job=.* is not a job: job.architecture.name is required"),
        ("job", "{}", r"line 2: job=.* is not a job: job.architecture is required"),
        ("observed", "30/06/2025", r"line 2: observed='30/06/2025' must be an ISO date"),
    ],
)
def test_a_damaged_cell_is_refused_by_file_line_column_value_and_rule(tmp_path, column, value, message, row, table):
    path = table(tmp_path / "h100.csv", row())
    edited(path, column, value)
    with pytest.raises(RecordError, match=message) as error:
        store.read_csv(path)
    assert str(path) in error.value.message
    assert "restore it from version control" in error.value.message


def test_the_whole_message_of_a_damaged_cell(tmp_path, row, table):
    path = table(tmp_path / "h100.csv", row())
    edited(path, "collectives", "ncll")
    with pytest.raises(RecordError) as error:
        store.read_csv(path)
    assert error.value.message == (
        f"{path}, line 2: collectives='ncll' must be one of nccl, gloo, fake, none; did you mean 'nccl'; "
        "restore it from version control."
    )
    assert (error.value.parameter, error.value.value) == ("collectives", "ncll")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "line 1: the header is missing; restore it from version control, or delete the file if"),
        (lambda data: data[:-1], "line 3: the last line is cut off; restore it from version control"),
        (lambda data: data[:-40], "line 3: the last line is cut off"),
        (lambda data: data[:100], "line 1: 7 columns instead of 28|line 1: column"),
        (lambda data: data.replace(b"\n", b"\r\n"), "line 1: line ends are CRLF and must be LF; turn off core.autocrlf"),
        (lambda data: b"\xef\xbb\xbf" + data, "line 1: begins with a byte-order mark"),
        (lambda data: data.replace(b"tiny", b"\xff\xff\xff\xff", 1), "line 2: not UTF-8 text"),
        (lambda data: data.replace(b"peak_device_bytes", b"peak_gib", 1), "line 1: column 15 is 'peak_gib' instead of"),
        (lambda data: data + data.split(b"\n")[1] + b"\n", "line 4: key='.*' is on line 2 too; keep one row"),
        (lambda data: data + b"a,b\n", "line 4: 2 cells instead of 28; the line is cut off or edited"),
        (lambda data: data + b'"open\n', r"not valid CSV \(unexpected end of data\)"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message, row, table):
    path = table(tmp_path / "a.csv", row("a"), row("b"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordError, match=message) as error:
        store.read_csv(path)
    assert str(path) in error.value.message


def test_an_absurdly_large_file_is_not_read(tmp_path, monkeypatch, row, table):
    path = table(tmp_path / "a.csv", row())
    monkeypatch.setattr("peakcast.core.durable.MAX_FILE_BYTES", 100)
    with pytest.raises(RecordError, match=r"a\.csv cannot be read: it is larger than 100 bytes"):
        store.read_csv(path)


def test_a_job_written_before_a_field_existed_is_read_with_its_default(tmp_path, row, table):
    path = table(tmp_path / "a.csv", row())
    text = path.read_text()
    assert '""compile"":false,' in text
    path.write_text(text.replace('""compile"":false,', ""))
    assert store.read_csv(path) == [row()]
