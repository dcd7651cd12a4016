"""open-instruct's programs of 2026: packed rows, and the layout of OLMo-core's trainer."""

import pytest

from peakcast.doors.questions import translation_of

DPO = (
    "python mason.py --num_nodes 2 --gpus 8 -- torchrun --nnodes=2 --nproc_per_node=8 open_instruct/{}.py "
    "--model_name_or_path olmo-2-1b --max_seq_length 4096 --per_device_train_batch_size 16 --mixer_list a 1.0 --beta 5 "
    "--loss_type dpo_norm {}\n"
)


def test_olmo_cores_rows_are_of_a_number_of_tokens():
    """open_instruct/padding_free_collator.py: `TensorDataCollatorWithFlatteningDPO(max_seq_length=...)` cuts or fills the
    chosen and the rejected samples to that many tokens each."""
    packed, padded = (translation_of(DPO.format("dpo", flag)) for flag in ("--packing", ""))
    assert (packed.job.micro_batch_size, packed.job.sequence_length) == (2, 4096)
    assert (padded.job.micro_batch_size, padded.job.sequence_length) == (32, 4096)
    assert packed.unknown == padded.unknown == ()
    older = translation_of(DPO.format("dpo_tune_cache", "--packing")).job
    assert (older.micro_batch_size, older.batch.form) == (32, "padding_free")


@pytest.mark.parametrize(
    ("flags", "group"), [("", 8), ("--shard_degree 4", 4), ("--num_replicas 8", 2), ("--num_replicas 1", None)]
)
def test_olmo_core_shards_within_a_node_unless_told_otherwise(flags, group):
    read = translation_of(DPO.format("dpo", flags))
    assert read.job.parallelism.data_parallel_size == 16
    assert read.job.parallelism.sharding == ("hsdp" if group else "fsdp2")
    assert read.job.framework_options.get("shard_group_size") == group
    assert not any("nothing is sharded" in said for said in read.assumptions)


def test_a_budget_of_activations_counts_only_where_layers_are_compiled():
    """open_instruct/dpo.py: `if args.activation_memory_budget < 1.0 and args.compile_model`."""
    budget = "--activation_memory_budget 0.1"
    for flags, directions in ((budget, ["less"]), (f"{budget} --no_compile_model", []), ("", [])):
        found = translation_of(DPO.format("dpo", flags)).findings
        assert [each.direction for each in found if each.parameter == "activation_memory_budget"] == directions
    divided = translation_of(DPO.format("dpo", "--tensor_parallel_degree 2")).findings
    assert [each.direction for each in divided if each.parameter == "tensor_parallel_degree"] == ["less"]
