"""The ledger equals the trace of the real step, on a sample of every kind of cell."""

import pytest

from peakcast import api

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.usefixtures("from_the_warm_parent")
def test_every_cell_of_a_grid_is_traced_and_compared(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "base: {sequence_length: 256, micro_batch_size: 2, architecture: {name: gpt2, num_hidden_layers: 1}}\n"
        "axes: {activation_checkpointing.mode: [none, full]}\n"
    )
    cells = api.verify(grid, tmp_path / "traces.jsonl")
    assert [cell.job.activation_checkpointing.mode for cell in cells] == ["none", "full"]
    assert [(cell.job, cell.reason or cell.errors) for cell in cells if not cell.holds] == []


@pytest.mark.whole
def test_every_cell_of_the_sample_agrees_in_every_phase(tmp_path):
    cells = api.verify("agreement-sample", tmp_path / "traces.jsonl")
    assert len(cells) >= 15
    assert [(cell.job, cell.reason or cell.errors) for cell in cells if not cell.holds] == []
