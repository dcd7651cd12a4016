"""Records the recipes that peakcast ships: every family of transformers that the ledger does not know, in common
regimes."""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.core.durable import file_errors, replace_file
from peakcast.core.errors import CollectorError, SpecError, near_misses
from peakcast.core.extras import need
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.common.network_values import NETWORK_PREFIX, with_values
from peakcast.dialects.common.own_networks import TORCHTUNE, TRANSFORMERS, torchtune_families
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes import shipped
from peakcast.models.recipes.generalising import network_kind
from peakcast.models.recipes.kinds import NetworkKind
from peakcast.models.recipes.recipe import FAR, Recipe, near, recorded
from peakcast.models.recipes.regime import point_of, regime
from peakcast.models.recipes.shelf import RECIPE_PACKAGES, public
from peakcast.models.recipes.walk import Walk
from peakcast.networks.families import family
from peakcast.networks.layer_count import told_by_layer, with_layers
from peakcast.networks.undescribed import configuration_of, for_tracing

if TYPE_CHECKING:
    from peakcast.collectors.measure.recording import WalkRecorder

CHECKPOINTS: tuple[Mapping[str, Any], ...] = ({"activation_checkpointing": {"mode": "full"}}, {})
AUTOCAST: Mapping[str, Any] = {
    "precision": {"parameters": "float32", "compute": "bfloat16"},
    "framework_options": {"autocast": True},
}
"""As a Trainer's `bf16=True` over float32 weights."""
AUTOCAST_OF_NARROW: Mapping[str, Any] = {"framework_options": {"autocast": True}}
"""The same over weights in the dtype of their checkpoint, as `from_pretrained` loads them since transformers 5."""
PRECISIONS: tuple[Mapping[str, Any], ...] = ({}, AUTOCAST, AUTOCAST_OF_NARROW)
METHODS: tuple[Mapping[str, Any], ...] = ({}, {"finetuning": {"method": "lora", "rank": 16, "targets": ["all-linear"]}})
KERNELS: tuple[Mapping[str, Any], ...] = ({}, {"attention": "flash_attention_2"})
REGIMES: tuple[Mapping[str, Any], ...] = tuple(
    {**kernel, **method, **precision, **checkpoints}
    for kernel, method, precision, checkpoints in itertools.product(KERNELS, METHODS, PRECISIONS, CHECKPOINTS)
)
"""Changes to a job's defaults, the most used first: with and without checkpointing, bfloat16 and autocast, all weights
and adapters of any rank, PyTorch's attention kernels and flash-attention's, where the family can run them. Layouts,
optimizers and the number of micro-batches change no recipe."""
BATCHES = (1, 2)
"""Most libraries treat a micro-batch of one sequence in a special way."""
LENGTH = 512
WINDOW = re.compile(r"\w*window(_size)?|\w*attention_chunk_size")
"""Names of numbers of tokens from which on other operations run: a mask is made, or keys are chosen."""
LAYERS = 24
"""Enough layers for every pattern of layers that repeats; recipes for other depths are derived."""
PERIOD = 12
"""A multiple of most patterns' lengths, for families whose configurations do not list the kinds of their layers."""
TIMEOUT_SECONDS = 1800.0
"""Longest that one kind of network may take: ten times what most take, since other work may share the machine."""
COMPLETED = "completed.toml"
"""The catalog's table of what the defaults of some families lack."""
HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
"""Numbers of heads. A family whose defaults have equally many of both also has published networks with fewer key and value
heads, which use other code."""
FEWEST_HEADS = 8

OWN_LAYERS = 8
"""Layers of torchtune's networks, of which the first are recorded; recipes for other depths are derived."""
LOSSES: tuple[Mapping[str, Any], ...] = ({"framework_options": {"loss_kernel": "chunked_logits", "logits_chunks": 8}}, {})
ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What torchtune's configurations adapt (torchtune 0.6.1 recipes/configs: lora_attn_modules and apply_lora_to_mlp)."""
OWN_METHODS: tuple[Mapping[str, Any], ...] = (
    {},
    {"finetuning": {"method": "lora", "rank": 16, "targets": list(ADAPTED), "adapter_dtype": "bfloat16"}},
)
OWN_REGIMES: tuple[Mapping[str, Any], ...] = tuple(
    {**method, **loss, **checkpoints} for method, loss, checkpoints in itertools.product(OWN_METHODS, LOSSES, CHECKPOINTS)
)
"""As `REGIMES`, of torchtune's own networks: its loss of chunks or of whole logits."""

Progress = Callable[[str], None]
Jobs = Iterable[Iterable[TrainingJob]]
"""The jobs of each regime in which a family is recorded."""


