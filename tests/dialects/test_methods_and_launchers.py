"""What preference methods and `accelerate launch` mean, in the words of several projects."""

from __future__ import annotations

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.recognise import dialect_of
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of
from peakcast.jobs.conventions import conventions
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import scope_findings


def test_dpo_in_full_keeps_a_reference_unless_its_log_probabilities_were_made_before():
    values = {
        "model_name_or_path": "gpt2",
        "output_dir": "o",
        "per_device_train_batch_size": 3,
        "beta": 0.1,
        "max_length": 64,
    }
    kept, made = translation_of(values).job, translation_of({**values, "precompute_ref_log_probs": True}).job
    assert (kept.loss.kind, kept.reference, kept.micro_batch_size) == ("dpo", "model", 6)
    assert (made.loss.kind, made.reference, made.micro_batch_size) == ("dpo", "precomputed", 6)


@pytest.mark.parametrize(
    ("name", "values", "kind", "reference"),
    [
        ("training", {"center_rewards_coefficient": 0.01, "per_device_train_batch_size": 2}, "reward", "none"),
        ("axolotl", {"micro_batch_size": 2, "rl": "ipo"}, "dpo", "model"),
        ("axolotl", {"micro_batch_size": 2, "reward_model": True}, "reward", "none"),
        ("llamafactory", {"stage": "dpo", "per_device_train_batch_size": 2}, "dpo", "adapter_off"),
        (
            "torchtune",
            {
                "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_attn_modules": ["q_proj"]},
                "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"},
                "batch_size": 2,
            },
            "dpo",
            "adapter_off",
        ),
    ],
)
def test_a_method_becomes_a_loss_of_both_sequences_of_a_pair(name, values, kind, reference):
    model = {"axolotl": "base_model", "torchtune": None}.get(name, "model_name_or_path")
    values = {**values, model: "gpt2"} if model else values
    assert dialect_of(values) == name
    job = translation_of({**values, "output_dir": "o"} if name == "training" else values).job
    assert (job.loss.kind, job.reference, job.micro_batch_size) == (kind, reference, 4)


@pytest.mark.parametrize(
    ("flags", "stage", "sharding"),
    [
        ("--use_deepspeed --zero_stage 3 --num_processes 4 --mixed_precision bf16", 3, "none"),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --num_processes 4", 0, "fsdp1"),
        ("--use_fsdp --fsdp_version 2 --num_processes 4", 0, "fsdp2"),
        ("--multi_gpu --num_processes 4", 0, "none"),
    ],
)
def test_the_flags_of_accelerate_launch_count(flags, stage, sharding):
    words = "--model_name_or_path gpt2 --output_dir o --per_device_train_batch_size 1 --max_length 64"
    job = translation_of(f"accelerate launch {flags} sft.py \\\n {words}\n").job
    layout = job.parallelism
    assert (layout.data_parallel_size, layout.zero_stage, layout.sharding) == (4, stage, sharding)


CHECKPOINTED_TWICE = (
    "accelerate launch --use_fsdp --num_processes 4 --fsdp_activation_checkpointing true {} --bf16 "
    "--per_device_train_batch_size 1 --model_name_or_path Qwen/Qwen2.5-7B"
)


@pytest.mark.parametrize(
    "command", ["trl/sft.py --gradient_checkpointing", "trl/sft.py", "run_clm.py --gradient_checkpointing"]
)
def test_the_trainer_refuses_its_checkpoints_beside_those_of_fsdp(command):
    """transformers 5.17 trainer.py raises a ValueError; TRL's default is True."""
    with pytest.raises(SpecError, match=r"cannot be given with gradient_checkpointing, .* Trainer refuses both"):
        translation_of(CHECKPOINTED_TWICE.format(command))


@pytest.mark.parametrize(
    "command", ["trl/sft.py --gradient_checkpointing false", "run_clm.py", "llamafactory/train.py --stage sft"]
)
def test_checkpoints_of_fsdp_alone_are_not_reentrant(command):
    """LLaMA-Factory checkpoints the layers itself, inside those of FSDP, and its Trainer does not know of it."""
    found = translation_of(CHECKPOINTED_TWICE.format(command)).job.activation_checkpointing
    assert (found.mode, found.use_reentrant) == ("full", False)


def test_an_unknown_flag_of_accelerate_launch_is_listed():
    text = "accelerate launch --num_processes 4 --what_is_this 3 sft.py --model_name_or_path gpt2 --max_length 64\n"
    assert translation_of(text).unknown == ("what_is_this",)


