"""Compares GPU types: for each, the fewest GPUs (or a given number) on which a job surely fits, and the price by the user's
own price list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peakcast import catalog
from peakcast.answers.prediction import Fits
from peakcast.catalog import Device
from peakcast.catalog.speeds import has_data_sheet
from peakcast.core.errors import SpecError
from peakcast.core.findings import Finding, sentences
from peakcast.dialects.common.job_file import read_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.costs import step_seconds
from peakcast.searching.found import Found, Largest, Plan
from peakcast.searching.inverse import fewest_gpus
from peakcast.searching.search import search
from peakcast.searching.search_settings import SearchSettings

DEAREST = 10_000.0
"""A higher price of a GPU-hour is a mistake in any currency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One GPU type: the plan with the least extra time on `num_gpus` of them."""

    gpu: str
    num_gpus: int | None
    """None if no number of them is enough."""
    plan: Plan | None
    tokens_per_second: float | None
    """Of all GPUs together, estimated from data sheets; None if the type's speed is not known."""
    price_per_hour: float | None
    """Of all GPUs together; None if no price is given."""

    @property
    def fits(self) -> Fits:
        """Whether the plan fits."""
        return self.plan.fits if self.plan is not None else "no"

    @property
    def price_per_million_tokens(self) -> float | None:
        """Price of a million tokens, in the unit of the given prices."""
        if self.price_per_hour is None or not self.tokens_per_second:
            return None
        return self.price_per_hour / 3600 / self.tokens_per_second * 1e6

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("gpu", "num_gpus", "fits", "tokens_per_second", "price_per_hour", "price_per_million_tokens")
        plan = self.plan.to_mapping() if self.plan is not None else None
        return {**{name: getattr(self, name) for name in names}, "plan": plan}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """All GPU types of the question: those on which the job surely fits come first, and of these the cheapest first."""

    offers: tuple[Offer, ...]
    has_prices: bool
    findings: tuple[Finding, ...] = ()

    @property
    def recommended(self) -> Offer | None:
        """The first offer if it surely fits: the cheapest, or, without prices, that of the fewest GPUs."""
        return self.offers[0] if self.fits == "yes" else None

    @property
    def fits(self) -> Fits:
        """Whether the job fits on any of them."""
        return self.offers[0].fits if self.offers else "no"

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return sentences(self.findings)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "recommended": self.recommended.to_mapping() if self.recommended is not None else None,
            "offers": [offer.to_mapping() for offer in self.offers],
            "warnings": list(self.warnings),
            "findings": [finding.to_mapping() for finding in self.findings],
        }


def compare(
    job: TrainingJob,
    devices: Sequence[Device],
    prices: Mapping[str, float],
    num_gpus: int | None,
    global_batch_size: int | None,
    settings: SearchSettings,
) -> Offers:
    """Offers for `job` on each of `devices`: on `num_gpus` of it, or, if that is None, on the fewest on which it surely
    fits. `prices`: GPU type -> price of an hour of one GPU."""
    offers = []
    for device in devices:
        found: Found | Largest
        if num_gpus is None:
            found = fewest_gpus(job, device, global_batch_size, settings)
            plan = found.plan
        else:
            found = search(job, device, num_gpus, global_batch_size, replace(settings, top=1))
            plan = found.plans[0] if found.plans else None
        offers.append(_offer(device, plan, prices.get(device.name)))
    return Offers(offers=tuple(sorted(offers, key=_order)), has_prices=bool(prices))


def _offer(device: Device, plan: Plan | None, price: float | None) -> Offer:
    if plan is None:
        return Offer(gpu=device.name, num_gpus=None, plan=None, tokens_per_second=None, price_per_hour=None)
    job, ranks = plan.job, plan.job.parallelism.world_size
    sequences = job.micro_batch_size * job.gradient_accumulation_steps * job.parallelism.data_parallel_size
    seconds = step_seconds(job, device) * (1 + plan.cost.total)
    return Offer(
        gpu=device.name,
        num_gpus=ranks,
        plan=plan,
        tokens_per_second=sequences * job.sequence_length / seconds if has_data_sheet(device.name) else None,
        price_per_hour=None if price is None else price * ranks,
    )


def _order(offer: Offer) -> tuple[Any, ...]:
    price, speed = offer.price_per_million_tokens, offer.tokens_per_second or 0.0
    return (offer.fits != "yes", offer.fits == "no", price is None, price or 0.0, offer.num_gpus or 0, -speed, offer.gpu)


def read_prices(prices: str | Path | Mapping[str, object] | None) -> dict[str, float]:
    """The catalog's name of a GPU type -> price of a GPU-hour, from a YAML or JSON file or a mapping. Raises: SpecError or
    CatalogError."""
    if prices is None:
        return {}
    given = prices if isinstance(prices, Mapping) else read_mapping(Path(prices))
    found = {}
    for name, price in given.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price <= DEAREST:
            raise SpecError(
                f"price of {name}={price!r} must be a number above 0 and at most {DEAREST:,.0f}: what an hour of one such "
                "GPU costs, in any currency.",
                parameter="price",
                value=price,
            )
        found[catalog.gpu(str(name)).name] = float(price)
    return found
