"""Whether a new fit may replace the one in use: only if it is not worse on architectures that neither had seen.

An architecture's error is what a calibration's own procedure missed on it without having seen it (`unseen_errors`) or, if
the calibration in use never saw it, the error of its answers for these rows today. The comparison goes architecture by
architecture, because rows of one architecture are one piece of evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peakcast.models.calibration.calibration import Calibration
from peakcast.models.calibration.fit import mean_by_architecture
from peakcast.models.calibration.samples import Sample, repeat_weights
from peakcast.models.evaluation.holdout import answer


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityComparison:
    """Mean errors on unseen architectures, as fractions; `difference` is new − old with its standard error."""

    quantity: str
    num_architectures: int
    old_error: float
    new_error: float
    difference: float
    standard_error: float

    @property
    def worse(self) -> bool:
        """Whether the new fit is worse by more than one standard error."""
        return self.difference > self.standard_error + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationComparison:
    """A new calibration compared with the one in use."""

    gpu: str
    quantities: tuple[QuantityComparison, ...]
    lost: tuple[str, ...]
    """Quantities that the calibration in use has and the new one does not."""

    @property
    def promoted(self) -> bool:
        """Whether the new one replaces the old one."""
        return not self.lost and not any(comparison.worse for comparison in self.quantities)

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        told = [
            f"{c.quantity.removeprefix('peak_').removesuffix('_bytes')} {c.old_error:.2%} → {c.new_error:.2%} "
            f"on {c.num_architectures} architectures"
            for c in self.quantities
        ]
        told += [f"no {name.removeprefix('peak_').removesuffix('_bytes')} any more" for name in self.lost]
        verdict = "not worse on unseen architectures" if self.promoted else "worse on unseen architectures"
        return f"{verdict} ({'; '.join(told) or 'nothing in common to compare'})"

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "promoted": self.promoted, "sentence": self.sentence}


def compare(new: Calibration, old: Calibration, samples: Sequence[Sample]) -> CalibrationComparison:
    """The comparison of two calibrations of one GPU type. `samples`: those that `new` was fitted to."""
    found = []
    for quantity, learned in new.quantities.items():
        before = old.quantities.get(quantity)
        if before is None:
            continue
        known = {**_errors_of(old, quantity, samples, set(learned.unseen_errors)), **before.unseen_errors}
        shared = sorted(set(known) & set(learned.unseen_errors))
        if shared:
            found.append(_compare(quantity, [known[name] for name in shared], [learned.unseen_errors[n] for n in shared]))
    lost = tuple(sorted(set(old.quantities) - set(new.quantities)))
    return CalibrationComparison(gpu=new.gpu, quantities=tuple(found), lost=lost)


def _errors_of(old: Calibration, quantity: str, samples: Sequence[Sample], wanted: set[str]) -> Mapping[str, float]:
    """The errors of `old` on architectures that it never saw."""
    unseen = [
        sample
        for sample in samples
        if not sample.censored
        and sample.measured(quantity) is not None
        and sample.architecture in wanted - set(old.quantities[quantity].domain.architectures)
    ]
    errors = [abs(math.log((s.measured(quantity) or 1) / max(answer(s, old)[quantity].point, 1))) for s in unseen]
    return mean_by_architecture([sample.architecture for sample in unseen], errors, repeat_weights(unseen))


def _compare(quantity: str, old: Sequence[float], new: Sequence[float]) -> QuantityComparison:
    """The comparison of errors, architecture by architecture."""
    differences = [b - a for a, b in zip(old, new, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    spread = math.fsum((difference - mean) ** 2 for difference in differences) / max(count - 1, 1)
    return QuantityComparison(
        quantity=quantity,
        num_architectures=count,
        old_error=math.fsum(old) / count,
        new_error=math.fsum(new) / count,
        difference=mean,
        standard_error=math.sqrt(spread / count),
    )
