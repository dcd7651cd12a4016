"""`peakcast evaluate --against`: a user's own rows, verdicts as sentences and exit codes, other tables refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peakcast import api
from peakcast.catalog import gpu
from peakcast.commands import cli
from peakcast.core.errors import RecordError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.measurements import store
from peakcast.measurements.records import Measurement
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.calibration import Calibration, QuantityCalibration
from peakcast.models.calibration.domain import Domain
from peakcast.models.calibration.features import features
from peakcast.models.calibration.intervals import Intervals
from peakcast.models.calibration.residual import Residual
from peakcast.models.calibration.spread import TERMS, Spread

QUANTITY = "peak_allocated_bytes"
AS_IT_IS = Spread.from_mapping({**dict.fromkeys(TERMS, 0.0), "always": 1.0}, QUANTITY)
"""The same error is expected of every job: bars are quantiles of the log ratios themselves."""


def small_job(width: int):
    shape = {"model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    return job_from_mapping({"architecture": {**shape, **heads}, "sequence_length": 256})


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    """Bars of ± 1.4 %, no residual."""
    residuals = [0.001 * i for i in range(-15, 15)]
    names = [f"net{i}" for i in range(30)]
    device, job = gpu("H100-80GB"), small_job(256)
    row = features(job, device, baseline(job, device, 0))
    learned = QuantityCalibration(
        residual=Residual().fit([row] * 30, [0.0] * 30, names, ["huggingface/single"] * 30),
        spread=AS_IT_IS,
        intervals=Intervals().fit(residuals, names, [("huggingface/single", "all")] * 30),
        domain=Domain(gpus=("H100-80GB",)),
        rows_by_gpu={"H100-80GB": 30},
    )
    path = tmp_path_factory.mktemp("calibration") / "H100-80GB.json"
    made = Calibration(gpu="H100-80GB", created="", rows_digest="", quantities={QUANTITY: learned})
    made.save(path)
    return path


def table(path: Path, factor: float, count: int = 12) -> Path:
    device = gpu("H100-80GB")
    rows = []
    for index in range(count):
        job = small_job(128 + 64 * index)
        peak = round(baseline(job, device, 0).start(QUANTITY) * factor)
        rows.append(
            Measurement(job=job, gpu="H100-80GB", provenance="measured", source="peakcast", peak_allocated_bytes=peak)
        )
    store.write_csv(path, rows)
    return path


@pytest.mark.parametrize(
    ("factor", "count", "code", "said"),
    [(1.0, 12, 0, "holds."), (1.05, 12, 3, "no longer holds; fit it again"), (1.0, 3, 4, "too few to confirm")],
)
def test_the_verdict_is_a_sentence_and_an_exit_code(tmp_path, calibration, capsys, factor, count, code, said):
    path = table(tmp_path / "mine.csv", factor, count)
    assert cli._run(["evaluate", "--against", str(path), "--calibration", str(calibration)]) == code
    assert said in capsys.readouterr().out.splitlines()[0]


def test_json_has_the_same(tmp_path, calibration, capsys):
    path = table(tmp_path / "mine.csv", 1.0)
    cli._run(["evaluate", "--against", str(path), "--calibration", str(calibration), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    (same,) = api.check(path, calibration=calibration).checks
    assert found == json.loads(json.dumps(same.to_mapping()))
    assert (found["verdict"], found["coverage"], found["num_configurations"]) == ("holds", 1.0, 12)


def test_another_table_is_refused_with_the_columns_that_are_needed(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text("model,gpu,peak_gb\nllama,H100,60\n")
    with pytest.raises(RecordError, match=r"column 1 is 'model'") as refusal:
        api.check(path)
    assert "has these columns, in this order: config_hash, key, " in refusal.value.message
    assert "one of the four peaks" in refusal.value.message


def test_a_table_without_a_row_that_counts_is_refused_with_the_reason(tmp_path):
    row = Measurement(job=small_job(256), gpu="H100-80GB", provenance="traced", source="peakcast", peak_allocated_bytes=5)
    store.write_csv(tmp_path / "mine.csv", [row])
    with pytest.raises(RecordError, match=r"no row that counts \(1 × provenance is traced\)"):
        api.check(tmp_path / "mine.csv")


def test_a_shard_will_do_and_a_bad_line_of_it_is_named(tmp_path, calibration):
    path = tmp_path / "mine.shard.jsonl"
    for row in store.read_csv(table(tmp_path / "mine.csv", 1.0)):
        store.append(path, row)
    assert api.check(path, calibration=calibration).checks[0].num_rows == 12
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(RecordError, match="line 13: "):
        api.check(path, calibration=calibration)
