"""The trace of real training steps without a GPU: against hand counts, PyTorch's own tracker, and the ledger."""

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.tracing.trace import timeline_from_mapping, timeline_to_mapping
from peakcast.timelines.timeline import Category, Phase

CUT = {"name": "llama-3.1-8b", "num_hidden_layers": 2}
CELLS = {
    "llama": {"architecture": CUT},
    "llama_fused": {"architecture": CUT, "optimizer.implementation": "fused"},
    "llama_checkpointed": {"architecture": CUT, "activation_checkpointing.mode": "full"},
    "llama_every_other": {"architecture": CUT, "activation_checkpointing": {"mode": "full", "every_n_layers": 2}},
    "llama_eager": {"architecture": CUT, "attention": "eager"},
    "gpt2_loop": {"architecture": {"name": "gpt2", "num_hidden_layers": 2}, "optimizer.implementation": "loop"},
    "neox_accumulating": {
        "architecture": {"name": "pythia-160m", "num_hidden_layers": 2},
        "gradient_accumulation_steps": 2,
    },
    "qwen_lora": {
        "architecture": {"name": "qwen2.5-0.5b", "num_hidden_layers": 2},
        "finetuning": {"method": "lora", "rank": 16},
    },
    "gemma_tied_plain_loop": {"architecture": {"name": "gemma-2b", "num_hidden_layers": 2}, "framework": "torch"},
    "llama_autocast": {
        "architecture": CUT,
        "precision.parameters": "float32",
        "framework_options": {"autocast": True},
    },
}


def job(name):
    return expand({"base": {"sequence_length": 512, "micro_batch_size": 2}, "include": [CELLS[name]]})[0]


WHOLE = ("llama_every_other", "gemma_tied_plain_loop")
"""What they run is in cells of all layers checkpointed and, in `test_ledger_against_traces.py`, of plain loops."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.whole] * (name in WHOLE)) for name in CELLS])
def test_the_ledger_equals_the_trace_phase_by_phase(ledger_equals_trace, name):
    """One GPU: within 0.1 % of the phase's peak, in the first and in a steady step."""
    ledger_equals_trace(job(name), rel=1e-3)


def test_parameters_and_states_are_what_a_hand_counts(traced):
    timelines = traced(job("llama"))
    h, f, v, k = 4096, 14336, 128256, 1024
    parameters = 2 * v * h + h + 2 * (2 * h * h + 2 * h * k + 3 * h * f + 2 * h)
    timeline = timelines["steady"]
    inside = timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)
    assert inside[Category.PARAMETERS] == pytest.approx(2 * parameters, rel=1e-6)
    assert inside[Category.OPTIMIZER_STATES] == pytest.approx(4 * parameters, rel=1e-6)
    # foreach on fake tensors really takes the foreach path: one more copy of the decaying group
    assert inside[Category.OPTIMIZER_TEMPORARIES] == pytest.approx(2 * parameters, rel=1e-4)


def test_attention_takes_the_fused_path_and_eager_does_not(traced):
    labels = set(traced(job("llama"))["steady"].labels)
    assert any("flash_attention" in label for label in labels)
    assert not any("_softmax.default" in label and "log" not in label for label in labels)
    eager = set(traced(job("llama_eager"))["steady"].labels)
    assert any(label.startswith("_softmax") for label in eager)


def test_checkpointing_recomputes_with_the_same_attention(traced):
    timeline = traced(job("llama_checkpointed"))["steady"]
    backward = [label for label, phase in zip(timeline.labels, timeline.phases, strict=True) if phase == Phase.BACKWARD]
    assert sum("flash_attention.default" in label for label in backward) == 2  # one recomputation per layer


def test_autocast_is_not_silently_off(traced):
    labels = traced(job("llama_autocast"))["steady"].labels
    assert sum("_to_copy" in label for label in labels) > 14


def test_no_attention_mask_is_built(traced):
    of = job("llama")
    mask_bytes = of.micro_batch_size * of.sequence_length**2
    assert mask_bytes not in set(traced(of)["steady"].num_bytes.tolist())


def test_a_timeline_survives_its_json_form(traced):
    timeline = traced(job("gpt2_loop"))["steady"]
    again = timeline_from_mapping(timeline_to_mapping(timeline))
    assert again.peak() == timeline.peak()
    assert again.largest_at(again.peak().instant) == timeline.largest_at(timeline.peak().instant)


def test_the_tracer_agrees_with_pytorchs_own_tracker():
    """Both on real CPU tensors, one step of a small network."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    from peakcast.collectors.tracing.tracer import Tracer

    def network():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)]
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(64, 256)

    def step(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, x = network()
    theirs = MemTracker()
    theirs.track_external(model, optimizer, x)
    with theirs:
        step(model, optimizer, x)
    (totals,) = theirs.get_tracker_snapshot("peak").values()
    tracer = Tracer("cpu")
    with tracer:
        model, optimizer, x = network()
        start = tracer.now
        tracer.phase = Phase.FORWARD
        step(model, optimizer, x)
    ours = tracer.timeline(start, tracer.now).peak().num_bytes
    assert ours == pytest.approx(totals["Total"], rel=0.01)
