"""The published rows: all of them come out, known ones as worked by hand, and the import repeats to the byte."""

import json
import re
from collections import Counter
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from peakcast.collectors.published.__main__ import READERS, main
from peakcast.collectors.published.counts import counts_page
from peakcast.collectors.published.fms_a100 import read_fms_a100
from peakcast.collectors.published.fms_history import read_fms_history
from peakcast.collectors.published.megatron_ci import FROM_STATES, read_megatron_ci
from peakcast.core.errors import RecordError
from peakcast.measurements.store import datasets_folder, read_csv
from peakcast.models.baseline.ledger import ledger

PUBLISHED = datasets_folder() / "published"
SOURCES = PUBLISHED / "sources"


@pytest.fixture(scope="module")
def megatron():
    return read_megatron_ci(SOURCES / "megatron_ci.jsonl")


@pytest.fixture(scope="module")
def fms():
    return read_fms_a100(SOURCES / "fms_a100.csv")


@pytest.fixture(scope="module")
def history():
    return read_fms_history(SOURCES / "fms_history.jsonl")


def test_no_row_is_dropped(megatron, fms, history):
    every = [*megatron, *fms, *history]
    assert Counter(row.gpu for row in megatron) == {"A100-80GB": 249, "H100-80GB": 99, "GB200": 98}
    assert Counter(row.gpu for row in fms) == {"A100-80GB": 124}
    assert Counter(row.gpu for row in history) == {"A100-80GB": 526}
    assert len({row.key for row in every}) == len({row.case for row in every}) == 446 + 124 + 526
    assert {row.provenance for row in every} == {"published"}


def test_no_flag_of_the_source_is_unknown(megatron, fms, history):
    for row in [*megatron, *fms, *history]:
        assert not any("not known here" in sentence for sentence in row.assumptions), row.case


def test_a_megatron_row_by_hand(megatron):
    (row,) = (r for r in megatron if r.case == "gpt3_mcore_te_tp2_pp2_resume_torch_dist/dgx_h100/dev/first_run")
    job, network = row.job, row.job.architecture
    assert (network.num_hidden_layers, network.hidden_size, network.vocab_size) == (12, 512, 50432)
    assert (job.parallelism.tensor_parallel_size, job.parallelism.pipeline_parallel_size) == (2, 2)
    assert (job.parallelism.data_parallel_size, row.rank) == (2, 7)
    assert job.gradient_accumulation_steps == 32 // (4 * 2)
    assert job.versions == {"megatron_core": "0.18.0", "ngc_pytorch": "26.04"}
    assert row.observed == "2026-05-07"
    assert job.framework_options["deterministic_mode"]
    assert not job.framework_options["gradient_accumulation_fusion"]
    assert job.framework_options["cublas_workspace_config"] == ":4096:8"
    assert row.peak_allocated_bytes == 1_428_171_264
    assert row.first_step_peak_allocated_bytes == 1_245_477_376
    assert row.steady_allocated_bytes == 517_243_392
    assert row.source_version == "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
    assert row.counts