@dataclass
class Shipment:
    """The result of `record_all`."""

    kinds: dict[str, int] = field(default_factory=dict)
    """Family -> number of kinds of networks, including those recorded earlier."""
    refused: dict[str, str] = field(default_factory=dict)
    """Family -> why something could not be recorded."""

    def to_mapping(self) -> dict[str, Any]:
        """The mapping that `--json` prints."""
        return {"kinds": self.kinds, "refused": self.refused}

    def text(self) -> str:
        """How many kinds of networks were recorded, and which were refused, in words."""
        lines = [f"{sum(self.kinds.values())} kinds of networks of {len(self.kinds)} families."]
        return "\n".join([*lines, *(f"{family}: {reason}" for family, reason in sorted(self.refused.items()))])


def _releases(library: str, versions: Mapping[str, str]) -> FrozenMapping:
    """The releases of the packages that a recipe of `library` depends on. Raises: CollectorError if it is not installed."""
    if library not in versions:
        raise CollectorError(f"{library} is not installed there; install it with: pip install {library}.")
    return FrozenMapping({name: public(versions[name]) for name in RECIPE_PACKAGES[library] if name in versions})


def record_all(
    folder: Path,
    families: Sequence[str] = (),
    python: str = sys.executable,
    processes: int = 1,
    progress: Progress | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    library: str = TRANSFORMERS,
) -> Shipment:
    """Record `families`, or all families that transformers has and the ledger does not, into a subfolder of `folder` named
    after the release. Existing files are kept. Each kind of network may take `timeout_seconds`. With `library` torchtune:
    the families that it has networks of its own for.

    Raises: SpecError, CollectorError, RecordError.
    """
    from peakcast.collectors.measure.recording import WalkRecorder

    _check_library(library, python)
    with WalkRecorder(python) as recorder:
        known, versions = _of_transformers(recorder) if library == TRANSFORMERS else _of_torchtune(recorder)
    _check_families(families, known, library)
    releases = _releases(library, versions)
    own = folder / shipped.stack_name(library, str(releases[library]))
    asked, shipment, done = list(families or known), Shipment(), itertools.count()

    def record(family: str) -> None:
        if progress:
            progress(f"recipes of {family} ({next(done) + 1} of {len(asked)} families)")
        with WalkRecorder(python, timeout_seconds) as recorder:
            count, reason = _record_family(recorder, known[family], own / shipped.file_name(family), releases)
        if count:
            shipment.kinds[family] = count
        if reason:
            shipment.refused[family] = reason

    with file_errors(own, "made"):  # checked before minutes are spent
        own.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(processes) as pool:  # each thread waits for its own process
        list(pool.map(record, asked))
    return shipment


def _check_library(library: str, python: str) -> None:
    """Refuse a library whose families are not recorded all at once, or that this Python, if it is `python`, lacks."""
    if library not in (TRANSFORMERS, TORCHTUNE):
        rule = f"must be {TRANSFORMERS} or {TORCHTUNE}: those of other libraries are recorded when they are asked for"
        raise SpecError(f"library={library!r} {rule}.", parameter="library", value=library)
    if python == sys.executable:
        need("recording recipes", "torch", *(("transformers",) if library == TRANSFORMERS else ()))


def _check_families(families: Sequence[str], known: Iterable[str], library: str) -> None:
    """Refuse a family that is none of the `known` ones."""
    for name in families:
        if name not in known:
            rule = f"must be a family that {library} has and the ledger has not{near_misses(name, known) or '.'}"
            raise SpecError(f"families={name!r} {rule}", parameter="families", value=name)


def _of_torchtune(recorder: WalkRecorder) -> tuple[Mapping[str, Jobs], dict[str, str]]:
    """The families that torchtune has networks of its own for, as `_of_transformers`."""
    known = torchtune_families()
    return {name: _own_regimes(told["networks"]) for name, told in known.items()}, recorder.versions()


def _of_transformers(recorder: WalkRecorder) -> tuple[Mapping[str, Jobs], dict[str, str]]:
    """(the families that transformers has and the ledger has not, with the jobs of each regime, the releases there)."""
    everything, versions = recorder.families()
    completed = tomllib.loads(resources.files("peakcast").joinpath("catalog", COMPLETED).read_text(encoding="utf-8"))
    unknown = {name: config for name, config in everything.items() if family(name) is None}
    return {name: _regimes(_completed(config, completed.get(name, {}))) for name, config in unknown.items()}, versions


