"""What the ledger says of memory that no tensor has: the sums of norms' and biases' gradients over tokens."""

from __future__ import annotations

from peakcast import catalog
from peakcast.catalog.kernel_workspaces import column_sum
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Category, Phase

H100 = catalog.gpu("H100-80GB")


def workspaces(name, device, **changes):
    """(bytes, when) of everything that sums of gradients take, by the parameter's name."""
    job = {"architecture": name, "sequence_length": 4096, **changes}
    timeline = ledger(job_from_mapping(job), device=device)
    found = {}
    for entry, size in enumerate(timeline.num_bytes.tolist()):
        if timeline.names[entry].endswith(".workspace"):
            assert timeline.categories[entry] == Category.WORKSPACES
            assert timeline.phases[timeline.born[entry]] == Phase.BACKWARD
            assert timeline.dies[entry] == timeline.born[entry] + 1
            found.setdefault(timeline.names[entry], []).append(size)
    return found


def test_the_norms_of_a_7b_decoder():
    """Two in each of 32 layers and the last one; the counters are rounded to 512 bytes."""
    taken = column_sum(4096, 4096, H100.num_sms, H100.max_threads_per_sm)
    found = workspaces("llama-2-7b", H100)
    sizes = [size for each in found.values() for size in each]
    assert taken.buffer_bytes == 134_217_728
    assert sorted(sizes) == sorted([taken.buffer_bytes, 512] * 65)


def test_a_trace_has_no_gpu_and_no_workspaces():
    assert workspaces("llama-2-7b", None) == {}


def test_short_batches_take_none():
    assert workspaces("llama-2-7b", H100, sequence_length=1020) == {}
    assert workspaces("llama-2-7b", H100, sequence_length=1021) != {}


def test_frozen_norms_take_none():
    assert workspaces("llama-2-7b", H100, finetuning={"method": "lora", "rank": 8}) == {}


def test_biases_of_wide_projections():
    """Qwen2.5 has biases on queries, keys and values."""
    found = workspaces("qwen2.5-7b", H100)
    assert {name.split(".")[-4] for name in found if name.endswith("bias.grad.workspace")} == {"q_proj", "k_proj", "v_proj"}
    of_a_bias = column_sum(512, 4096, H100.num_sms, H100.max_threads_per_sm)
    assert found["self_attn.k_proj.bias.grad.workspace"][0] == of_a_bias.buffer_bytes


def kept(name, **changes):
    """(thread, bytes) of each workspace of cublasLt that a step keeps on an H100."""
    timeline = ledger(job_from_mapping({"architecture": name, **changes}), device=H100)
    entries = [entry for entry, text in enumerate(timeline.names) if text == "cublaslt_workspace"]
    return sorted((timeline.modules[entry], int(timeline.num_bytes[entry])) for entry in entries)


def test_products_with_a_bias_keep_a_workspace_where_torch_does():
    """Recorded: 1 MiB, kept from torch 2.9 on. The autograd thread has its own where it runs layers forward again."""
    newer, older = {"versions": {"torch": "2.9"}}, {"versions": {"torch": "2.4"}}
    assert kept("qwen2.5-7b", **newer) == [("forward thread", 2**20)]
    recomputed = kept("qwen2.5-7b", **newer, activation_checkpointing={"mode": "full"})
    assert recomputed == [("autograd thread", 2**20), ("forward thread", 2**20)]
    assert kept("qwen2.5-7b", **older) == []
    assert kept("llama-2-7b", **newer) == []  # no biases