def test_what_trl_takes_by_itself_is_taken_and_said():
    values = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1}
    plain, trl = translation_of(values), translation_of({**values, "max_length": 64})
    assert plain.job.activation_checkpointing.mode == "none"
    assert trl.job.activation_checkpointing.mode == "full"
    assert any("gradient_checkpointing is not given; the default of trl" in sentence for sentence in trl.assumptions)


@pytest.mark.parametrize(
    ("versions", "checkpoints", "autocasts"),
    [
        ({}, "full", True),
        ({"trl": "0.22.1"}, "full", True),
        ({"trl": "0.21.0"}, "none", True),
        ({"trl": "0.18.2"}, "none", False),
        ({"transformers": "4.53.2"}, "none", True),
        ({"transformers": "4.46.0"}, "none", False),
    ],
)
def test_defaults_of_trl_are_those_of_its_release(versions, checkpoints, autocasts):
    values = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1, "max_length": 64}
    job = translation_of(values, ReadOptions(versions=asked_versions(versions))).job
    assert job.activation_checkpointing.mode == checkpoints
    assert conventions(job)["autocast"] is autocasts


@pytest.mark.parametrize("name", ["max_seq_len", "seq_length", "cutoff_len"])
def test_a_script_may_name_the_length_otherwise(name):
    values = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1, "packing": True, name: 96}
    translation = translation_of(values, ReadOptions(dialect="trl"))
    assert (translation.job.sequence_length, translation.unknown) == (96, ())


def test_fsdp_1_takes_its_strategy_from_the_newer_key_too():
    values = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
    }
    assert translation_of(values, ReadOptions(model="gpt2")).job.framework_options["fsdp_reshard_after_forward"] is False


def test_a_key_that_by_its_name_asks_for_adapters_gives_a_second_reading():
    """LongLoRA's supervised-fine-tune.py has low_rank_training, which nothing here reads."""
    values = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1, "model_max_length": 64}
    plain, asked = translation_of(values), translation_of({**values, "low_rank_training": True})
    off = translation_of({**values, "low_rank_training": False})
    assert [reading.job.finetuning.method for reading in asked.others] == ["lora"]
    assert asked.unknown == off.unknown == ("low_rank_training",)
    assert not off.others or off.others == plain.others


SWIFT_BY_ACCELERATE = """accelerate launch --num_processes 2 --use_fsdp --fsdp_sharding_strategy FULL_SHARD \\
    --fsdp_offload_params true swift/cli/sft.py --model Qwen/Qwen2.5-7B-Instruct --train_type lora \\
    --per_device_train_batch_size 1 --max_length 2048 --quant_bits 4 --lora_rank 8
"""
"""Of ms-swift's examples/train/fsdp_qlora/train.sh (77bd5bc6), whose file says the same to accelerate."""


def test_ms_swift_has_the_launchers_sharding_and_ranks():
    translation = translation_of(SWIFT_BY_ACCELERATE, ReadOptions(versions=asked_versions({"transformers": "4.46"})))
    job = translation.job
    assert (job.parallelism.sharding, job.parallelism.data_parallel_size, job.offload.parameters) == ("fsdp1", 2, True)
    assert not any("float32, twice" in warning for warning in translation.warnings)


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\nNPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-3B-Instruct --train_type lora --max_length 65536 "
        "--per_device_train_batch_size 4 --sequence_parallel_size 8 --padding_free true --attn_impl flash_attn\n",
        "model_name_or_path: Qwen/Qwen2.5-3B-Instruct\nstage: sft\nfinetuning_type: lora\ncutoff_len: 65536\n"
        "per_device_train_batch_size: 4\nsequence_parallel_size: 8\n",
    ],
)
def test_ranks_that_share_a_sequence_have_their_part_of_it(text):
    """ms-swift's examples/train/sequence_parallel (27754799) trains 65,536 tokens on 8 × 40 GiB; 489 were counted."""
    translation = translation_of(text, ReadOptions(num_gpus=8))
    assert (translation.job.sequence_length, translation.job.parallelism.data_parallel_size) == (8192, 8)
    assert any("8,192 of 65,536 tokens" in sentence for sentence in translation.unsupported)
    assert "sequence_parallel_size" not in translation.unknown


def test_scripts_named_after_peft_train_adapters():
    """Of Chinese-LLaMA-Alpaca-2's scripts/training/run_pt.sh (74b70101)."""
    text = (
        "torchrun --nproc_per_node 1 run_clm_pt_with_peft.py --model_name_or_path gpt2 --do_train --fp16 "
        "--per_device_train_batch_size 1 --block_size 512 --output_dir o --lora_rank 64 --trainable c_attn\n"
    )
    jobs = [translation_of(text, ReadOptions(dialect=dialect)).job for dialect in ("training", None)]
    assert [(job.finetuning.method, job.finetuning.rank, job.sequence_length) for job in jobs] == [("lora", 64, 512)] * 2