def _completed(config: Mapping[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a family's defaults with what a published network adds."""
    return {name: value for name, value in {**config, **published}.items() if value != []}


def _record_family(recorder: WalkRecorder, regimes: Jobs, path: Path, releases: FrozenMapping) -> tuple[int, str]:
    """(number of kinds of a family's networks in the file at `path` afterwards, why one could not be recorded)."""
    found = shipped.all_of(path)
    reason = ""
    for jobs in regimes:
        for job in jobs:
            point = point_of(job)
            if any(recipe.covers(*point) and kind.values(job) is not None for kind, recipe in found):
                continue
            try:
                found.append(_recorded(recorder, job, releases))
            except CollectorError as error:
                if str(error) == reason:
                    break  # other networks of this regime will not run either; another regime may
                reason = str(error)
            else:
                replace_file(path, shipped.written(found))
    return len(found), reason


def _regimes(config: Mapping[str, Any]) -> Iterator[Iterator[TrainingJob]]:
    """The jobs of each regime, for networks with a family's defaults."""
    return (_jobs(config, asked) for asked in REGIMES)


def _own_regimes(names: Sequence[str]) -> Iterator[list[TrainingJob]]:
    """The jobs of each regime, for torchtune's own networks like those of the catalog."""
    for asked in OWN_REGIMES:
        base = {"framework": "torch", "versions": {TORCHTUNE: "main"}, "sequence_length": LENGTH, **asked}
        jobs = (
            job_from_mapping({"architecture": name, "micro_batch_size": batch, **base})
            for name, batch in itertools.product(names, BATCHES)
        )
        yield [job.replace(architecture=with_layers(job.architecture, OWN_LAYERS)) for job in jobs]


def _jobs(config: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[TrainingJob]:
    """Jobs of a regime whose recipes are shipped, for the network with a family's defaults."""
    with for_tracing():
        for batch, length in itertools.product(BATCHES, (LENGTH, *map(_from_window_on, windows_of(config)))):
            job = job_from_mapping(
                {"architecture": dict(config), "micro_batch_size": batch, "sequence_length": length, **asked}
            )
            if (most := job.architecture.most_positions) is not None and length > most:
                job = job.replace(sequence_length=most)
            layers = recorded_layers(job.architecture.num_hidden_layers, config.get("layer_types") or ())
            job = job.replace(architecture=with_layers(job.architecture, layers))
            yield job
            heads, groups = (config.get(name, 0) for name in (HEADS, GROUPS))
            if heads == groups and heads >= FEWEST_HEADS:
                yield with_values(job, {NETWORK_PREFIX + GROUPS: heads // 4})


def windows_of(config: Mapping[str, Any]) -> list[int]:
    """The windows of a network's attention that sequences longer than `LENGTH` fill, the shortest first."""
    longest = min(FAR[1], config.get("max_position_embeddings") or FAR[1])
    found = {value for name, value in config.items() if WINDOW.fullmatch(name) and type(value) is int}
    return sorted(window for window in found if LENGTH < window < longest)


def _from_window_on(window: int) -> int:
    """The length to ask for, of which a recipe is made of lengths up to it that begins with `window` (`near`)."""
    return next(length for length in itertools.count(window) if min(near(length)) >= window)


def recorded_layers(layers: int, kinds: Sequence[str]) -> int:
    """How many of a network's `layers` layers, of these `kinds`, are recorded: whole periods of the kinds fewer until there
    are at most LAYERS, so that the pattern ends as the network's does. All of them if no period is short enough."""
    periods = (size for size in range(1, len(kinds)) if list(kinds[size:]) == list(kinds[:-size]))
    period = next(periods, len(kinds) or PERIOD)
    return layers if period > LAYERS else layers - period * max(0, -(-(layers - LAYERS) // period))


def _recorded(recorder: WalkRecorder, job: TrainingJob, releases: FrozenMapping) -> tuple[NetworkKind, Recipe]:
    """A kind of network with its recipe. Raises: CollectorError when no recipe was confirmed."""
    with recorder.of(regime(job)) as library:

        def record(*sample: Any) -> Walk:
            return replace(Walk.read(library.walk(*sample)), kinds=())  # other depths follow from a short network's walks

        told, network = told_by_layer(job.architecture), job.architecture
        below = [one - 1 for one in windows_of(configuration_of(network)) if one > job.sequence_length]
        nearer = [(FAR[0] * FAR[1] // length, length) for length in below]
        recipe = recorded(record, point_of(job), network.most_positions, nearer=nearer, told=told)
        kind = network_kind(record, recipe, job, library.defaults, library.read)
    if kind is None:
        raise CollectorError("no network with other numbers confirms what was recorded.")
    return kind, replace(recipe, versions=releases)
