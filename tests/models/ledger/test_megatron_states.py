"""What Megatron-LM's optimizers keep for a parameter, counted by hand: bytes per element of one rank of one.

Source: Rajbhandari et al. 2020 for mixed-precision Adam's 2 + 4 + 4 + 8 bytes; megatron-core 0.16.1 and Transformer Engine
2.8 `pytorch/optimizers/fused_adam.py` for narrower ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.host import host_bytes
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.scope import scope_findings
from peakcast.timelines.timeline import Category

HELD = (Category.PARAMETERS, Category.GRADIENTS, Category.MAIN_PARAMETERS, Category.OPTIMIZER_STATES)
GPT: dict[str, Any] = {
    "num-layers": 2, "hidden-size": 1024, "ffn-hidden-size": 4096, "num-attention-heads": 16, "micro-batch-size": 1,
    "seq-length": 128, "max-position-embeddings": 128, "padded-vocab-size": 8192, "bf16": True, "disable-bias-linear": True,
    "position-embedding-type": "rope", "normalization": "RMSNorm", "use-distributed-optimizer": True,
}  # fmt: skip
ELEMENTS = 8192 * 1024 + 2 * (12 * 1024**2 + 2 * 1024) + 1024


def job(**flags: Any) -> TrainingJob:
    return from_megatron({**GPT, **{name.replace("_", "-"): value for name, value in flags.items()}}, 1).job


def bytes_per_element(step: str = "steady", **flags: Any) -> tuple[float, ...]:
    timeline = megatron_ledger(job(**flags), step=step)
    left = timeline.composition(len(timeline.phases) - 1)
    return tuple(round(left.get(category, 0) / ELEMENTS, 2) for category in HELD)


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (2, 4, 4, 8)),
        (AWARE, (2, 4, 2, 8)),  # the low halves of fp32 main parameters, whose high halves are the parameters
        ({**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, (2, 4, 2, 3)),
        ({**AWARE, "main_params_dtype": "fp16"}, (2, 4, 2, 8)),
        ({**AWARE, "fp16": True, "bf16": False}, (2, 2, 4, 8)),  # no remainders of fp16
        ({**AWARE, "grad_reduce_in_bf16": True, "main_grads_dtype": "bf16"}, (2, 2, 2, 8)),  # read as they are
        ({**AWARE, "main_grads_dtype": "bf16"}, (2, 2, 2, 8)),
        ({"grad_reduce_in_bf16": True}, (2, 6, 4, 8)),  # and an fp32 copy
        ({"optimizer": "sgd"}, (2, 4, 4, 4)),
        ({"optimizer": "sgd", "sgd_momentum": 0}, (2, 4, 4, 0)),
        ({"optimizer_cpu_offload": True}, (2, 4, 4, 0)),
        ({**AWARE, "optimizer_cpu_offload": True}, (2, 4, 0, 0)),
    ],
)
def test_bytes_that_stand_between_steps(flags: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert bytes_per_element(**flags) == pytest.approx(expected, abs=0.01)
    assert not scope_findings(job(**flags))


def test_mxfp8_parameters_have_two_layouts_and_no_buffer_of_their_own() -> None:
    """Weights of projections have a byte by rows and one by columns, and a scale for 32 elements of each. What stays in
    bf16 has a tensor of its own beside the buffer that it is gathered into."""
    flags: dict[str, Any] = {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
    flags["reuse_grad_buf_for_mxfp8_param_ag"] = True
    projections = 2 * 12 * 1024**2
    weights = projections * (2 + 2 / 32) + (ELEMENTS - projections) * (2 + 2)
    assert bytes_per_element(**flags) == pytest.approx((weights / ELEMENTS, 4, 4, 8), abs=0.01)
    timeline = megatron_ledger(job(**flags))
    assert not any(name.endswith(".fp8") for name in timeline.names), "no copies are made of them"


def test_adam_makes_its_main_parameters_in_the_first_step() -> None:
    """Where Megatron-LM makes them itself they are there before it."""

    def before(**flags: Any) -> int:
        timeline = megatron_ledger(job(**flags), step="first")
        return timeline.composition(0).get(Category.MAIN_PARAMETERS, 0)

    assert before(**AWARE) == 0
    assert before() == pytest.approx(4 * ELEMENTS, rel=1e-3)


def test_narrow_states_are_widened_while_adam_runs() -> None:
    """Both moments of the larger group, matrices, in fp32 at once (`get_unscaled_state`)."""
    timeline = megatron_ledger(job(**AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"))
    passing = timeline.num_bytes[timeline.categories == Category.OPTIMIZER_TEMPORARIES]
    assert passing.sum() == pytest.approx(8 * ELEMENTS, rel=1e-3)


def test_a_share_of_the_states_stays_on_the_gpu() -> None:
    """Whole parameters go to the host until as many elements as asked for are there."""
    half, none = (bytes_per_element(optimizer_cpu_offload=True, optimizer_offload_fraction=f)[3] for f in (0.5, 0.0))
    assert none == 8
    assert 2 < half < 6


def test_the_host_has_parameters_gradients_and_both_states_of_what_is_offloaded() -> None:
    """16 bytes of each element, of which pinning rounds every tensor up to a power of two."""
    host = host_bytes(job(optimizer_cpu_offload=True), megatron_ledger)
    assert 16 * ELEMENTS <= host <= 32 * ELEMENTS


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        ({"main_params_dtype": "fp16"}, "run_would_fail", "without use_precision_aware_optimizer"),
        ({**AWARE, "optimizer": "sgd"}, "run_would_fail", "without Adam"),
        ({**AWARE, "use_distributed_optimizer": False}, "run_would_fail", "distributed optimizer"),
        ({"optimizer": "dist_muon", "optimizer_cpu_offload": True}, "not_modelled", "Muon on the host"),
    ],
)
def test_what_cannot_run_or_is_not_counted_is_said(flags: dict[str, Any], code: str, word: str) -> None:
    (found,) = scope_findings(job(**flags))
    assert found.code == code
    assert word in found.sentence
