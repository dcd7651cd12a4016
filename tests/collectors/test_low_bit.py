"""bitsandbytes and torchao really run, on this machine's CPU: quantised bases under adapters, optimizers of few bits."""

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.stacks import build
from peakcast.collectors.tracing.traceable import check_traceable
from peakcast.core.errors import CollectorError
from peakcast.models.ledger.parameters.quantization import quantized_linear_bytes
from peakcast.models.ledger.scope.scope import scope_findings

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' and torchao's own
TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip


def trained(**changes):
    """The run of a tiny job after two steps."""
    (job,) = expand({"include": [{"architecture": TINY, "sequence_length": 32} | changes]})
    training = build(job, "cpu")
    for _ in range(2):
        loss = training.forward(lambda: None)
        training.backward(loss)
        training.clip()
        training.step()
        training.zero_grad()
    assert torch.isfinite(loss)
    return training


@pytest.mark.parametrize(
    "quantization",
    [{"quantization": "nf4"}, {"quantization": "nf4", "double_quantization": True}, {"quantization": "int8"}],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.needs("bitsandbytes")
def test_a_quantised_base_trains_its_adapters_and_keeps_the_bytes_of_the_formula(quantization, checkpointing):
    tuning = {"method": "qlora", "rank": 4, "targets": ["all-linear"], **quantization}
    training = trained(finetuning=tuning, **{"activation_checkpointing.mode": checkpointing})
    network = training.model.get_base_model()
    layer = network.model.layers[0].mlp.gate_proj.base_layer
    expected = dict(quantized_linear_bytes((512, 256), training.job.finetuning))
    assert layer.weight.nbytes == expected["weight"]
    if "nf4" in quantization.values():
        state = layer.weight.quant_state
        assert state.absmax.nbytes == expected["absmax"]
        assert state.code.nbytes == expected["code"]
        if tuning.get("double_quantization"):
            assert state.state2.absmax.nbytes == expected["nested_absmax"]
            assert state.state2.code.nbytes == expected["nested_code"]
    assert network.lm_head.weight.dtype == torch.bfloat16  # the head is not quantised
    assert {p.dtype for p in training.trained} == {torch.float32}
    assert len(training.optimizer.state) == len(training.trained) == 7 * 2


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "paged_adamw_8bit", "paged_lion_8bit"])
@pytest.mark.needs("bitsandbytes")
def test_states_of_eight_bits_are_of_32_for_embeddings_with_the_trainer_alone(name):
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for framework, embedding in (("huggingface", torch.float32), ("torch", torch.uint8)):
        manager.initialize()  # it is the process's, and a cell has a process of its own
        training = trained(framework=framework, **{"optimizer.name": name})
        state = training.optimizer.state
        model = training.model.model
        assert state[model.embed_tokens.weight]["state1"].dtype == embedding
        matrix = state[model.layers[0].mlp.up_proj.weight]
        assert matrix["state1"].dtype == torch.uint8
        assert matrix["absmax1"].numel() == 512 * 256 // 256
        assert state[model.norm.weight]["state1"].dtype == torch.float32  # below 4096 elements


@pytest.mark.parametrize(("name", "states"), [("paged_adamw_32bit", 2), ("paged_lion_32bit", 1), ("lion", 1)])
@pytest.mark.needs("bitsandbytes")
def test_optimizers_of_32_bits_from_bitsandbytes(name, states):
    training = trained(**{"optimizer.name": name})
    found = training.optimizer.state[training.model.lm_head.weight]
    assert [found[f"state{number}"].dtype for number in range(1, states + 1)] == [torch.float32] * states


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("adamw_8bit", 8), ("adamw_4bit", 4), ("adamw_fp8", 8)])
@pytest.mark.needs("torchao")
def test_states_of_torchao(name, bits):
    options = {"framework_options": {"adamw_8bit_library": "torchao"}} if name == "adamw_8bit" else {}
    training = trained(**{"optimizer.name": name}, **options)
    state = training.optimizer.state[training.model.lm_head.weight]
    inner = [getattr(state["exp_avg"], part) for part in state["exp_avg"].__tensor_flatten__()[0]]
    assert max(part.nbytes for part in inner) == 1000 * 256 * bits // 8


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({"finetuning": {"method": "qlora", "rank": 4, "quantization": "nf4"}}, "bitsandbytes"),
        ({"optimizer.name": "paged_adamw_8bit"}, "bitsandbytes"),
        ({"optimizer.name": "adamw_4bit"}, "torchao"),
    ],
)
def test_without_the_package_the_sentence_says_what_to_install(monkeypatch, changes, package):
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CollectorError, match=f"needs {package}.*pip install {package}"):
        trained(**changes)


@pytest.mark.parametrize(
    ("parameter", "changes"),
    [
        ("finetuning.quantization", {"finetuning": {"method": "qlora", "rank": 4, "quantization": "int8"}}),
        ("optimizer.name", {"optimizer.name": "paged_adamw_8bit"}),
    ],
)
def test_what_has_no_trace_is_refused_in_a_sentence(parameter, changes):
    (job,) = expand({"include": [{"architecture": TINY} | changes]})
    with pytest.raises(CollectorError, match=f"{parameter}=.* cannot be traced"):
        check_traceable(job)


@pytest.mark.needs("bitsandbytes")
def test_packed_weights_are_traced_as_the_library_multiplies_them(ledger_equals_trace):
    """Without their values; the ledger, which was written from the library's source, says the same."""
    tuning = {"method": "qlora", "rank": 4, "targets": ["all-linear"], "quantization": "nf4"}
    wide = TINY | {"hidden_size": 1024, "intermediate_size": 2048}
    (job,) = expand({"include": [{"architecture": wide, "sequence_length": 256, "finetuning": tuning}]})
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.parametrize(
    ("sharding", "storage"), [("fsdp1", "compute"), ("fsdp2", "compute"), ("fsdp2", "uint8"), ("none", "uint8")]
)
@pytest.mark.needs("bitsandbytes")
def test_packed_weights_are_divided_as_they_are_stored(ledger_equals_trace, sharding, storage):
    tuning = {"method": "qlora", "rank": 4, "targets": ["all-linear"], "quantization": "nf4"}
    wide = TINY | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 16000}
    cell = {"architecture": wide, "sequence_length": 256, "finetuning": tuning}
    cell["parallelism"] = {"data_parallel_size": 2, "sharding": sharding}
    (job,) = expand({"include": [cell | {"framework_options.quantized_storage": storage}]})
    ledger_equals_trace(job, rel=2e-3)


@pytest.mark.parametrize(
    "changes",
    [{"optimizer.name": "lion"}, {"optimizer.name": "rmsprop", "framework_options.rmsprop_library": "bitsandbytes"}],
)
@pytest.mark.needs("bitsandbytes")
def test_steps_of_bitsandbytes_in_32_bits_are_traced(ledger_equals_trace, changes):
    wide = TINY | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 16000}
    (job,) = expand({"include": [{"architecture": wide, "sequence_length": 256} | changes]})
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.parametrize(("library", "codes"), [("torch", set()), ("bitsandbytes", {"run_would_fail"})])
def test_an_optimizer_of_bitsandbytes_by_its_library_cannot_step_over_dtensors(library, codes):
    cell = {"architecture": TINY, "optimizer.name": "rmsprop", "framework_options.rmsprop_library": library}
    (job,) = expand({"include": [cell | {"parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"}}]})
    assert {finding.code for finding in scope_findings(job)} == codes
