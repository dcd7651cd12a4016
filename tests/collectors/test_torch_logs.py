"""Published runs of torchtitan and of LitGPT's networks: every row comes out, with the conventions of its day."""

import json
from collections import Counter

import numpy as np
import pytest

from peakcast.catalog import gpu
from peakcast.collectors.published.axolotl_examples import read_axolotl_examples
from peakcast.collectors.published.deepspeed_trainer import read_deepspeed_trainer
from peakcast.collectors.published.fsdp_qlora import read_fsdp_qlora
from peakcast.collectors.published.liger_examples import read_liger_examples
from peakcast.collectors.published.lightning_thunder import read_lightning_thunder
from peakcast.collectors.published.litgpt_finetune import read_litgpt_finetune
from peakcast.collectors.published.litgpt_resources import read_litgpt_resources
from peakcast.collectors.published.megatron_logs import read_megatron_logs
from peakcast.collectors.published.swift_benchmark import read_swift_benchmark
from peakcast.collectors.published.torchao_optimizers import read_torchao_optimizers
from peakcast.collectors.published.torchtitan_benchmarks import read_torchtitan_benchmarks
from peakcast.collectors.published.torchtitan_log import DAYS, read_torchtitan_log
from peakcast.collectors.published.torchtune_readme import read_torchtune_readme
from peakcast.collectors.published.transformers_page import read_transformers_page
from peakcast.core.units import GIB
from peakcast.jobs.conventions import conventions
from peakcast.measurements.store import datasets_folder
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

SOURCES = datasets_folder() / "published" / "sources"
READ = {
    "torchtitan_benchmarks": (read_torchtitan_benchmarks, {"H100-80GB": 18, "H200": 2}),
    "torchtitan_log": (read_torchtitan_log, {"H100-80GB": 27, "A100-80GB": 4, "B200": 4, "GB300": 3}),
    "liger_examples": (read_liger_examples, {"A100-80GB": 25}),
    "lightning_thunder": (read_lightning_thunder, {"H100-80GB": 29}),
    "megatron_logs": (read_megatron_logs, {"A800-80GB": 13, "A100-80GB": 4, "H100-80GB": 2}),
    "fsdp_qlora": (read_fsdp_qlora, {"RTX3090": 13, "RTX4090": 11}),
    "swift_benchmark": (read_swift_benchmark, {"A100-80GB": 49}),
    "litgpt_finetune": (read_litgpt_finetune, {"A10G": 45}),
    "torchtune_readme": (read_torchtune_readme, {"A100-80GB": 10}),
    "litgpt_resources": (read_litgpt_resources, {"A100-40GB": 69}),
    "torchao_optimizers": (read_torchao_optimizers, {"A100-80GB": 4}),
    "axolotl_examples": (read_axolotl_examples, {"H100-80GB": 6, "L40S": 2, "RTX4090": 1}),
    "deepspeed_trainer": (read_deepspeed_trainer, {"RTX3090": 32, "A100-80GB": 29}),
    "transformers_page": (read_transformers_page, {"V100-16GB": 9}),
}


