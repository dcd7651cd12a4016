"""The result of a dialect's reader, and how readers get settings: by name, with types, and with a note for every key that
is not read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from peakcast.core.errors import SpecError, near_misses
from peakcast.core.fields import int_like
from peakcast.core.findings import Direction, Finding, sentences
from peakcast.jobs.spec import MOST_RANKS, TrainingJob

TRUE = frozenset(("true", "yes", "on", "1"))
MOST = 2**40
"""A larger whole number in a setting is a mistake; it is refused before anything is built from it."""
FALSE = frozenset(("false", "no", "off", "0", ""))
FEWER_STATES = (
    "lion",
    "muon",
    "sgd",
    "adagrad",
    "adafactor",
    "rmsprop",
    "lamb8",
    "8bit",
    "4bit",
    "fp8",
    "lomo",
    "apollo",
    "mini",
)
"""Words in the names of optimizers that keep one state per parameter, or states of fewer bits."""
MORE_STATES = ("ademamix", "grokadamw")
"""Words in the names of optimizers that keep three states."""
NOT_MODELLED, UNKNOWN = "setting_not_modelled", "setting_unknown"
"""Codes of findings (`findings.KINDS`)."""


class AlternativeReading(NamedTuple):
    """Another way to read a configuration, with another job as result."""

    name: str
    """Whose configuration it would be, such as "TRL's arguments"."""
    job: TrainingJob
    way_out: str
    """How the user can confirm or exclude this reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration of another project as a `TrainingJob`, with everything that the job does not contain."""

    job: TrainingJob
    assumptions: tuple[str, ...] = ()
    """Assumed defaults that affect memory, as sentences."""
    findings: tuple[Finding, ...] = ()
    """Things that the configuration asks for and the job does not contain, unknown keys, and doubtful readings."""
    ignored: tuple[str, ...] = ()
    """Known keys that do not affect memory (or only refine something in `unsupported`)."""
    others: tuple[AlternativeReading, ...] = ()
    """Other jobs that the configuration may also mean, if nothing in it decides; answers show what they would need."""

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Sentences about what the configuration asks for and a job cannot express; empty if everything was translated."""
        return sentences(found for found in self.findings if found.code == NOT_MODELLED)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences of the other findings."""
        return sentences(found for found in self.findings if found.code != NOT_MODELLED)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys that are not known here; they may affect memory."""
        return tuple(found.parameter for found in self.findings if found.code == UNKNOWN)

    def changed(self, change: Callable[[TrainingJob], TrainingJob], given: Iterable[str] = ()) -> Translation:
        """The same with `change` applied to its job, and to the other possible jobs. `given`: the settings that `change`
        gives; findings about them are dropped."""
        others = tuple(reading._replace(job=change(reading.job)) for reading in self.others)
        settled = set(given)
        findings = tuple(found for found in self.findings if found.parameter not in settled)
        return replace(self, job=change(self.job), findings=findings, others=others)


@dataclass(frozen=True, slots=True)
class FindingList:
    """The findings of one code while a translation is being made."""

    code: str
    findings: list[Finding] = field(default_factory=list)

    def append(self, sentence: str, parameter: str = "", direction: Direction = "either") -> None:
        """Add `sentence` about `parameter`, a setting as the configuration writes it. `direction`: whether it needs more or
        less memory than the job of the answer."""
        self.findings.append(Finding(self.code, parameter, direction, sentence))


@dataclass(slots=True)
class Notes:
    """The sentences and key lists of a translation while it is being made."""

    assumptions: list[str] = field(default_factory=list)
    warnings: FindingList = field(default_factory=lambda: FindingList("setting_reinterpreted"))
    unsupported: FindingList = field(default_factory=lambda: FindingList(NOT_MODELLED))
    cached: FindingList = field(default_factory=lambda: FindingList("reserved_beyond_replay"))
    """What makes the allocator keep more than it does for the job of the answer."""
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    others: list[AlternativeReading] = field(default_factory=list)

    def include(self, translation: Translation) -> TrainingJob:
        """Add the notes of `translation` to these, and return its job."""
        for name in ("assumptions", "ignored", "unknown", "others"):
            getattr(self, name).extend(getattr(translation, name))
        for said in (self.warnings, self.unsupported, self.cached):
            said.findings.extend(found for found in translation.findings if found.code == said.code)
        return translation.job

    def finish(self, job: TrainingJob) -> Translation:
        """The `Translation` of `job` with these notes; repeated sentences are dropped."""
        unknown = (Finding(UNKNOWN, key, "either", _not_known(key)) for key in sorted(set(self.unknown)))
        return Translation(
            job=job,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
            findings=tuple(
                dict.fromkeys((*self.unsupported.findings, *self.warnings.findings, *self.cached.findings, *unknown))
            ),
            ignored=tuple(sorted(set(self.ignored))),
            others=tuple(self.others),
        )


