"""Jobs of libraries that have networks of their own, beside transformers'."""

import json
import math
from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.common.litgpt_targets import adapted_of_qkv, litgpt_targets
from peakcast.dialects.common.own_networks import litgpt_config, own_network, torchtune_arguments
from peakcast.doors.recording import timelines_from
from peakcast.jobs.spec import ActivationCheckpointing, Loss, job_to_mapping
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.recorded.parameters import recorded_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.recipes import shelf
from peakcast.models.recipes.baseline_choice import StackTraces, baseline_from, tracer
from peakcast.models.recipes.recipe import recorded_alone
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.regime import regime
from peakcast.models.recipes.shelf import installed_libraries, wants_recipe
from peakcast.timelines.timeline import Timeline
from peakcast.timelines.traced import Traced
from tests.models.recipes.walks import walk


@pytest.mark.parametrize("library", ["nanotron", "torchtitan"])
def test_a_trace_of_another_network_says_so(library, job):
    asked = job(ranks=1, layout="ddp", versions=FrozenMapping({library: "main"}))
    with timelines_from("trace"):
        assert f"{library} has its own" in out_of_scope(asked)
        assert out_of_scope(asked.replace(versions=FrozenMapping())) == ""


def test_a_trace_of_a_users_program_is_of_its_own_network(job):
    asked = job(ranks=1, layout="ddp", versions=FrozenMapping({"nanotron": "main"}))
    with baseline_from("trace", lambda *_: {}):
        assert out_of_scope(asked) == ""


@pytest.fixture
def asked(job, monkeypatch, tmp_path):
    """A job of LitGPT's own network on one GPU, for which no recipe is there."""
    monkeypatch.setenv("PEAKCAST_RECIPES", str(tmp_path))
    return job(ranks=1, layout="ddp", versions=FrozenMapping({"litgpt": "0.5.13"}))


def test_a_recipe_is_of_the_librarys_own_network(asked):
    found = regime(asked)
    assert found.architecture == own_network(asked) == own_network(found)
    assert json.loads(found.architecture.configuration)["n_embd"] == asked.architecture.hidden_size
    assert regime(found) == found
    assert job_from_mapping(job_to_mapping(found)) == found
    others = (asked.replace(versions=FrozenMapping()), asked.replace(versions=FrozenMapping({"torchtune": "0.6.1"})))
    assert len({regime(one).architecture for one in (asked, *others)}) == 3


def test_a_recipe_answers_where_there_is_one_of_the_asked_release(asked):
    """Without one, or of another minor release, the ledger answers as before."""
    ledger_bytes = ledger(asked).peak().num_bytes
    assert not wants_recipe(asked)
    recorded = asked.replace(versions=FrozenMapping({"litgpt": "0.5.13", "torch": "2.13.0", "lightning": "2.6.6"}))
    shelf.shelve(recorded, replace(recorded_alone(lambda *_: walk(layers=2), (1, 128)), versions=recorded.versions))
    for version in ("0.5.13", "0.4.2"):
        named = recorded.replace(versions=FrozenMapping({**recorded.versions, "litgpt": version}))
        assert wants_recipe(named) == (version == "0.5.13")
    assert ledger(recorded).peak().num_bytes != ledger_bytes
    assert out_of_scope(recorded) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "eager"}, "attention='eager'"),
        ({"loss": Loss(fused_linear_cross_entropy=True)}, "a fused loss"),
        ({"activation_checkpointing": ActivationCheckpointing(mode="full", every_n_layers=2)}, "of every layer"),
    ],
)
def test_what_is_not_recorded_of_own_networks(changes, reason, asked):
    assert reason in cannot_be_recorded(asked.replace(**changes))
    assert cannot_be_recorded(asked.replace(**changes, versions=FrozenMapping())) == ""


