"""`Calibration`: what was learned from measurements on one GPU type, as plain JSON. Loading one runs no code.

Schema history: 1 (first); 2 (bars are of jobs inside the domain, severities, groups by size, the `published` feature, the
errors on unseen architectures); 3 (a spread and a domain for each quantity; bars are multiples of the spread); 4 (of few
rows the narrower of a quantile and a Student t bound); 5 (domains have no range of vocabularies); 6 (bars weigh rows as the
fits do); 7 (kinds of jobs in domains, and what new ones cost in the spread).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.bounded import file_bytes
from peakcast.core.errors import CalibrationError, CatalogError
from peakcast.core.units import MIB
from peakcast.models.calibration.domain import Domain
from peakcast.models.calibration.intervals import Intervals
from peakcast.models.calibration.residual import Residual
from peakcast.models.calibration.spread import Spread
from peakcast.models.calibration.strict import WAY_OUT, number, read, text

if TYPE_CHECKING:
    from peakcast.catalog import Device

SCHEMA_VERSION = 7
MAX_FILE_BYTES = 16 * MIB
"""A calibration has some hundred kB; a larger file is refused before it is parsed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantityCalibration:
    """Residual, spread and bars of one of the four quantities, and the domain of the rows that they were learned from."""

    residual: Residual
    spread: Spread
    intervals: Intervals
    domain: Domain
    rows_by_gpu: dict[str, int]
    """Number of rows of each GPU type."""
    unseen_errors: dict[str, float] = field(default_factory=dict)
    """Architecture → mean |log(measured / point)| of its rows, predicted without it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """Everything learned for one GPU type. Two calibrations are equal if their `to_mapping`s are."""

    gpu: str
    """Catalog name of the GPU type; "none" if nothing was measured."""
    created: str
    """ISO date, given by the caller of the fit, so that the same rows and date give the same bytes."""
    rows_digest: str
    """SHA-256 of the rows' keys and values."""
    quantities: dict[str, QuantityCalibration] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def domain(self) -> Domain:
        """What the rows of allocated memory, which are the most, have in common; of releases, those of any quantity's
        rows."""
        learned = self.quantities.get("peak_allocated_bytes")
        if learned is None:
            return Domain()
        domains = [quantity.domain.versions for quantity in self.quantities.values()]
        return replace(
            learned.domain,
            versions={
                package: tuple(sorted({release for versions in domains for release in versions.get(package, ())}))
                for package in learned.domain.versions
            },
        )

    def has_rows_of(self, gpu: str) -> bool:
        """Whether any quantity was learned from rows of the GPU type `gpu`, among others."""
        return any(gpu in quantity.rows_by_gpu for quantity in self.quantities.values())

    def to_mapping(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "schema_version": self.schema_version,
            "gpu": self.gpu,
            "created": self.created,
            "rows_digest": self.rows_digest,
            "quantities": {
                name: {
                    "residual": quantity.residual.to_mapping(),
                    "spread": quantity.spread.to_mapping(),
                    "intervals": quantity.intervals.to_mapping(),
                    "domain": quantity.domain.to_mapping(),
                    "rows_by_gpu": dict(sorted(quantity.rows_by_gpu.items())),
                    "unseen_errors": dict(sorted(quantity.unseen_errors.items())),
                }
                for name, quantity in self.quantities.items()
            },
        }

    @classmethod
    def from_mapping(cls, mapping: object) -> Calibration:
        """The calibration of `to_mapping`, every value checked. Raises: CalibrationError."""
        if isinstance(mapping, Mapping) and mapping.get("schema_version") != SCHEMA_VERSION:
            raise CalibrationError(
                f"schema_version={mapping.get('schema_version')!r} of the calibration is not {SCHEMA_VERSION}, which this "
                f"version of peakcast reads; {WAY_OUT}.",
                parameter="schema_version",
                value=mapping.get("schema_version"),
            )
        keys = {"schema_version", "gpu", "created", "rows_digest", "quantities"}
        top = read(mapping, keys, "calibration")
        if not isinstance(top["quantities"], Mapping) or set(top["quantities"]) - set(QUANTITIES):
            raise CalibrationError(f"quantities must be among {', '.join(QUANTITIES)}; {WAY_OUT}.", parameter="quantities")
        return cls(
            gpu=text(top["gpu"], "gpu"),
            created=text(top["created"], "created"),
            rows_digest=text(top["rows_digest"], "rows_digest"),
            quantities={name: _quantity(value, name) for name, value in top["quantities"].items()},
        )

    def to_bytes(self) -> bytes:
        """The file's content: sorted keys, no spaces, one line."""
        content = json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return content.encode() + b"\n"

    def save(self, path: Path) -> None:
        """Write the file at `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.to_bytes())


UNCALIBRATED = Calibration(gpu="none", created="", rows_digest="")
"""No measurements: the baseline alone, with wide bars."""


def _quantity(value: object, name: str) -> QuantityCalibration:
    """The calibration of quantity `name` as stored. Raises: CalibrationError."""
    keys = {"residual", "spread", "intervals", "domain", "rows_by_gpu", "unseen_errors"}
    parts = read(value, keys, f"quantities.{name}")
    for key in ("rows_by_gpu", "unseen_errors"):
        if not isinstance(parts[key], Mapping):
            raise CalibrationError(f"quantities.{name}.{key} must be a mapping; {WAY_OUT}.", parameter=name)
    return QuantityCalibration(
        residual=Residual.from_mapping(parts["residual"]),
        spread=Spread.from_mapping(parts["spread"], name),
        intervals=Intervals.from_mapping(parts["intervals"]),
        domain=Domain.from_mapping(parts["domain"]),
        rows_by_gpu={gpu: int(number(count, "rows_by_gpu", low=0)) for gpu, count in parts["rows_by_gpu"].items()},
        unseen_errors={unit: number(error, "unseen_errors", low=0) for unit, error in parts["unseen_errors"].items()},
    )


def load_calibration(path: Path) -> Calibration:
    """The calibration in the JSON file at `path`. Raises: CalibrationError naming the file, the fault and the way out."""
    try:
        return Calibration.from_mapping(_parse(file_bytes(path, MAX_FILE_BYTES)))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}; check the path.", value=str(path)) from error
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error.message}", parameter=error.parameter, value=error.value) from error


def _parse(content: bytes) -> object:
    """The value in the text of a JSON file, without NaN and infinity. Raises: CalibrationError."""
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(content.decode("utf-8"), parse_constant=refuse)
    except RecursionError as error:
        raise CalibrationError(f"it is nested too deeply to be a calibration; {WAY_OUT}.") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError included
        raise CalibrationError(f"it is not valid JSON ({error}), perhaps cut off; {WAY_OUT}.") from error


class _Shipped(Mapping[str, Calibration]):
    """The calibrations in models/calibration/<GPU>.json by GPU type; each file is read on first use."""

    def __init__(self) -> None:
        self._folder = resources.files("peakcast.models").joinpath("calibration")
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        self._names = sorted(item.name.removesuffix(".json") for item in found if item.name.endswith(".json"))
        self._loaded: dict[str, Calibration] = {}

    def __getitem__(self, gpu: str) -> Calibration:
        if gpu not in self._names:
            raise KeyError(gpu)
        if gpu not in self._loaded:
            with resources.as_file(self._folder.joinpath(f"{gpu}.json")) as path:
                self._loaded[gpu] = load_calibration(path)
        return self._loaded[gpu]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@functools.cache
def calibrations() -> Mapping[str, Calibration]:
    """The shipped calibrations by GPU type, each read on first use; `calibrations.cache_clear()` forgets them. Raises (on
    access): CalibrationError for a damaged one."""
    return _Shipped()


def calibration_for(device: Device, available: Mapping[str, Calibration] | None = None) -> Calibration:
    """The calibration to use on `device`: its own, else its nearest relative's, else `UNCALIBRATED`. `available`: replaces
    the shipped ones.

    The nearest relative is the calibrated GPU type with the nearest compute capability and, among those, the most similar
    number of multiprocessors.
    """
    choices = calibrations() if available is None else available
    if device.name in tuple(choices):
        return choices[device.name]
    relatives = _known_devices(choices)
    if not relatives:
        return UNCALIBRATED
    return choices[min(relatives, key=lambda other: distance(device, other)).name]


def _known_devices(names: Iterable[str]) -> list[Device]:
    """The GPU types of the catalog with these names."""
    from peakcast import catalog

    found = []
    for name in names:
        try:
            found.append(catalog.gpu(name))
        except CatalogError:  # a calibration for a GPU that this catalog does not have
            continue
    return found


def distance(a: Device, b: Device) -> tuple[float, float, str]:
    """How different two GPU types are, for sorting: by compute capability, then by number of multiprocessors (log
    ratio)."""
    major, minor = (abs(x - y) for x, y in zip(a.compute_capability, b.compute_capability, strict=True))
    return (major * 10.0 + minor, abs(math.log(a.num_sms / b.num_sms)), b.name)