class Settings:
    """The settings of one configuration by name, read with a type and a default. Values may be texts ("1e-2", "true").

    `spell` turns a key into the name that the user wrote, for messages. None counts as not given.
    """

    def __init__(
        self, values: Mapping[str, Any], notes: Notes, project: str, spell: Callable[[str], str] = lambda key: key
    ) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._read: set[str] = set()
        self.notes, self.project, self.spell = notes, project, spell

    def given(self, key: str) -> bool:
        """Whether `key` is set; this also marks it as read."""
        self._read.add(key)
        return key in self._values

    def raw(self, key: str, default: Any = None) -> Any:
        """The value of `key`, unchanged."""
        return self._values[key] if self.given(key) else default

    def switch(self, key: str, default: bool = False) -> bool:
        """`key` as true or false. Raises: SpecError."""
        value = self.raw(key, default)
        word = str(value).strip().lower()
        if isinstance(value, (bool, int, str)) and (word in TRUE or word in FALSE):
            return word in TRUE
        raise self.refuse(key, "must be true or false")

    def integer(self, key: str, default: int | None = None, *, assume: bool = False, least: int = 1) -> int | None:
        """`key` as a whole number of at least `least`. `assume` notes the default as an assumption. Raises: SpecError."""
        number = self.number(key, default, assume=assume)
        if number is None:
            return None
        if not float(number).is_integer() or number < least:
            raise self.refuse(key, f"must be a whole number of at least {least}")
        if number > MOST:
            raise self.refuse(key, f"must be at most {MOST}")
        return int(number)

    def size(self, key: str, default: int | None = None, *, assume: bool = False) -> int:
        """`key` as a required whole number of at least 1. Raises: SpecError."""
        number = self.integer(key, default, assume=assume)
        if number is None:
            raise SpecError(f"{self.spell(key)} is required and missing; add it.", parameter=self.spell(key))
        return number

    def number(self, key: str, default: float | None = None, *, assume: bool = False) -> float | None:
        """`key` as a finite number. Raises: SpecError."""
        if not self.given(key):
            if assume:
                self.notes.assumptions.append(
                    f"{self.spell(key)} is not given; the default of {self.project} is {default}."
                )
            return default
        value = self._values[key]
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.refuse(key, "must be a number")
        return number

    def text(self, key: str, default: str = "") -> str:
        """`key` as a text. Raises: SpecError."""
        value = self.raw(key, default)
        if isinstance(value, (list, tuple)):
            return " ".join(str(item) for item in value)
        if isinstance(value, Mapping):
            raise self.refuse(key, "must be a text")
        return str(value)

    def one_of(self, key: str, default: str, allowed: Iterable[str]) -> str:
        """`key` as one of the words `allowed`. Raises: SpecError with near misses."""
        value, words = self.text(key, default), list(allowed)
        if value not in words:
            raise self.refuse(key, f"must be one of {', '.join(words)}{near_misses(value, words)}".rstrip("?"))
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """`key` as words: a list, or a text such as "[a b]" or "a,b"."""
        value = self.raw(key, ())
        items = value if isinstance(value, (list, tuple)) else str(value).strip("[]() ").replace(",", " ").split()
        return tuple(str(item).strip("'\"") for item in items)

    def left(self) -> list[str]:
        """The keys that have not been read."""
        return sorted(set(self._values) - self._read)

    def note_left(self, *ignored: re.Pattern[str] | Container[str]) -> None:
        """Note the keys that have not been read, as the user wrote them: as ignored if one of `ignored` contains the key or
        matches all of it, else as unknown."""
        for key in self.left():
            known = any(key_is_in(names, key) for names in ignored)
            (self.notes.ignored if known else self.notes.unknown).append(self.spell(key))

    def model(self, asked: Any, *keys: str, what: str = "the model's hub id, its folder, or its config.json") -> Any:
        """The network: `asked` if the question gives one, else the first of `keys` that has a value. All of them count as
        read. Raises: SpecError naming the first key, with `what` it takes, if there is none."""
        found = asked or next(filter(None, map(self.text, keys)), None)
        if not found:
            raise self.missing(keys[0], what)
        self._read.update(keys)
        return found

    def missing(self, key: str, what: str) -> SpecError:
        """The error for the required `key`, which is not given; `what` it says."""
        name = self.spell(key)
        return SpecError(f"{name} is required and missing: {what}.", parameter=name)

    def refuse(self, key: str, rule: str, value: object = None) -> SpecError:
        """The error for `key` that breaks `rule`, in the user's own spelling."""
        value = self._values.get(key, value)
        name = self.spell(key)
        return SpecError(f"{name}={value!r} {rule}.", parameter=name, value=value)