NETWORKS = {  # litgpt 0.5.13 config.py
    "pythia-1b": {"norm_class_name": "LayerNorm", "parallel_residual": True, "shared_attention_norm": False, "bias": True,
                  "mlp_class_name": "GptNeoxMLP", "rotary_percentage": 0.25, "gelu_approximate": "none", "n_embd": 2048},
    "falcon-7b": {"norm_class_name": "LayerNorm", "shared_attention_norm": True, "bias": False, "n_query_groups": 1,
                  "padded_vocab_size": 65024},
    "phi-2": {"shared_attention_norm": True, "rotary_percentage": 0.4, "gelu_approximate": "tanh", "lm_head_bias": True},
    "gemma-2b": {"mlp_class_name": "GemmaMLP", "scale_embeddings": True, "head_size": 256, "intermediate_size": 16384},
    "mixtral-8x7b": {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "intermediate_size": 14336},
    "qwen2.5-7b": {"attn_bias": True, "bias": False, "mlp_class_name": "LLaMAMLP"},
    "qwen3-8b": {"norm_qk": True, "head_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_fields_of_litgpts_config(name):
    found = litgpt_config(catalog.architecture(name))
    assert found == {**found, **NETWORKS[name]}


@pytest.mark.parametrize("name", ["bloom-7b1", "gpt2", "deepseek-v3", "olmo-7b"])
def test_litgpt_has_no_such_network(name):
    assert litgpt_config(catalog.architecture(name)) is None


def test_the_arguments_of_torchtunes_functions():
    found = torchtune_arguments(catalog.architecture("llama-3.2-3b"))
    sizes = {"vocab_size": 128256, "num_layers": 28, "num_heads": 24, "num_kv_heads": 8, "embed_dim": 3072}
    assert found == {**found, **sizes, "builder": "llama3_2", "intermediate_dim": 8192, "max_seq_len": 131072}
    assert torchtune_arguments(catalog.architecture("llama-3.1-8b"))["builder"] == "llama3_1"
    assert torchtune_arguments(catalog.architecture("pythia-1b")) is None


def test_parts_of_a_joined_projection_are_known():
    """LitGPT adapts queries and values unless it is told otherwise; falcon and Phi-3 have one matrix for all three."""
    joined, apart = catalog.architecture("falcon-7b"), catalog.architecture("llama-3.1-8b")
    assert litgpt_targets(["lora_query", "lora_value"], joined) == ("query_key_value",)
    assert adapted_of_qkv(["lora_query", "lora_value", "lora_mlp"], joined) == "qv"
    assert adapted_of_qkv(["lora_query", "lora_value"], apart) == ""


def test_a_trace_says_which_kernels_its_environment_lacked(job):
    step = Timeline.from_entries((), (0,))
    asked = job(ranks=1, layout="ddp")
    with baseline_from("trace", StackTraces(lambda *_: Traced(first=step, steady=step, replaced={"scan": "fla"}))):
        assert out_of_scope(asked) == ""  # nothing has been traced yet
        tracer()(asked, 0, None)
        assert "fla was not installed" in out_of_scope(asked)


def test_a_trace_of_another_release_than_asked_says_so(job):
    here = installed_libraries()["transformers"]
    with timelines_from("trace"):
        assert "is asked for" in out_of_scope(job(ranks=1, layout="ddp", versions=FrozenMapping({"transformers": "4.30"})))
        assert out_of_scope(job(ranks=1, layout="ddp", versions=FrozenMapping({"transformers": here}))) == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_kernel": "in_place"}, "loss_kernel='in_place'"),
        ({"norm_kernel": "fused"}, "norm_kernel='fused'"),
        ({"lora_kernel": "fused"}, ""),  # without adapters there is nothing for it to do
        ({"liger_kernels": True}, ""),  # which runs where a network is traced, or is missing there
    ],
)
def test_a_trace_says_which_kernels_of_the_job_it_does_not_run(options, said, job):
    asked = job(ranks=1, layout="ddp").replace(framework="huggingface", framework_options=FrozenMapping(options))
    with timelines_from("trace"):
        assert said in out_of_scope(asked)
        assert said or not out_of_scope(asked)


def test_the_shipped_recipes_of_torchtune_answer_without_it(monkeypatch):
    """With the weights that Llama 3.1 and 3.2 have, at other widths and depths than were recorded."""
    monkeypatch.setenv("PEAKCAST_RECIPES", "none")
    loss = {"loss_kernel": "chunked_logits", "logits_chunks": 8}
    base = {"framework": "torch", "versions": {"torchtune": "0.6"}, "activation_checkpointing": {"mode": "full"}}
    for name, num_weights in (("llama-3.1-70b", 70_553_706_496), ("llama-3.2-1b", 1_235_814_400)):
        asked = job_from_mapping({"architecture": name, "sequence_length": 4096, "framework_options": loss, **base})
        tensors = recorded_parameters(asked, shelf.recipe_of(asked))
        assert sum(math.prod(tensor.shape) for tensor in tensors) == num_weights
        assert out_of_scope(asked) == ""