def test_weights_gradients_and_states_explain_what_stays_allocated(megatron):
    """tp4, pp1, distributed optimizer on 8 GPUs, tied: 6 + 12/2 bytes per parameter of the rank, and workspaces."""
    case = "gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather/dgx_a100/dev/first_run"
    (row,) = (r for r in megatron if r.case == case)
    h, layers, tensor = 512, 12, 4
    layer = (4 * h * h + 8 * h * h) // tensor + (3 * h + 4 * h) // tensor + 2 * h + 4 * h
    parameters = layers * layer + 50688 * h // tensor + 1024 * h + 2 * h
    rest = row.steady_allocated_bytes - parameters * (6 + 12 // 2)
    two_cublas, te_workspace = 2 * 32 * 2**20, 4 * 2**20
    assert 0 <= rest - two_cublas - te_workspace < 2**20


def test_an_fms_row_by_hand(fms):
    (row,) = (r for r in fms if r.case == "mistralai/Mistral-7B-v0.1/1 GPUs/batch 8/lora/none")
    job = row.job
    assert (job.architecture.model_type, job.micro_batch_size, job.sequence_length) == ("mistral", 8, 4096)
    assert (job.finetuning.rank, job.finetuning.targets) == (16, ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert job.activation_checkpointing.mode == "full"
    assert job.activation_checkpointing.use_reentrant
    assert (job.optimizer.implementation, job.attention) == ("foreach", "flash_attention_2")
    assert (row.peak_allocated_bytes, row.steady_allocated_bytes) == (38_742_912_512, 14_664_886_272)
    assert row.peak_device_bytes == 43_232 * 2**20
    assert row.counts


def test_the_fms_peak_is_the_total(fms):
    """Full bf16 fine-tuning: 2 weights + 2 gradients + 4 states + 2 temporary bytes per parameter at the optimizer step."""
    (row,) = (r for r in fms if r.case == "mistralai/Mistral-7B-v0.1/1 GPUs/batch 4/full/none")
    assert row.peak_allocated_bytes == pytest.approx(10 * 7_241_732_096, rel=0.001)


def test_adapters_that_the_tracker_did_not_see_are_added(fms, history):
    """Beside q and o of 32 layers [16, 4096] and [4096, 16], beside k and v [16, 4096] and [1024, 16], in fp32."""
    adapters = 32 * 16 * 2 * ((4096 + 4096) + (4096 + 1024)) * 4
    (row,) = (r for r in fms if r.case == "mistralai/Mistral-7B-v0.1/2 GPUs/batch 2/lora/accelerated-peft-bnb-foak")
    as_read = row.environment["as_read"]
    assert row.peak_allocated_bytes - as_read["peak_allocated_bytes"] == adapters
    assert row.steady_allocated_bytes - as_read["steady_allocated_bytes"] == adapters
    changed = [r for r in [*fms, *history] if "as_read" in r.environment]
    assert len(changed) == 78
    assert all("2 GPUs" in r.case and "-foak" in r.case and r.job.finetuning.method == "qlora" for r in changed)


def test_running_out_of_memory_is_an_outcome_with_a_lower_bound(fms):
    full = [row for row in fms if row.outcome == "out_of_memory"]
    assert len(full) == 39
    assert all(row.peak_allocated_bytes is None and row.peak_device_bytes > 70 * 2**30 for row in full)


def test_a_row_of_the_history_has_the_releases_of_its_day(history):
    (row,) = (r for r in history if r.case.startswith("FMSH-001/"))
    assert (row.job.versions["transformers"], row.job.versions["flash_attn"]) == ("4.45.2", "2.6.3")
    assert (row.observed, row.source_version[:7]) == ("2024-11-14", "9239802")
    assert (row.peak_allocated_bytes, row.peak_device_bytes) == (11_267_745_280, 14_630_780_928)
    assert row.job.sequence_length == 2048
    assert row.counts


def test_releases_that_the_history_does_not_record_are_said_to_be_taken(history):
    unrecorded = [row for row in history if "transformers" not in row.environment]
    assert Counter(row.observed for row in unrecorded) == {"2024-06-02": 35, "2024-06-07": 58, "2024-11-04": 22}
    assert all(any("not recorded" in fact for fact in row.assumptions) for row in unrecorded)
    assert {row.job.versions["transformers"] for row in unrecorded} == {"4.39.3", "4.45.2"}


def test_a_history_row_of_device_memory_alone_says_so_or_never_ran(history):
    alone = [row for row in history if row.peak_allocated_bytes is None]
    assert len(alone) == 114
    assert all(any("nvidia-smi's number only" in fact for fact in row.assumptions) for row in alone)
    failed = [row for row in history if row.outcome == "failed"]
    shards = {row.case: int(re.search(r"ep(\d)", row.case)[1]) for row in failed}
    assert len(failed) == 4
    assert all(shards[row.case] > row.job.parallelism.data_parallel_size for row in failed)


def test_doubtful_rows_are_marked_not_dropped(megatron):
    resumed = [row for row in megatron if row.environment["second_run"]]
    assert len(resumed) == 53
    assert all(any("resumed" in reason for reason in row.spoiled) for row in resumed)
    (copy,) = (r for r in megatron if r.case.startswith("hybrid_mr_mcore_te_tp2_pp1") and r.gpu == "A100-80GB")
    assert "all values are those of a GPT case" in copy.spoiled
    pipelined = [r for r in megatron if r.case.startswith("hybrid_mr_mcore_te_tp1_pp4_")]
    assert {r.gpu for r in pipelined if r.counts} == {"H100-80GB"}  # the A100's values are copies


def test_release_cases_give_the_peak_of_their_first_ten_steps(megatron):
    (row,) = (r for r in megatron if r.case == "mixtral_8x22b_tp2pp8ep8vpp1_release/dgx_h100/dev/first_run")
    assert (row.first_step_peak_allocated_bytes, row.peak_allocated_bytes) == (23_002_945_536, 28_431_276_032)
    assert any("first ten steps" in fact for fact in row.assumptions)
    assert row.job.parallelism.world_size == 128  # what allocated-after-step implies
    assert row.counts


def test_a_job_whose_gpus_are_not_recorded_has_the_fewest_that_its_layout_needs(megatron):
    rows = [r for r in megatron if "the number of GPUs is not recorded" in r.spoiled]
    assert len(rows) == 9
    for row in (r for r in rows if r.case.startswith("nemotron3_super_release_gb200/")):
        assert row.job.parallelism.world_size == 64  # one stage, with experts over 64 GPUs


@pytest.mark.parametrize("case", FROM_STATES)
def test_a_number_of_gpus_from_what_stays_after_a_step_is_the_only_one_that_explains_it(megatron, case):
    """Weights, gradients and this rank's part of the optimizer's states."""
    (row,) = (r for r in megatron if r.case.startswith(f"{case}/"))
    layout = row.job.parallelism
    stays = {}
    for data_parallel in (layout.data_parallel_size // 2, layout.data_parallel_size, 2 * layout.data_parallel_size):
        job = row.job.replace(parallelism=replace(layout, data_parallel_size=data_parallel))
        stays[data_parallel] = int(ledger(job, rank=job.parallelism.world_size - 1).totals[-1])
    off = {size: abs(found / row.steady_allocated_bytes - 1) for size, found in stays.items()}
    assert off.pop(layout.data_parallel_size) < 0.006
    assert min(off.values()) > 0.1


def test_out_of_scope_families_say_why(megatron):
    kinds = {"bert": "encoder", "t5": "encoder_decoder"}
    for row in megatron:
        family = row.environment["family"]
        if family in kinds:
            assert (row.out_of_scope, row.job.architecture.kind) == ("", kinds[family])
        elif family in ("multimodal-llava", "nemotron"):
            assert "is not modelled" in row.out_of_scope
            assert row.job.architecture.kind != "decoder"


def test_the_tables_in_the_repository_are_what_the_sources_give(tmp_path, capsys, megatron, fms, history):
    assert main([str(SOURCES), str(tmp_path)]) == 0
    assert "GB200: 98 rows" in capsys.readouterr().out
    for name in ("README.md", *(f"{Path(source).stem}.csv" for source in READERS)):
        assert (tmp_path / name).read_bytes() == (PUBLISHED / name).read_bytes(), f"{name}: run the import again"
    by_key = attrgetter("key")
    for source, rows in {"megatron_ci": megatron, "fms_a100": fms, "fms_history": history}.items():
        assert sorted(read_csv(tmp_path / f"{source}.csv"), key=by_key) == sorted(rows, key=by_key)


def test_the_page_of_counts_counts_what_is_there(megatron, fms):
    page = counts_page({"megatron_ci": megatron, "fms_a100": fms})
    for name, rows in {"megatron_ci": megatron, "fms_a100": fms}.items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | A100-80GB"))
        numbers = [int(cell) for cell in line.split("|")[3:-1]]
        assert numbers[:2] == [len(rows), sum(row.counts for row in rows)]
        assert numbers[4] == sum(row.outcome == "out_of_memory" for row in rows)
    resumed = sum(bool(row.environment["second_run"]) for row in megatron)
    assert f"| megatron_ci | spoiled: a run resumed from a checkpoint | {resumed} |" in page


def test_the_card_names_a_file_for_every_configuration():
    card = (datasets_folder() / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"data_files: (\S+)", card)
    assert files == [f"published/{Path(source).stem}.csv" for source in READERS]
    assert all((datasets_folder() / file).is_file() for file in files)
    assert not list(datasets_folder().rglob("__init__.py"))


def test_a_damaged_source_is_refused_by_line(tmp_path):
    source = tmp_path / "megatron_ci.jsonl"
    source.write_text((SOURCES / "megatron_ci.jsonl").read_text().split("\n")[0] + '\n{"torn')
    with pytest.raises(RecordError, match=r"megatron_ci\.jsonl, line 2: .*restore the source file"):
        read_megatron_ci(source)
    table = tmp_path / "fms_a100.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(RecordError, match=r"fms_a100\.csv, line 1: the columns are not"):
        read_fms_a100(table)


def test_the_command_says_in_one_sentence_what_cannot_be_read(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert re.fullmatch(r".*axolotl_examples\.jsonl cannot be read: .*\n", capsys.readouterr().err)


def test_source_lines_hold_what_the_importer_expects():
    lines = (SOURCES / "megatron_ci.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 446
    assert {json.loads(line)["logged_rank"] for line in lines} == {"last (world_size - 1)"}