def note_inner(settings: Settings, key: str, read: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """Note the keys of the mapping at `key` that are not in `read`: as ignored or as unknown."""
    value = settings.raw(key)
    for name in value if isinstance(value, Mapping) else ():
        if name not in read:
            (settings.notes.ignored if name in ignored else settings.notes.unknown).append(f"{settings.spell(key)}.{name}")


def gpu_count(number: object) -> int:
    """`number` of GPUs of a run as an int; JSON writers may have made it a float. Raises: SpecError."""
    whole = int_like(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else None
    if whole is None or not 1 <= whole <= MOST_RANKS:
        raise SpecError(
            f"num_gpus={number!r} must be a whole number from 1 to {MOST_RANKS:,}, such as 8.",
            parameter="num_gpus",
            value=number,
        )
    return whole


def states_direction(optimizer: str) -> Direction:
    """Which way the real peak differs if AdamW is predicted instead of `optimizer`: down for those known to keep less than
    two states of four bytes per parameter, up for those with three states."""
    if any(word in optimizer.lower() for word in MORE_STATES):
        return "more"
    return "less" if any(word in optimizer.lower() for word in FEWER_STATES) else "either"


def refuse_teacher(settings: Settings, *names: str) -> None:
    """Refuse a run that distils from a teacher: the teacher is another whole network on the GPU, so an answer without it
    would be far too low. Raises: SpecError."""
    for key in names:
        if settings.raw(key):
            raise settings.refuse(
                key,
                "is a teacher, a second network on the GPU that is not modelled; leave it out to ask about the student "
                "alone, and add the teacher's weights and logits to the answer",
            )


def words(text: str) -> frozenset[str]:
    """The words of `text`, for tables of keys."""
    return frozenset(text.split())


def renamed(settings: Settings, names: Mapping[str, str]) -> dict[str, Any]:
    """The values of those `settings` whose keys are in `names`, by the names given there."""
    return {name: settings.raw(key) for key, name in names.items() if settings.given(key)}


def note_unsupported(settings: Settings, names: Mapping[str, str], direction: Direction = "either") -> None:
    """Note the keys of `names` that are switched on or have a size other than 1, by the names given there. `direction`: as
    for `FindingList.append`."""
    found: dict[str, list[str]] = {}
    for key, what in names.items():
        value = settings.raw(key)
        off = value is None or value is False or value in ([], {}, 0) or str(value).strip().lower() in FALSE
        if not off and (value is True or value != 1):
            found.setdefault(what, []).append(settings.spell(key))
    for what, keys in found.items():
        sentence = f"{what[0].upper()}{what[1:]} ({', '.join(keys)}) is not modelled."
        settings.notes.unsupported.append(sentence, keys[0], direction)


def note_numbers(settings: Settings, names: Mapping[str, str], direction: Direction = "either") -> None:
    """Note the keys of `names` whose number is not 0, by the names given there. `direction`: as in `FindingList.append`."""
    for key, what in names.items():
        if settings.number(key, 0):
            settings.notes.unsupported.append(f"{what} ({key}) is not modelled.", key, direction)


def note_two_layers(notes: Notes, key: str) -> None:
    """Note which activations stay on the GPU although `key` offloads activations in verl's way (verl 0.6.1
    utils/activation_offload.py, which ms-swift 4 copied)."""
    notes.unsupported.append(
        f"While one layer's activations are copied ({key}) they stay on the GPU with those of the next, and so do the last "
        "layer's: about two layers' activations more than the answer, which counts all of them as on the host.",
        key,
        "more",
    )


def note_widened_ends(notes: Notes) -> None:
    """Note what peft does to quantised weights before training, which is not modelled."""
    notes.unsupported.append(
        "peft's prepare_model_for_kbit_training widens the embedding and the head to float32, which is not modelled: 2 "
        "bytes more for each of their parameters.",
        "use_qlora",
        "more",
    )


def key_is_in(names: re.Pattern[str] | Container[str], key: str) -> bool:
    """Whether `names` is a pattern that matches all of `key`, or contains it."""
    return names.fullmatch(key) is not None if isinstance(names, re.Pattern) else key in names


def speller(*names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that turns a name made by `renamed` back into the key that the user wrote."""
    written = {name: key for table in names for key, name in table.items()}
    return lambda name: written.get(name, name)


def _not_known(name: str) -> str:
    """The sentence about an unknown key."""
    return f"{name} is not known here; it is left out, and may matter."
