"""DeepSpeed's file beside Hugging Face's training arguments: its "auto", its documented files, what is not modelled."""

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.jobs.spec import Offload
from peakcast.models.ledger.scope.scope import out_of_scope

NETWORK = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


def translate(num_gpus: int, deepspeed=None, **training):
    return from_huggingface(NETWORK, training, None, deepspeed, None, num_gpus)


def test_deepspeed_with_auto():
    strategy = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto",
                              "stage3_prefetch_bucket_size": "auto", "overlap_comm": True},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
    }  # fmt: skip
    translation = translate(num_gpus=8, deepspeed=strategy, per_device_train_batch_size=2)
    job = translation.job
    assert (job.framework, job.parallelism.zero_stage, job.parallelism.data_parallel_size) == ("deepspeed", 3, 8)
    assert (job.micro_batch_size, job.gradient_accumulation_steps) == (2, 4)
    assert (job.precision.parameters, job.precision.main_parameters) == ("bfloat16", "float32")
    assert job.offload.optimizer
    assert not job.offload.parameters
    sizes = {"reduce_bucket_size": 256**2, "stage3_prefetch_bucket_size": int(0.9 * 256**2)}
    assert job.framework_options == {**sizes, "offload_pin_memory": False}  # DeepSpeed's own default
    assert translation.unknown == ()
    assert translate(num_gpus=8, **{"deepspeed": strategy}).job.parallelism.zero_stage == 3


LLAMA_FACTORY = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
                 "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
                 "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}  # fmt: skip
"""What its examples/deepspeed/ds_z2_config.json, ds_z3_config.json and ds_z3_offload_config.json have in common."""
ON_HOST = {"device": "cpu", "pin_memory": True}


def test_the_documented_deepspeed_files_reach_the_ledgers_scope():
    z2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
          "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
          "round_robin_gradients": True}  # fmt: skip
    z3 = {"stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
          "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
          "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
          "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
    offload = {**z3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST}
    for zero in (z2, {**z2, "offload_optimizer": ON_HOST}, z3, offload):
        found = translate(num_gpus=8, bf16=True, deepspeed={**LLAMA_FACTORY, "zero_optimization": zero})
        assert (found.unknown, found.unsupported, out_of_scope(found.job)) == ((), (), "")
        assert "offload_pin_memory" not in found.job.framework_options
        assert found.job.offload == Offload(optimizer="offload_optimizer" in zero, parameters="offload_param" in zero)
        assert found.job.framework_options["overlap_comm"] is False
    partly = translate(
        num_gpus=8, bf16=True, deepspeed={"zero_optimization": {**z3, "offload_optimizer": {**ON_HOST, "ratio": 0.3}}}
    )
    assert "ratio=0.3 is not modelled" in partly.unsupported[0]
    scattered = translate(num_gpus=8, bf16=True, deepspeed={"zero_optimization": {**z2, "contiguous_gradients": False}})
    assert (scattered.unsupported, out_of_scope(scattered.job)) == ((), "")
    assert scattered.job.framework_options["contiguous_gradients"] is False
    options = translate(num_gpus=8, bf16=True, deepspeed={"zero_optimization": z2}).job.framework_options
    assert (options["overlap_comm"], options["round_robin_gradients"]) == (False, True)


@pytest.mark.parametrize(
    "asked", [{"communication_data_type": "fp32"}, {"data_types": {"grad_accum_dtype": "fp32"}}]
)
def test_gradients_in_another_dtype_are_said_not_to_be_modelled(asked):
    found = translate(num_gpus=8, bf16=True, deepspeed={"zero_optimization": {"stage": 2}} | asked)
    assert "not modelled" in found.unsupported[0]


def test_what_offloading_is_asked_beyond_its_place_is_said():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True, "ratio": 0.9, "odd": 1}}
    found = translate(bf16=True, deepspeed={"zero_optimization": zero, "bf16": {"enabled": True}}, num_gpus=2)
    assert any("SuperOffload" in sentence for sentence in found.unsupported)
    assert any("ratio=0.9" in sentence for sentence in found.unsupported)
    assert found.unknown == ("zero_optimization.offload_optimizer.odd",)


def test_two_ways_to_shard_at_once_are_refused():
    with pytest.raises(SpecError, match="fsdp and deepspeed are both given"):
        from_huggingface("gpt2", {}, deepspeed={"zero_optimization": {"stage": 3}}, fsdp={"version": 2}, num_gpus=4)


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
def test_what_keeps_more_on_each_rank_needs_more(key):
    """deepspeed 0.19.8 runtime/zero/config.py, whose defaults, 1 and -1, change nothing."""
    def findings(value):
        zero = {"stage": 3, key: value, "zero_quantized_weights": False}
        found = translate(num_gpus=8, bf16=True, deepspeed={"zero_optimization": zero, "bf16": {"enabled": True}})
        return [each.direction for each in found.findings if each.parameter.startswith("zero_optimization.")]

    assert findings(4) == ["more"]
    assert findings(1) == findings(-1) == []
