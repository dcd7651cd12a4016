"""Whatever rows hold, tables and shards give it back."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements import store
from peakcast.measurements.records import Measurement
from peakcast.measurements.rows import MAX_COUNT

TEXT = st.text(max_size=20).filter(lambda text: not any("\ud800" <= character <= "\udfff" for character in text))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=6,
)
COUNT = st.none() | st.integers(0, MAX_COUNT)
ROWS = st.builds(
    Measurement,
    job=st.builds(
        TrainingJob,
        architecture=st.just(catalog.architecture("gpt2")),
        micro_batch_size=st.integers(1, 9),
        versions=st.dictionaries(TEXT, TEXT, max_size=2).map(FrozenMapping),
    ),
    gpu=TEXT.filter(bool),
    provenance=st.sampled_from(["measured", "published", "traced"]),
    source=TEXT.filter(bool),
    case=TEXT,
    rank=st.integers(0, 4096),
    collectives=st.sampled_from(["nccl", "fake", "none"]),
    outcome=st.sampled_from(["ok", "out_of_memory", "failed"]),
    peak_allocated_bytes=COUNT,
    peak_reserved_bytes=COUNT,
    phase_peaks=st.dictionaries(TEXT, st.integers(0, MAX_COUNT), max_size=3),
    environment=st.dictionaries(TEXT, JSON, max_size=3),
    assumptions=st.lists(TEXT, max_size=3).map(tuple),
    out_of_scope=TEXT,
    spoiled=st.lists(TEXT, max_size=3).map(tuple),
    observed=st.sampled_from(["", "2025-06-30", "2025-06-30T12:00:00+00:00"]),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, max_size=4, unique_by=lambda measurement: measurement.key))
def test_any_rows_come_back_from_a_table_and_a_shard(tmp_path, rows):
    path, shard = tmp_path / "any.csv", tmp_path / "any.jsonl"
    shard.unlink(missing_ok=True)
    by_key = lambda measurement: (measurement.job.config_hash, measurement.key)  # noqa: E731
    store.write_csv(path, rows)
    data = path.read_bytes()
    assert store.read_csv(path) == sorted(rows, key=by_key)
    store.write_csv(path, store.read_csv(path))
    assert path.read_bytes() == data
    for measurement in rows:
        store.append(shard, measurement)
    assert store.read_shard(shard) == (rows, [])
