"""SimuMax's rows of B200: all come out, known ones as worked by hand."""

import pytest

from peakcast.collectors.published.simumax_b200 import read_simumax_b200
from peakcast.core.errors import RecordError
from peakcast.measurements.store import datasets_folder

SOURCE = datasets_folder() / "published" / "sources" / "simumax_b200.jsonl"


@pytest.fixture(scope="module")
def rows():
    return read_simumax_b200(SOURCE)


def test_all_rows_count_with_both_peaks(rows):
    assert len(rows) == len({row.key for row in rows}) == 9
    assert all(row.counts and row.gpu == "B200" for row in rows)
    assert all(row.peak_allocated_bytes < row.peak_reserved_bytes for row in rows)
    assert not any("not known here" in sentence for row in rows for sentence in row.assumptions)


def test_a_row_by_hand(rows):
    (row,) = (row for row in rows if row.case == "SIMUMAX-020-worst")
    job, layout = row.job, row.job.parallelism
    assert (job.architecture.hidden_size, job.architecture.num_hidden_layers) == (16384, 4)
    assert (layout.pipeline_parallel_size, layout.data_parallel_size, row.rank) == (2, 4, None)  # the worst
    assert job.gradient_accumulation_steps == 16 // (1 * 4)
    assert job.activation_checkpointing.mode == "none"  # method block with 0 layers
    assert job.versions == {"megatron_core": "0.14.0", "transformer_engine": "2.11", "torch": "2.10"}
    assert (row.peak_allocated_bytes, row.peak_reserved_bytes) == (93_505_086_029, 99_063_169_024)


def test_a_line_of_one_rank_is_refused(tmp_path):
    source = tmp_path / "simumax_b200.jsonl"
    source.write_text(SOURCE.read_text().splitlines()[0].replace('"rank": "worst"', '"rank": 3'))
    with pytest.raises(RecordError, match=r"line 1: .*rank=3 must be worst"):
        read_simumax_b200(source)