def lines(name):
    return [json.loads(line) for line in (SOURCES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows():
    return {name: read(SOURCES / f"{name}.jsonl") for name, (read, _) in READ.items()}


@pytest.fixture(scope="module")
def by_id(rows):
    return {row.case.split()[0]: row for own in rows.values() for row in own}


@pytest.mark.parametrize("name", READ)
def test_no_row_is_dropped_and_no_number_is_changed(rows, name):
    own, found = rows[name], lines(name)
    assert Counter(row.gpu for row in own) == READ[name][1]
    assert len({row.key for row in own}) == len(found)
    for row, line in zip(own, found, strict=True):
        unread = row.environment.get("unread", {})
        for quantity, value in line["measured"].items():
            assert unread.get(quantity, getattr(row, quantity)) == value, row.case
        assert row.source_version == line["commit"]


def test_a_commit_is_never_compared_as_a_release(rows):
    for row in rows["torchtitan_log"]:
        release = row.job.versions["torchtitan"]
        assert release in {day.release for day in DAYS.values()}
        assert release not in row.source_version
        assert any("A commit of torchtitan is no release" in sentence for sentence in row.assumptions)
    assert {line["commit"][:9] for line in lines("torchtitan_log")} == set(DAYS)


def test_conventions_are_those_of_the_commits_day(by_id):
    summer, spring, later = (conventions(by_id[name].job) for name in ("TLOG-001", "TLOG-010", "TLOG-020"))
    assert (summer["logits_upcast"], spring["logits_upcast"]) == ("model", "loss")
    assert (spring["fsdp2_units"], later["fsdp2_units"]) == ("root", "ends")
    assert (spring["fsdp2_last_layer_stays"], conventions(by_id["TLOG-011"].job)["fsdp2_last_layer_stays"]) == (True, False)
    assert conventions(by_id["TLOG-012"].job)["fsdp_reshard_after_forward"] is False
    assert "all_to_all" not in conventions(by_id["TLOG-056"].job)["selective_checkpointing_keeps"]


def test_a_schedule_of_eight_micro_batches_has_stages_of_its_own(by_id):
    row = by_id["TLOG-058"]
    assert (row.job.micro_batch_size, row.job.gradient_accumulation_steps) == (1, 8)
    assert row.job.parallelism.pipeline_layers == (3, 4, 4, 4, 4, 3, 3, 2)  # 29 on 8 stages: 4 4 4 4 4 3 3 3, less the ends


def test_active_bytes_are_not_taken_for_allocated_ones(by_id):
    row = by_id["TLOG-063"]
    assert (row.collectives, row.peak_allocated_bytes, row.peak_active_bytes) == ("fake", None, 103719165231)
    assert row.out_of_scope


def test_litgpt_has_one_matrix_for_queries_keys_and_values(rows):
    assert all(row.job.architecture.fused_qkv for row in rows["lightning_thunder"])
    for row in rows["lightning_thunder"]:
        assert (conventions(row.job)["logits_upcast"], conventions(row.job)["loss_kernel"]) == ("none", "eager")


REPLAYED = {
    "TLOG-003": 1.1, "TLOG-010": 0.3, "TLOG-011": 0.3, "TLOG-012": 0.3, "TLOG-015": 0.3, "TLOG-016": 0.3,
    "TLOG-019": 0.3, "TLOG-020": 0.3,
}  # fmt: skip
"""Per cent within which reserved memory of eager runs in bf16 is answered, nothing fitted."""


@pytest.mark.parametrize("name", REPLAYED)
def test_reserved_memory_of_eager_runs_is_answered(by_id, name):
    row = by_id[name]
    assert not out_of_scope(row.job)
    answered = baseline(row.job, gpu(row.gpu), row.rank).peak_reserved_bytes
    assert answered == pytest.approx(row.peak_reserved_bytes, rel=REPLAYED[name] / 100)


def off(row, first_micro_batch=False):
    """How far the bare ledger's allocated peak is from the row's; nothing is fitted."""
    step = ledger(row.job, device=gpu(row.gpu))
    again = np.nonzero((step.phases[1:] == Phase.FORWARD) & (step.phases[:-1] == Phase.BACKWARD))[0]
    end = again[0] + 1 if first_micro_batch else None
    return int(step.totals[:end].max()) / row.peak_allocated_bytes - 1


def litgpt(by_id, wanted, *, quantized=False):
    own = (row for name, row in by_id.items() if name.startswith("LGR-") and not row.out_of_scope)
    own = (row for row in own if row.peak_allocated_bytes and wanted in row.case)
    return [row for row in own if (row.job.finetuning.quantization is not None) == quantized]


def test_one_adapter_of_a_joined_projection_is_met_on_one_gpu(by_id):
    llamas = [row for row in litgpt(by_id, "LoRA on 1 GPU") if "Llama" in row.case]
    assert len(llamas) == 3
    assert max(abs(off(row)) for row in llamas) < 0.01
    assert max(abs(off(row)) for row in litgpt(by_id, "generation on 1 GPU")) < 0.006


def test_adapters_in_units_of_fsdp1_have_gradients_of_frozen_weights(by_id):
    """Each run accumulates micro-batches without a reduction: the whole network's gradients, which are not trained, more
    than doubled it. The longest sample is in the first of them, when there are no gradients yet, and later ones are
    shorter: equal lengths are an upper bound, and the first micro-batch's peak a lower one."""
    rows = litgpt(by_id, "GPUs, ")
    assert len(rows) == 10
    assert all(off(row) > 0 for row in rows)
    assert all(-0.07 < off(row, first_micro_batch=True) < 0.005 for row in rows)
    alone = [row for row in rows if row.job.micro_batch_size == 1]
    assert max(off(row) for row in alone) < 0.035


def test_axolotl_keeps_the_dtype_of_what_fsdp2_shards(by_id):
    row = by_id["AXO-004"]
    assert row.job.precision.parameters == row.job.precision.gradients == "bfloat16"
    assert not conventions(row.job)["accumulates_without_sync"]
    assert baseline(row.job, gpu(row.gpu)).peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.02)


def test_allocated_peaks_of_fsdp_qlora_are_right_to_the_last_digit_that_is_printed(by_id):
    for name in ("FQ-003", "FQ-004"):
        row = by_id[name]
        answered = baseline(row.job, gpu(row.gpu), row.rank).replayed_allocated_bytes
        assert answered == pytest.approx(row.peak_allocated_bytes, abs=GIB // 200)


def test_reserved_peaks_of_fsdp_qlora_with_weights_that_are_not_quantised_are_within_2_5_per_cent(rows):
    own = [row for row in rows["fsdp_qlora"] if row.gpu == "RTX3090" and not row.job.finetuning.quantization]
    assert len(own) == 5
    for row in own:
        answered = baseline(row.job, gpu(row.gpu), row.rank).peak_reserved_bytes
        assert answered == pytest.approx(row.peak_reserved_bytes, rel=0.025), row.case


def test_stage_2_with_its_optimizer_on_the_host_is_right_to_a_fiftieth_of_a_percent(rows):
    """Nothing was fitted to these rows; each mechanism was read in DeepSpeed 0.14.4 (`test_zero.py`)."""
    own = [row for row in rows["deepspeed_trainer"] if row.peak_allocated_bytes is not None]
    assert Counter((row.job.architecture.name, row.rank) for row in own) == {("qwen1.5-0.5b", 0): 5, ("llama-3-8b", 7): 17}
    for row in own:
        counted = baseline(row.job, gpu(row.gpu), rank=row.rank).peak_allocated_bytes
        assert counted == pytest.approx(row.peak_allocated_bytes, rel=2e-4), row.case
