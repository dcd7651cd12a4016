"""`Finding`: a warning that a program can read, about something that an answer does not count, has not measured or could
not read.

A prediction carries its findings (`Prediction.findings`); its `warnings` are their sentences. `KINDS` lists every code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Direction = Literal["more", "less", "either"]
"""Whether the real peak is above or below the answer because of the finding; "either" if that is not known."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties that all findings with one code share."""

    meaning: str
    severity: int = 0
    """How far the job is from what was measured: 0 not at all, 1 a little, 2 another kind of job, 6 not modelled. Bars are
    widened by the sum (`models/calibration/domain.py` severity)."""
    uncounted: bool = False
    """Whether the answer leaves out something of unknown size. Only such findings change a verdict
    (`models/prediction/verdict.py` judge)."""
    prevents: bool = False
    """Whether the run would fail and so have no peak; then the verdict is never `yes`."""
    together: str = ""
    """A sentence for several such findings, with {} for their parameters."""
    routine: bool = False
    """Whether it only repeats what the bars rest on, or says that all is normal; an answer then shows it only in its
    details."""


OUT_OF_SCOPE = 6
"""The severity of findings that put a job out of scope: its run counts in no accuracy claim."""
UNSEEN = "the bars are wider, because no measured run is like this one in {}."


KINDS = {
    "not_modelled": Kind(
        "the job has something that the ledger does not count or has never been compared for", OUT_OF_SCOPE, uncounted=True
    ),
    "network_guessed": Kind(
        "the ledger does not know the network's family; the numbers are those of a Llama of its sizes",
        OUT_OF_SCOPE,
        uncounted=True,
    ),
    "nearly_modelled": Kind(
        "the ledger differs from traces or runs of such jobs, by at most the share that is said", OUT_OF_SCOPE
    ),
    "run_would_fail": Kind("a library refuses such a job; the answer is as if it ran", OUT_OF_SCOPE, prevents=True),
    "setting_ignored": Kind("a setting of the job that no ledger looks at, and that may matter", 1, uncounted=True),
    "setting_without_effect": Kind("a setting that does nothing with the rest of the job", routine=True),
    "setting_not_modelled": Kind("a configuration asks for something that a job cannot say", 2, uncounted=True),
    "setting_unknown": Kind(
        "a key of a configuration that peakcast does not know; it is left out",
        1,
        together="{} are not known here; they are left out, and may matter.",
    ),
    "setting_reinterpreted": Kind("a configuration could be read in more than one way; the sentence says how it was read"),
    "positions_exceeded": Kind("the sequence is longer than the network's table of positions", prevents=True),
    "kind_not_measured": Kind(
        "no measured run has this framework, layout, task or kind of layer", 2, together=UNSEEN, routine=True
    ),
    "setting_not_measured": Kind("no measured run has this setting", 1, together=UNSEEN, routine=True),
    "size_not_measured": Kind("a size of the job is far outside the measured range", 1, together=UNSEEN, routine=True),
    "version_not_measured": Kind("measured runs have other releases of this package", 1, together=UNSEEN, routine=True),
    "versions_not_given": Kind("no version is given, and with earlier releases the job needs another amount", routine=True),
    "version_not_modelled": Kind("no convention of this package's releases is known", 1),
    "gpu_not_measured": Kind("the bars come from measurements on another GPU type", 1, routine=True),
    "not_calibrated": Kind("the bars rest on no measurement", routine=True),
    "cache_beyond_capacity": Kind("the tensors may fit, the allocator's cache does not"),
    "host_memory_not_given": Kind("the host memory that is needed is more than a usual node has"),
    "reserved_beyond_replay": Kind("published runs of such jobs hold more than the simulated allocator reserves"),
    "allocator_retries": Kind("the simulated allocator runs out of memory, or nearly, and frees its cache to go on"),
    "blocks_wait": Kind("the cache has blocks that wait for the GPU, as many as there can be"),
    "weights_stay_gathered": Kind("a release of DeepSpeed keeps weights whole that others release during backward"),
    "default_changed": Kind("the default of a setting does not suit this network; the sentence says what is assumed"),
    "value_assumed": Kind("a script that ran on fake tensors read a value that only a run on data has, and was given one"),
    "timing_assumed": Kind("what a script keeps depends on how fast CPU and GPU are, which a dry run does not measure"),
    "job_differs": Kind("the job that a dry run describes lacks something that its script does"),
    "peak_in_evaluation": Kind("the peak of a script is in its evaluation, not in a training step"),
    "recomputation_off": Kind("a script asks for recomputation in a mode in which its library does none"),
    "script_part_skipped": Kind("a part of a script, such as saving a checkpoint, that a dry run skips"),
    "compiler_differs": Kind("compiled code is that of the installed release of torch, not of the run's"),
    "steps_not_followed": Kind(
        "a dry run ended while the script's steps still changed; later ones may need more", 1, uncounted=True
    ),
    "outside_estimated": Kind(
        "what lies outside PyTorch's allocator is an estimate, and a large share of a small peak", routine=True
    ),
}
"""Every code a finding can have. A code keeps its meaning; a new meaning is a new code."""
OF_THE_CACHE = frozenset(("reserved_beyond_replay", "allocator_retries", "blocks_wait"))
"""Codes of findings about the allocator's cache, which do not affect allocated memory."""
CAUSES = OF_THE_CACHE | {
    "not_modelled", "network_guessed", "nearly_modelled", "setting_ignored", "setting_not_modelled", "outside_estimated",
    "versions_not_given",
}  # fmt: skip
"""Codes of findings that name a cause of error. Other findings say that something was not measured, or how it was read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why the real peak may differ from the answer."""

    code: str
    """One of `KINDS`."""
    parameter: str
    """The setting that it concerns, by the user's name or by a job's; "" if it concerns none."""
    direction: Direction
    sentence: str
    share: float | None = None
    """The most by which such jobs were off wherever they were compared, as a fraction that the sentence also says; None if
    nothing was compared, or nothing can be said of other jobs."""

    def __post_init__(self) -> None:
        assert self.code in KINDS, self.code
        assert self.direction in get_args(Direction), self.direction

    @property
    def severity(self) -> int:
        """How much it widens the bars (`Kind.severity`)."""
        return KINDS[self.code].severity

    @property
    def uncounted(self) -> bool:
        """Whether the answer leaves out something of unknown size (`Kind.uncounted`)."""
        return KINDS[self.code].uncounted

    @property
    def of_unknown_size(self) -> bool:
        """Whether such jobs are out of scope, and nothing says how far off they may be."""
        return self.severity >= OUT_OF_SCOPE and self.share is None

    @property
    def leaves_out(self) -> Direction | None:
        """The direction in which something of unknown size moves the peak that the answer leaves out, of a job that is in
        scope without it; None if there is no such thing, or nobody knows which way it moves the peak."""
        in_scope = self.uncounted and self.severity < OUT_OF_SCOPE and self.share is None
        return self.direction if in_scope and self.direction != "either" else None

    def to_mapping(self) -> dict[str, str]:
        """The four fields that answers show, by name."""
        return {name: getattr(self, name) for name in ("code", "parameter", "direction", "sentence")}