@pytest.mark.parametrize(
    ("name", "told"), [("MixtralSparseMoeBlock", True), ("MixtralDecoderLayer", False), ("GPT2Block", False)]
)
def test_units_of_fsdp_that_are_parts_of_layers_are_told_of(name, told):
    """Axolotl's examples/mistral/mixtral-qlora-fsdp.yml (0ef1f011) wraps the experts alone."""
    shards = {"fsdp_transformer_layer_cls_to_wrap": name, "fsdp_sharding_strategy": "FULL_SHARD"}
    values = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": shards}
    translation = translation_of(values, ReadOptions(model="gpt2"))
    assert any("parts of layers" in sentence for sentence in translation.unsupported) is told


def test_a_switch_that_is_on_by_default_is_off_with_no_before_it():
    """HfArgumentParser (transformers hf_argparser.py) makes such a flag for every switch whose default is true."""
    off = "--no_gradient_checkpointing --no_remove_unused_columns"
    command = f"python dpo.py --model_name_or_path gpt2 --learning_rate 1e-5 {off} {{}}\n"
    read = translation_of(command.format("--output_dir o"))
    assert (read.job.activation_checkpointing.mode, read.unknown) == ("none", ())
    assert translation_of(command.format("--no_mystery")).unknown == ("no_mystery",)


def test_programs_of_trl_are_known_by_either_order_of_their_words():
    """trl's examples/scripts have online_dpo.py and dpo_online.py, both of which generate, and prm.py, whose network scores
    tokens."""
    for name in ("online_dpo", "dpo_online"):
        with pytest.raises(SpecError, match="online DPO holds more than one training step's tensors"):
            translation_of(f"python examples/scripts/{name}.py --model_name_or_path gpt2 --per_device_train_batch_size 8\n")
    scores = translation_of("python examples/scripts/prm.py --model_name_or_path gpt2 --per_device_train_batch_size 8\n")
    assert (scores.job.loss.kind, scores.job.micro_batch_size, scores.job.precision.parameters) == ("reward", 8, "float32")
    assert any("scores each token" in sentence for sentence in scores.unsupported)


def test_a_mapping_in_a_command_is_json():
    command = "python sft.py --model_name_or_path gpt2 --learning_rate 1e-5 --gradient_checkpointing_kwargs '{}'\n"
    for reentrant in (True, False):
        job = translation_of(command.format(f'{{"use_reentrant": {str(reentrant).lower()}}}')).job
        assert job.activation_checkpointing.use_reentrant is reentrant
    with pytest.raises(SpecError, match="must be a mapping"):
        translation_of(command.format("{use"))


def test_trls_own_names_of_accelerates_configurations():
    command = "trl sft --model_name_or_path gpt2 --max_length 64 --accelerate_config {}\n"
    found = {name: translation_of(command.format(name)) for name in ("fsdp1", "fsdp2", "zero2", "zero3", "multi_gpu")}
    assert not any(read.unknown for read in found.values())
    assert not any(read.unsupported for read in found.values())
    assert found["fsdp1"].job.framework_options["fsdp1_forward_prefetch"]
    layouts = {name: read.job.parallelism for name, read in found.items()}
    assert [(each.sharding, each.zero_stage, each.data_parallel_size) for each in layouts.values()] == [
        ("fsdp1", 0, 8), ("fsdp2", 0, 8), ("none", 2, 8), ("none", 3, 8), ("none", 0, 8),
    ]  # fmt: skip
    assert translation_of(command.format("zero2 --num_processes 4")).job.parallelism.data_parallel_size == 4
    with pytest.raises(SpecError, match=r"accelerate_config='mine.yaml' in the text is another file"):
        translation_of(command.format("mine.yaml"))


