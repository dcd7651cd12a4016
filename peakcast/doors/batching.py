"""Many questions at once: one JSON object per line in, one per line out, in the same order. A bad line is answered with an
error and does not end the batch."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peakcast.catalog.constants import constants_state
from peakcast.core.bounded import file_bytes, json_value, lines_of
from peakcast.core.cores import available_cores
from peakcast.core.deadline import TimeIsUp, limited
from peakcast.core.durable import MAX_FILE_BYTES
from peakcast.core.errors import PeakcastError, SpecError, near_misses
from peakcast.core.workers import QuestionLimits, Workers, check_processes
from peakcast.doors.questions import FORMS, Question, question

MAX_LINE_CHARACTERS = 4 * 2**20
"""A longer line cannot be a question; it is refused before it is parsed."""
MAX_VALUE_CHARACTERS = 400
"""If a refused value is longer than this as JSON, the answer has a shortened one."""
REMEMBERED = 8192
"""Number of answers that are cached for repeated questions."""
NEIGHBOURS = 2048
"""This many distinct questions are sorted before they are distributed, so that one process gets similar ones and computes
the blocks that they share only once."""
LINE_SECONDS = 60.0
"""Time limit of one line. A published configuration takes milliseconds, the largest some seconds."""
LONG_BATCH = 64
"""From this many questions on, starting more processes pays."""
KEYS = ("id", "gpu", "rank", "host_memory_gib", "gpus_per_node", *FORMS)


def predict_batch(
    lines: Iterable[str | bytes | Mapping[str, Any]], processes: int = 1, *, timeout_seconds: float = LINE_SECONDS
) -> Iterator[dict[str, Any]]:
    """Answer each question of `lines` (JSON texts or mappings), in order; blank lines are skipped.

    A question has `gpu`, exactly one of `job`, `megatron` or `huggingface`, and optionally `rank` ("worst", "last" or a
    number), `host_memory_gib` and `gpus_per_node` (as in `api.predict`) and `id`, which is returned with the answer. An
    answer is `Prediction.to_mapping()` with that `id`, or `{"id", "error": {"parameter", "value", "message"}}`. Every
    answer is strict JSON.

    If `processes` is above 1, all lines are read first and then distributed; with 1, each line is answered before the next
    is read. A line that takes longer than `timeout_seconds`, or whose process is killed, gets an error, and the others are
    answered.
    Raises: SpecError if `processes` is more than a machine like this one can use, or the time limit is not a positive
    number.
    """
    check_processes(processes)
    if not 0 < timeout_seconds < math.inf:
        raise SpecError(
            f"timeout_seconds={timeout_seconds} must be above 0 and finite.",
            parameter="timeout_seconds",
            value=timeout_seconds,
        )
    return _answers(lines, processes, timeout_seconds)


def lines_and_processes(path: Path, processes: int | None) -> tuple[Iterable[bytes], int]:
    """The lines of the file at `path`, and how many processes answer them: one for a short file, and one for standard input
    (`-`), whose lines are answered as they come. Raises: SpecError."""
    if str(path) == "-":
        return lines_of(sys.stdin.buffer, MAX_LINE_CHARACTERS), processes or 1
    try:
        lines = file_bytes(path, MAX_FILE_BYTES).split(b"\n")
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; check the path.", parameter="batch") from error
    return lines, processes or (1 if len(lines) < LONG_BATCH else available_cores())


def _answers(
    lines: Iterable[str | bytes | Mapping[str, Any]], processes: int, timeout_seconds: float
) -> Iterator[dict[str, Any]]:
    readings = (_read(line) for line in lines if isinstance(line, Mapping) or line.strip())
    if processes > 1:
        yield from _shared_out(list(readings), processes, timeout_seconds)
        return
    for name, text, refusal in readings:
        yield refusal or {"id": name, **json.loads(_in_time(text, timeout_seconds))}


def _in_time(text: str, seconds: float) -> str:
    try:
        with limited(seconds):
            return _answer_text(text)
    except TimeIsUp:
        why = f"no answer within {seconds:g} s; give it more time (--timeout-seconds), or ask about a smaller job."
        return _refusal_text(PeakcastError(why))


Reading = tuple[object, str, dict[str, Any] | None]
"""A line's id, its question as canonical JSON without the id, and an error if the line could not be read."""


def _read(line: str | bytes | Mapping[str, Any]) -> Reading:
    name: object = None
    try:
        entry = dict(line) if isinstance(line, Mapping) else _parse(line)
        name = entry.pop("id", None)
        json.dumps(name, allow_nan=False)
        return name, json.dumps(entry, sort_keys=True, allow_nan=False), None
    except PeakcastError as error:
        return name, "", _refusal(name, error.parameter, error.value, error.message)
    except (ValueError, TypeError, RecursionError) as error:  # only for mappings that are not JSON
        return None, "", _refusal(None, None, None, f"the question cannot be written as JSON: {error}.")


