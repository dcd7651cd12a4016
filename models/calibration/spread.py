"""How large an error to expect of a job's prediction: the scale of the error bars.

Errors are not equally large for all jobs. What cannot be seen from outside (a CUDA context, kernels) is a number of bytes,
and so a larger share of a small job. What the allocator caches, and what blocks leave unused, depends on the order of
requests. A router sends tokens depending on the data. A compiler may fuse differently. A kind of job that was never
measured may differ in any way. Each is a term; the expected |log(measured / predicted)| is their sum. The coefficients are
learned from predictions of rows that were held out, by architecture and by source. A term about which rows say nothing
keeps its prior: `PRIORS` is the one list of what is judged and not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.models.calibration.strict import number, read

Floats = npt.NDArray[np.float64]

TERMS: dict[str, str] = {
    "always": "any job",
    "fixed": "1 GiB / the quantity: memory of a fixed size that nobody sees",
    "cached": "log(reserved / allocated): what the allocator keeps depends on the order of requests",
    "slack": "on several GPUs, log(allocated / tensors): what blocks leave unused depends on the order of requests",
    "routed": "mixture of experts: a router sends tokens where the data say",
    "growing": "generation: tensors grow with every token, and what they leave fits nothing",
    "compiled": "torch.compile: what is fused differs from release to release",
    "sharded": "gathered weights have streams and pools of their own",
    "beyond": "a finding says that runs reserve more than is simulated",
    "lengths": "sequences of changing lengths: what steps leave in the cache depends on which come when",
    "outside": "per step of severity: kinds of jobs, sizes and versions that were not measured",
    "kind": "no measured run has the job's framework, task, kind of layers and trained weights at once",
    "unmodelled": "something that the ledger names and does not count",
}
"""Term → what it represents."""

PRIORS: dict[str, dict[str, float]] = {
    "peak_allocated_bytes": {
        "always": 0.001, "fixed": 0.01, "cached": 0.0, "slack": 0.5, "routed": 0.01, "growing": 0.01, "compiled": 0.02,
        "sharded": 0.001, "beyond": 0.0, "lengths": 0.0, "outside": 0.002, "kind": 0.006, "unmodelled": 0.11,
    },
    "peak_reserved_bytes": {
        "always": 0.003, "fixed": 0.05, "cached": 0.05, "slack": 0.0, "routed": 0.01, "growing": 0.02, "compiled": 0.02,
        "sharded": 0.005, "beyond": 0.05, "lengths": 0.10, "outside": 0.004, "kind": 0.016, "unmodelled": 0.13,
    },
    "peak_device_bytes": {
        "always": 0.003, "fixed": 0.20, "cached": 0.05, "slack": 0.0, "routed": 0.01, "growing": 0.02, "compiled": 0.02,
        "sharded": 0.005, "beyond": 0.0, "lengths": 0.10, "outside": 0.004, "kind": 0.0, "unmodelled": 0.18,
    },
    "peak_host_bytes": {
        "always": 0.2, "fixed": 0.0, "cached": 0.0, "slack": 0.0, "routed": 0.0, "growing": 0.0, "compiled": 0.0,
        "sharded": 0.0, "beyond": 0.0, "lengths": 0.0, "outside": 0.02, "kind": 0.0, "unmodelled": 0.11,
    },
}  # fmt: skip
"""Expected |log error| per unit of each term if nothing was measured: judgements, with their reasons.
- `fixed`: for allocated memory, workspaces of some MiB; for reserved, a segment or two; for device memory, how much equal
  processes differ, in GiB: eight tables of one benchmark on A100 by 0.05, but one of them by 1.2; another's 138 rows by
  0.02, but nine of GPTQ by 0.85; 31 readings after NCCL's start on 8 × H100 by 0.02, but one by 0.33. On average 0.02 to
  0.2.
- `cached`: equal ranks of one run differ by up to 2.6 % in reserved memory, with a cache of 10 to 30 %.
- `slack`: what the simulation leaves unused in a block may be split off in the run; equal runs on other clusters differ by
  one to several such rests.
  On one GPU requests come in the order of the program. Reserved and device memory contain the blocks whole.
- `routed`: runs of one mixture of experts with equal settings are up to 6 % apart.
- `compiled`: the same source on the same torch varies by 1.0 % at the median, 12.6 % at worst.
- `outside`: the best published predictor of unseen configurations has a median error of 4 %; jobs of another framework,
  layout and task are 6 to 8 steps outside.
- `beyond`: what the runs behind those findings reserved more than is simulated: a few per cent.
- `lengths`: the mean over ms-swift's 49 rows, which are out of scope because nobody says in which order their lengths came,
  each error counted up to `WORST_COUNTED`; half of them are off by less than 6 %.
- `kind`: the mean over sources of a kind of their own of their median error, fsdp_qlora's as first stated (others were
  mended while they were compared): of allocated memory 0.0 (SimuMax), 0.1 (LitGPT under Thunder), 0.6 (torchtune) and 1.6 %
  (fsdp_qlora), of reserved memory 0.1 (optimum), 0.15 (SimuMax), 0.2 (torchtitan), 0.7 (PEFT) and 6.6 % (fsdp_qlora). Of
  device memory two sources have rows, of different kinds, and each is covered to 96 % and more from the other without it.
