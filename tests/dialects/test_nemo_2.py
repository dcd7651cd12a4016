"""NeMo 2's recipes by name, read from an installed package: here a small one of the same structure."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from peakcast.core.errors import SpecError
from peakcast.doors.questions import translation_of

SHARED = """
raise RuntimeError("a recipe is read, not run")
def bf16_mixed() -> run.Config[MegatronMixedPrecision]:
    return run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True)
def llama_model(version: str) -> run.Config[pl.LightningModule]:
    config = None
    if version == "other":
        config = run.Config(Llama3Config70B)
    elif version == "llama3_8b":
        config = run.Config(Llama3Config8B)
    return run.Config(LlamaModel, config=config)
"""
RECIPE = """
import nemo_run as run
from nemo.collections.llm.recipes.shared import bf16_mixed, llama_model
NAME = "llama3_8b"
def model() -> run.Config[pl.LightningModule]:
    return llama_model(version=NAME)
def trainer(tensor_parallelism=1, context_parallelism=2, num_nodes=1, num_gpus_per_node=8) -> run.Config[nl.Trainer]:
    strategy = run.Config(
        nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, context_parallel_size=context_parallelism,
        sequence_parallel=False, ddp=run.Config(DistributedDataParallelConfig, overlap_param_gather=True),
    )
    trainer = run.Config(
        nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy, max_steps=5
    )
    return trainer
def pretrain_recipe(dir=None, num_nodes=1, num_gpus_per_node=8, performance_mode=False, fn=pretrain) -> run.Partial:
    recipe = run.Partial(
        fn, model=model(), trainer=trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        optim=run.Config(MegatronOptimizerModule, config=run.Config(OptimizerConfig, use_distributed_optimizer=True)),
    )
    if performance_mode:
        recipe = optimized(recipe)
    return recipe
def finetune_recipe(num_nodes=1, num_gpus_per_node=8, peft_scheme="lora") -> run.Partial:
    recipe = pretrain_recipe(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    if peft_scheme is None or peft_scheme.lower() == "none":
        recipe.trainer.strategy.tensor_model_parallel_size = 2
    elif peft_scheme.lower() in ["lora", "dora"]:
        recipe.peft = run.Config(PEFT_STR2CLS[peft_scheme.lower()])
        recipe.peft.dim = 8
    return recipe
"""
LONG = """
from nemo.collections.llm.recipes import llama3_8b
def pretrain_recipe(num_nodes=2) -> run.Partial:
    recipe = llama3_8b.pretrain_recipe(num_nodes=num_nodes)
    recipe.trainer = llama3_8b.trainer(tensor_parallelism=4, num_nodes=num_nodes)
    recipe.data.seq_length = 16384
    return recipe
"""
PROGRAM = """
from nemo.collections import llm
import nemo_run as run
NODES = 2
def main():
    recipe = llm.llama3_8b.pretrain_recipe(dir="/c", num_nodes=NODES, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    recipe.trainer.strategy.sequence_parallel = True
    recipe.data.micro_batch_size = 2
    recipe.model.config.recompute_granularity = "selective"
    run.run(recipe, executor=None)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "nemo" / "collections" / "llm" / "recipes"
    recipes.mkdir(parents=True)
    written = {"finetune_default": "", "shared": SHARED, "llama3_8b": RECIPE, "llama3_8b_16k": LONG}
    for name, text in written.items():
        (recipes / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


def read(text: str) -> tuple[object, ...]:
    translation = translation_of(text + "\n")
    assert translation.unknown == ()
    job = translation.job
    layout = job.parallelism
    sizes = (layout.tensor_parallel_size, layout.context_parallel_size, layout.data_parallel_size)
    return job.architecture.name, job.micro_batch_size, job.sequence_length, job.gradient_accumulation_steps, sizes


def test_a_factory_is_read_with_its_arguments_and_overrides(package):
    command = "nemo llm pretrain --factory"
    assert read(f"{command} llama3_8b") == ("llama-3-8b", 1, 8192, 128, (1, 2, 4))
    assert read(f"{command} 'llama3_8b(num_nodes=2)'") == ("llama-3-8b", 1, 8192, 64, (1, 2, 8))
    overrides = "data.micro_batch_size=4 data.global_batch_size=16 trainer.strategy.tensor_model_parallel_size=2"
    assert read(f"{command} llama3_8b {overrides}") == ("llama-3-8b", 4, 8192, 2, (2, 2, 2))
    assert read(f"{command} llama3_8b_16k") == ("llama-3-8b", 1, 16384, 256, (4, 2, 2))


def test_fine_tuning_follows_its_scheme(package):
    adapters = translation_of("nemo llm finetune --factory llama3_8b -y\n")
    tuning = adapters.job.finetuning
    assert (adapters.unsupported, tuning.method, tuning.rank, tuning.targets) == ((), "lora", 8, ())
    assert adapters.unknown == ()
    other = translation_of("nemo llm finetune --factory 'llama3_8b(peft_scheme=\"DoRA\")'\n")
    assert [sentence.split(" is ")[0] for sentence in other.unsupported] == ["peft=dora"]
    whole = translation_of("nemo llm finetune --factory 'llama3_8b(peft_scheme=None)'\n")
    assert (whole.unsupported, whole.job.parallelism.tensor_parallel_size) == ((), 2)
    assert whole.job.finetuning.method == "full"


def test_a_program_that_takes_a_recipe_and_changes_it(package):
    job = translation_of(PROGRAM).job
    layout = job.parallelism
    assert (layout.tensor_parallel_size, layout.sequence_parallel, layout.data_parallel_size) == (4, True, 2)
    assert (job.micro_batch_size, job.activation_checkpointing.mode, layout.zero_stage) == (2, "selective", 1)


def test_a_recipe_that_is_not_there_is_refused_with_the_way_out(package, monkeypatch):
    with pytest.raises(SpecError, match="factory='llama3_9b' is no recipe of the installed NeMo; did you mean 'llama3_8b'"):
        translation_of("nemo llm pretrain --factory llama3_9b\n")
    monkeypatch.setattr("peakcast.dialects.nemo_2._package", lambda: None)
    for text in ("nemo llm pretrain --factory llama3_8b\n", PROGRAM):
        with pytest.raises(SpecError, match=r"llama3_8b is a NeMo 2 recipe.*pip install --no-deps.*peakcast megatron"):
            translation_of(text)