def _shared_out(readings: Sequence[Reading], processes: int, timeout_seconds: float) -> Iterator[dict[str, Any]]:
    """The answers to `readings`, in order. Each distinct question is answered once, by one of `processes`."""
    distinct = list(dict.fromkeys(text for _, text, refusal in readings if refusal is None))
    starts = range(0, len(distinct), NEIGHBOURS)
    windows = (sorted(distinct[start : start + NEIGHBOURS], key=_but_for_gpu) for start in starts)
    answers: dict[str, str] = {}
    with Workers(_answer_text, processes, QuestionLimits(timeout_seconds)) as workers:
        arriving = workers.answers(itertools.chain.from_iterable(windows))
        for name, text, refusal in readings:
            while refusal is None and text not in answers:
                asked, answer = next(arriving)
                answers[asked] = answer if isinstance(answer, str) else _refusal_text(answer)
            yield refusal or {"id": name, **json.loads(answers[text])}


def _but_for_gpu(text: str) -> str:
    """The question without its GPU type, which is its first entry."""
    return text.partition(",")[2]


def _answer_text(text: str) -> str:
    """The answer to the question in the canonical JSON `text`, as JSON and without its id."""
    return _remembered(text, constants_state())


@functools.lru_cache(maxsize=REMEMBERED)
def _remembered(text: str, constants: object) -> str:
    """The cached answer; `constants` is part of the key, because the user's measured constants may change."""
    try:
        return json.dumps(_predict(question_from_entry(json.loads(text))), allow_nan=False)
    except PeakcastError as error:
        return _refusal_text(error)
    except MemoryError:
        return _refusal_text(PeakcastError("it needs more memory than there is; ask about a smaller job."))
    except Exception as error:  # a bug must not end the other lines
        return _refusal_text(PeakcastError(f"this is a bug in peakcast: {type(error).__name__}: {error}"))


def _refusal_text(error: PeakcastError) -> str:
    refusal = _refusal(None, error.parameter, error.value, error.message)
    del refusal["id"]
    return json.dumps(refusal, allow_nan=False)


def _predict(question: Question) -> dict[str, Any]:
    from peakcast.doors.answering import answer

    return answer(question).to_mapping()


def question_from_entry(entry: Mapping[str, Any]) -> Question:
    """The question of one line (without its id). Raises: PeakcastError."""
    for key in entry:
        if key not in KEYS:
            raise SpecError(
                f"{key} is not a known key of a question{near_misses(key, KEYS) or '; known: ' + ', '.join(KEYS)}",
                parameter=key,
                value=entry[key],
            )
    if not isinstance(entry.get("gpu"), str):
        raise SpecError(
            f"gpu={entry.get('gpu')!r} must be the name of a GPU type, such as 'H100-80GB'.",
            parameter="gpu",
            value=entry.get("gpu"),
        )
    forms = {key: entry[key] for key in FORMS if key in entry}
    if len(forms) != 1:
        raise SpecError(
            f"a question needs exactly one of {', '.join(FORMS)}; this one has {' and '.join(forms) or 'none'}.",
            parameter=" and ".join(forms) or "job",
        )
    if not isinstance(next(iter(forms.values())), Mapping):
        ((form, value),) = forms.items()
        raise SpecError(f"{form}={value!r} must be a mapping.", parameter=form, value=value)
    node = {key: entry[key] for key in ("host_memory_gib", "gpus_per_node") if key in entry}
    return question(forms, entry["gpu"], entry.get("rank"), **node)


def _parse(line: str | bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line.removeprefix("\ufeff")
        if len(text) > MAX_LINE_CHARACTERS:
            raise SpecError(f"a line has {len(text):,} characters; at most {MAX_LINE_CHARACTERS:,} are read.")
        value = json_value(text, strict=True)
    except SpecError:
        raise
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError included
        raise SpecError(f"the line is not valid JSON: {error}; write one JSON object a line.") from error
    if not isinstance(value, dict):
        raise SpecError(f"the line holds a {type(value).__name__} and must be a JSON object.", value=value)
    return value


def _refusal(name: object, parameter: str | None, value: object, message: str) -> dict[str, Any]:
    return {"id": name, "error": {"parameter": parameter, "value": _jsonable(value), "message": _one_line(message)}}


def _one_line(message: str) -> str:
    return " ".join(str(message).encode("utf-8", "backslashreplace").decode().split())


def _jsonable(value: object) -> object:
    """`value` as strict JSON, shortened if it is long."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(repr(value))
    if len(text) > MAX_VALUE_CHARACTERS:
        return text[:MAX_VALUE_CHARACTERS] + "..."
    plain: object = json.loads(text)
    return plain