def sentences(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The sentences of `findings`, without repetition."""
    return tuple(dict.fromkeys(finding.sentence for finding in findings))


def guessed(findings: Iterable[Finding]) -> bool:
    """Whether the numbers are those of another network, because the job's is not known."""
    return any(finding.code == GUESSED[0] for finding in findings)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """`findings` without repeated sentences, those that may change the answer most first.

    First those that are not counted, a known direction before an unknown one; then by how much they widen the bars.
    """
    once = {finding.sentence: finding for finding in findings}.values()
    return tuple(sorted(once, key=lambda f: (not f.uncounted, f.uncounted and f.direction == "either", -f.severity)))


# -- findings by their effect ---------------------------------------------------------------------------------------------

Effect: TypeAlias = tuple[str, Direction]
"""The code of a finding, and its direction."""
GUESSED: Effect = ("network_guessed", "either")
"""The network is not known at all: bars are as wide as they can be."""
UNKNOWN: Effect = ("not_modelled", "either")
MORE: Effect = ("not_modelled", "more")
LESS: Effect = ("not_modelled", "less")
"""UNKNOWN, MORE and LESS: the ledger does not count something that needs or saves memory."""
NEARLY: Effect = ("nearly_modelled", "either")
NEARLY_MORE: Effect = ("nearly_modelled", "more")
NEARLY_LESS: Effect = ("nearly_modelled", "less")
"""NEARLY, NEARLY_MORE and NEARLY_LESS: a trace's memory differs from the ledger's by the fraction that the sentence
says."""
FAILS: Effect = ("run_would_fail", "either")


def found(sentence: str, parameter: str, *, effect: Effect = UNKNOWN, share: float | None = None) -> Finding:
    """A finding about `parameter` with this sentence, and the share that it says (`Finding.share`)."""
    code, direction = effect
    return Finding(code, parameter, direction, sentence, share)


SILENT_ABOVE = 0.10
"""An error of more than this share whose answer has no finding that says why is a silent miss."""