- `unmodelled`: the mean over the published rows that are out of scope (66 of allocated, 66 of reserved, 103 of device
  memory), each error counted up to `WORST_COUNTED`; half of them are off by less than 5, 11 and 17 %. For host memory there
  is not a row."""
PRIOR_ROWS = 4.0
"""A prior counts as this many rows of its own in a fit."""
LEAST_SHARE = 0.25
"""A coefficient keeps at least this share of its prior. The errors of known rows say too little about a new source: where
rows of a new kind showed a fault, the ledger was corrected, so they no longer show how large the error had been. Without
this floor the bars of reserved memory would cover 67 % of the rows held out by source."""
NOT_LEARNED = ("lengths", "unmodelled")
"""Terms that keep their prior: rows of changing lengths, and of what is not modelled, are in no fit."""
JUDGED_FACTOR = math.log(10.0)
"""Bar divided by expected error if no row says it: 90 % of exponentially distributed errors are below 2.3 times their
mean."""
LEAST = 2e-4
"""Least expected error: the 512-byte rounding, and noise of the driver that nothing explains."""
WORST_COUNTED = 0.3
"""A larger error is learned as this: such a row shows a fault that should be named, not a spread."""
ROUNDS = 8

_NAMES = tuple(TERMS)


class Spread:
    """Expected |log(measured / predicted)| of a quantity. Learned: `coefficients_` (term → value per unit, at least 0)."""

    def __init__(self, quantity: str) -> None:
        self.quantity = quantity
        self.coefficients_ = dict(PRIORS[quantity])

    def fit(
        self, terms: Sequence[Mapping[str, float]], errors: Sequence[float] | Floats, weights: Sequence[float] | Floats
    ) -> Spread:
        """Learn from `errors` (log ratios of held-out rows), each row with its `terms` (`terms_of`) and weight.

        Least squares of |error| with coefficients of at least 0, repeated with rows weighted by 1 / expected²: relative to
        the error expected of it, every row then says equally much.
        """
        from scipy.optimize import nnls

        prior = np.array([PRIORS[self.quantity][name] for name in _NAMES])
        x = np.array([[row[name] for name in _NAMES] for row in terms], dtype=np.float64).reshape(len(terms), len(_NAMES))
        size = np.minimum(np.abs(np.asarray(errors, dtype=np.float64)), WORST_COUNTED)
        counts = np.asarray(weights, dtype=np.float64)
        typical = np.array([np.median(column[column > 0]) if (column > 0).any() else 1.0 for column in x.T])
        coefficients = prior
        for _ in range(ROUNDS):
            expected = np.maximum(x @ coefficients, LEAST)
            scale = np.sqrt(counts) / expected
            judged = np.maximum(typical * np.maximum(prior, LEAST), LEAST)
            rows = np.vstack([x * scale[:, None], np.diag(math.sqrt(PRIOR_ROWS) * typical / judged)])
            targets = np.concatenate([size * scale, math.sqrt(PRIOR_ROWS) * typical * prior / judged])
            coefficients = nnls(rows, targets)[0]
        coefficients = np.maximum(coefficients, LEAST_SHARE * prior)
        self.coefficients_ = {name: float(value) for name, value in zip(_NAMES, coefficients, strict=True)}
        for name in NOT_LEARNED:
            self.coefficients_[name] = PRIORS[self.quantity][name]
        return self

    def predict(self, terms: Mapping[str, float]) -> float:
        """The expected |log error| of a job with these `terms`."""
        return max(sum(self.coefficients_[name] * terms[name] for name in _NAMES), LEAST)

    def to_mapping(self) -> dict[str, float]:
        """The coefficients by term."""
        return dict(self.coefficients_)

    @classmethod
    def from_mapping(cls, mapping: Any, quantity: str) -> Spread:
        """The spread of `to_mapping`. Raises: CalibrationError."""
        values = read(mapping, set(TERMS), "spread")
        spread = cls(quantity)
        spread.coefficients_ = {name: number(values[name], f"spread.{name}", low=0, high=10) for name in _NAMES}
        return spread


def terms_of(
    row: Mapping[str, float], quantity: str, severity: float, *, new_kind: bool = False, unmodelled: bool = False
) -> dict[str, float]:
    """The terms of a job. `row`: its features (`features.of_quantity`); `severity`: how far outside the measured domain it
    is (`Domain.distance`); `new_kind`: whether no measured run is of its kind (`Domain.has_kind`)."""
    caches = quantity in ("peak_reserved_bytes", "peak_device_bytes")
    slack = quantity == "peak_allocated_bytes" and row["num_parallel_axes"] > 0
    return {
        "always": 1.0,
        "fixed": row["gib_over_start"],
        "cached": max(row["log2_reserved_over_allocated"], 0.0) * math.log(2.0) if caches else 0.0,
        "slack": math.log1p(max(row["allocator_slack"], 0.0)) if slack else 0.0,
        "routed": float(row["log2_num_experts"] > 0),
        "growing": row["generates"],
        "compiled": row["compile"],
        "sharded": row["sharded"],
        "beyond": row["beyond_replay"] if quantity == "peak_reserved_bytes" else 0.0,
        "lengths": row["changing_lengths"] if caches else 0.0,
        "outside": float(severity),
        "kind": float(new_kind),
        "unmodelled": float(unmodelled),
    }