def test_hyphens_stand_for_underscores_where_a_programs_parser_takes_either(tmp_path):
    (tmp_path / "run.yml").write_text("base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 64\nbf16: true\n")
    (tmp_path / "run.sh").write_text("axolotl train run.yml --micro-batch-size 4 --sequence-len=128\n")
    read = translation_of(tmp_path / "run.sh")
    assert (read.job.micro_batch_size, read.job.sequence_length, read.unknown) == (4, 128, ())
    read = translation_of("python sft.py --model-name-or-path gpt2 --per-device-train-batch-size 3 --max-length 64\n")
    assert (read.job.micro_batch_size, read.job.sequence_length, read.unknown) == (3, 64, ())


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [("CUDA_VISIBLE_DEVICES=0,1,2", 3), ("NPROC_PER_NODE=4 NNODES=2", 8), ("CUDA_VISIBLE_DEVICES=1", 1), ("", 1)],
)
def test_llamafactorys_command_starts_a_process_for_each_gpu_that_it_sees(environment, ranks):
    flags = "stage=sft model_name_or_path=gpt2 template=default cutoff_len=64 finetuning_type=full bf16=true"
    read = translation_of(f"{environment} llamafactory-cli train {flags}\n".lstrip())
    assert read.job.parallelism.data_parallel_size == ranks
    assert any("the number of GPUs is not given" in sentence for sentence in read.assumptions) == (not environment)


def test_of_several_different_trainings_the_last_one_is_read_and_that_is_said():
    script = "for bs in 1 4; do\n  python sft.py --model_name_or_path gpt2 --per_device_train_batch_size $bs\ndone\n"
    read = translation_of(script)
    assert read.job.micro_batch_size == 4
    assert "The script starts 2 different trainings; the last one is read." in read.assumptions
    assert not any("different trainings" in each for each in translation_of(script.replace("1 4", "4 4")).assumptions)


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_quantised_networks_of_older_trl_are_in_float32_without_autocast(bf16, precision):
    """trl 0.15.2 prepare_peft_model: peft's prepare_model_for_kbit_training, and casts to bf16 only with `args.bf16`."""
    values = {"model_name_or_path": "llama-3.2-1b", "use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}
    values["bf16"] = bf16
    versions = ReadOptions(versions=asked_versions("trl=0.15.2"))
    job = translation_of({**values, "per_device_train_batch_size": 1, "max_length": 64}, versions).job
    assert (job.precision.parameters, job.precision.compute) == (precision, precision)
    assert job.framework_options["quantized_compute_dtype"] == "bfloat16" if not bf16 else job.framework_options["autocast"]


PACKED = (
    "accelerate launch --use_fsdp --fsdp_version {} --num_processes 4 trl/sft.py --use_peft --load_in_4bit --bf16 {} "
    "--dtype bfloat16 --per_device_train_batch_size 1 --max_length 64 --model_name_or_path Qwen/Qwen2.5-7B"
)


@pytest.mark.parametrize("version", [1, 2])
def test_how_packed_weights_are_stored_decides_whether_fsdp_divides_them(version):
    """BitsAndBytesConfig stores them as uint8: FSDP1 refuses that, and accelerate 1.15 leaves them out of FSDP2."""
    plain = translation_of(PACKED.format(version, ""))
    assert plain.job.framework_options["quantized_storage"] == "uint8"
    said = {finding.parameter: finding.code for finding in (*plain.findings, *scope_findings(plain.job))}
    if version == 1:
        assert said["framework_options.quantized_storage"] == "run_would_fail"
    else:
        assert "bnb_4bit_quant_storage" in said
    stored = translation_of(PACKED.format(version, "--bnb_4bit_quant_storage bfloat16"))
    assert "quantized_storage" not in stored.job.framework_options
    assert not scope_findings(stored.job)


def test_gptqs_packed_weights_are_buffers_which_fsdp_does_not_divide():
    """A rank of four has all of Mistral-7B's 6.98e9 packed elements, half a byte each."""
    words = PACKED.format(2, "").replace(" --load_in_4bit", "").replace("Qwen/Qwen2.5-7B", "TheBloke/Mistral-7B-v0.1-GPTQ")
    whole = translation_of(words).job
    assert whole.framework_options["quantized_storage"] == "buffers"
    divided = whole.replace(framework_options=FrozenMapping())
    held = [int(ledger(job).totals[-1]) for job in (whole, divided)]
    assert held[0] - held[1] == pytest.approx(6.98e9 / 2 * 3 / 4, rel=0.02)


def test_accelerates_file_is_read_by_its_flags_short_name_too(tmp_path):
    """As in accelerate's examples/slurm/submit_multinode_fsdp.sh; argparse takes a flag's beginning for the flag."""
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\n")
    (tmp_path / "run.sh").write_text(
        'export L="accelerate launch --config ${ACCELERATE_DIR}fsdp.yaml --num_processes 8"\n'
        'export C="$L run_clm.py --model_name_or_path qwen2.5-7b --per_device_train_batch_size 1 --block_size 512"\n'
        "srun $C --bf16\n"
    )
    read = translation_of(tmp_path / "run.sh")
    assert (read.job.parallelism.sharding, read.job.parallelism.data_parallel_size, read.unknown) == ("fsdp2", 8, ())
