"""Copies of the token table and of the lm_head that peft trains beside adapters (`modules_to_save`)."""

from __future__ import annotations

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.jobs.conventions import adapter_dtype
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.ignored import ignored_findings
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category

VOCABULARY, WIDTH = 32_000, 512
TABLE_BYTES = VOCABULARY * WIDTH * 2
NETWORK = {"name": "llama-3.1-8b", "num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 1024}
NETWORK |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
BOTH = ["embed_tokens", "lm_head"]
SHARDS = {"data_parallel_size": 4, "sharding": "fsdp2"}
STAGE_3 = {"framework": "deepspeed", "parallelism": {"data_parallel_size": 4, "zero_stage": 3}}


def job(copies=BOTH, *, tied=False, tuning=None, **fields):
    """LoRA with `copies` on a small Llama. `tied`: one table is looked up and is the lm_head's matrix."""
    finetuning = {"method": "lora", "rank": 8, "targets": ["q_proj"], "modules_to_save": copies, **(tuning or {})}
    network = {**NETWORK, "tie_word_embeddings": tied}
    asked = {"architecture": network, "micro_batch_size": 2, "sequence_length": 256, "finetuning": finetuning}
    return expand({"include": [{**asked, **fields}]})[0]


def resident(one, category):
    """Bytes of a category between steps."""
    timeline = ledger(one)
    return timeline.composition(len(timeline.phases) - 1).get(category, 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("copies", [["embed_tokens"], ["lm_head"], BOTH])
def test_a_copy_is_a_second_matrix_with_the_states_of_its_optimizer(copies, tied):
    """A shared table has one frozen matrix, and a copy for each end that is named."""
    plain, copied = job([], tied=tied), job(copies, tied=tied)
    added = len(copies) * TABLE_BYTES
    assert resident(copied, Category.PARAMETERS) - resident(plain, Category.PARAMETERS) == added
    assert resident(copied, Category.OPTIMIZER_STATES) - resident(plain, Category.OPTIMIZER_STATES) == 2 * added


def test_copies_have_their_modules_names_and_frozen_weights_pefts():
    ends = {tensor.name: tensor.trains for tensor in stored_parameters(job()) if not tensor.module.startswith("layers")}
    assert ends == {
        "embed_tokens.original_module.weight": False, "embed_tokens.weight": True, "norm.weight": False,
        "lm_head.original_module.weight": False, "lm_head.weight": True,
    }  # fmt: skip


def test_a_copied_table_gives_the_first_layer_an_input_with_a_gradient():
    """Without checkpoints and copies the first layer's input has none, so the first norm keeps nothing."""
    first = [ledger(job(copies)) for copies in ([], ["embed_tokens"])]
    kept = [{name for name, module in zip(one.names, one.modules, strict=True) if module == "layers.0"} for one in first]
    assert kept[0] < kept[1]


def test_names_of_other_families_ends_are_passed_over():
    """peft looks for modules whose name ends so, and says nothing where there is none."""
    of_others = job(["wte", "embed_out", "lm_head"])
    assert [one.name for one in stored_parameters(of_others)] == [one.name for one in stored_parameters(job(["lm_head"]))]
    (said,) = ignored_findings(of_others)
    assert said.parameter == "finetuning.modules_to_save"
    assert "names wte, embed_out, which" in said.sentence
    gpt2 = {"architecture": {"name": "gpt2", "num_hidden_layers": 2}, "tuning": {"targets": ["c_attn"]}}
    for name, copies in (("wte", 1), ("embed_tokens", 0)):
        assert sum(one.trains and one.is_token_table for one in stored_parameters(job([name], **gpt2))) == copies


def test_what_libraries_refuse_is_said():
    assert "FSDP2 refuses" in out_of_scope(job(tied=True, parallelism=SHARDS, framework_options={"autocast": True}))
    assert out_of_scope(job(parallelism=SHARDS, framework_options={"autocast": True})) == ""
    assert "one dtype of all that trains: adapters of float32" in out_of_scope(job(**STAGE_3))
    assert "modules_to_save" not in out_of_scope(job(tuning={"adapter_dtype": "bfloat16"}, **STAGE_3))
    assert "modules_to_save" not in out_of_scope(job())


@pytest.mark.parametrize(("deepspeed", "dtype"), [("0.19.1", "bfloat16"), ("0.19.2", "float32"), ("0.16.4", "bfloat16")])
def test_deepspeeds_engine_cast_adapters_under_stage_3_until_a_release(deepspeed, dtype):
    """Issue 8072 of DeepSpeed: until 0.19.1 it called module.bfloat16() on networks that it had partitioned too."""
    assert adapter_dtype(job([], versions={"deepspeed": deepspeed}, **STAGE_3)) == dtype
