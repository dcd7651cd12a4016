"""Pipeline parallelism: which layers a rank holds, and in which order it runs micro-batches forward and backward.

Used by every framework that runs 1F1B or its interleaved form (Narayanan et al. 2021, arXiv:2104.04473). The orders are
those of megatron-core 0.13.1 `pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.jobs.parallelism import V_SHAPED
from peakcast.jobs.spec import Parallelism

SPLIT_BACKWARD = ("zero_bubble", "zero_bubble_v", "dualpipe_v")
"""Schedules that may split a backward into two halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A model chunk (virtual stage) of a rank: its layers, and whether it has the network's embedding and its head."""

    layers: range
    is_first: bool
    is_last: bool
    from_here: bool = False
    """The chunk before it in the network is on this rank too, and passes its output on directly."""
    to_here: bool = False
    """The chunk after it in the network is on this rank too."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of a rank's schedule: run `chunk` on `micro_batch`, forward or backward. `half`: of a backward that is
    split in two, the gradients of inputs or those of weights."""

    forward: bool
    micro_batch: int
    chunk: int
    half: Literal["", "inputs", "weights"] = ""


_HALVES: dict[str, Literal["", "inputs", "weights"]] = {"forward": "", "inputs": "inputs", "weights": "weights"}


def pipeline_rank(layout: Parallelism, rank: int, *, pipeline_innermost: bool = False) -> int:
    """The pipeline stage of global `rank`. Megatron's default order is tp-cp-ep-dp-pp: stages are outermost
    (`pipeline_innermost`: tp-pp-dp, `--use-tp-pp-dp-mapping`). Raises: SpecError for a rank that does not exist."""
    if not 0 <= rank < layout.world_size:
        raise SpecError(
            f"rank={rank} does not exist in a job of {layout.world_size} ranks; use 0 to {layout.world_size - 1}.",
            parameter="rank",
            value=rank,
        )
    inside = layout.tensor_parallel_size * layout.context_parallel_size
    if pipeline_innermost:
        return rank // inside % layout.pipeline_parallel_size
    return rank // (inside * layout.data_parallel_size)


def place_in_stage(layout: Parallelism, rank: int, *, pipeline_innermost: bool = False) -> int:
    """The position of global `rank` among the ranks of its pipeline stage, in the order tp-cp-ep-dp."""
    inside = layout.tensor_parallel_size * layout.context_parallel_size
    if pipeline_innermost:
        return rank // (inside * layout.pipeline_parallel_size) * inside + rank % inside
    return rank % (inside * layout.data_parallel_size)


@lru_cache(maxsize=4096)
def stage_chunks(num_layers: int, layout: Parallelism, pipeline_rank: int) -> tuple[Chunk, ...]:
    """The chunks of stage `pipeline_rank`, in the order of the network."""
    stages = virtual_stages(layout, pipeline_rank)
    total = layout.pipeline_parallel_size * layout.virtual_pipeline_stages
    sizes = layout.pipeline_layers or (num_layers // total,) * total
    return tuple(
        Chunk(
            layers=range(sum(sizes[:stage]), sum(sizes[: stage + 1])),
            is_first=stage == 0,
            is_last=stage == total - 1,
            from_here=stage - 1 in stages,
            to_here=stage + 1 in stages,
        )
        for stage in stages
    )


def virtual_stages(layout: Parallelism, pipeline_rank: int) -> tuple[int, ...]:
    """The virtual stages of `pipeline_rank`: every p-th one or, in V-shaped schedules, one on the way down and one on the
    way back (torch 2.13 `pipelining/_utils.py` generate_stage_to_rank_mapping)."""
    ranks, back = layout.pipeline_parallel_size, layout.pipeline_schedule in V_SHAPED
    return tuple(
        chunk * ranks + (ranks - 1 - pipeline_rank if back and chunk % 2 else pipeline_rank)
        for chunk in range(layout.virtual_pipeline_stages)
    )


def warmup_turns(
    stages: int, virtual_stages: int, pipeline_rank: int, group: int, num_micro_batches: int, early: int = 0
) -> int:
    """How many forward turns run before forward and backward alternate (`get_pp_rank_microbatches`). `early`: how many more
    than 1F1B needs."""
    if stages == 1:
        warmup = 0
    elif virtual_stages == 1:
        warmup = stages - pipeline_rank - 1
    else:
        warmup = (stages - pipeline_rank - 1) * 2 + (virtual_stages - 1) * group
    return min(warmup + early, num_micro_batches * virtual_stages)


@lru_cache(maxsize=1024)
def schedule(
    stages: int, virtual_stages: int, pipeline_rank: int, num_micro_batches: int, group: int | None = None, early: int = 0
) -> tuple[Turn, ...]:
    """The turns of stage `pipeline_rank` in order. `group`: how many micro-batches a virtual stage runs in a row (default:
    the number of stages). `early`: as in `warmup_turns`."""
    group = group or stages
    table = _table(num_micro_batches, virtual_stages, group)
    warmup = warmup_turns(stages, virtual_stages, pipeline_rank, group, num_micro_batches, early)
    forward = [Turn(True, micro_batch, chunk) for micro_batch, chunk in table]
    backward = [Turn(False, micro_batch, virtual_stages - 1 - chunk) for micro_batch, chunk in table]
    turns = forward[:warmup]
    for done in range(len(table) - warmup):
        turns += [forward[warmup + done], backward[done]]
    return (*turns, *backward[len(table) - warmup :])


def _table(num_micro_batches: int, virtual_stages: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every virtual micro-batch (`get_schedule_table`)."""
    if virtual_stages == 1:
        return [(micro_batch, 0) for micro_batch in range(num_micro_batches)]
    return [
        (micro_batch, chunk)
        for start in range(0, num_micro_batches, group)
        for chunk in range(virtual_stages)
        for micro_batch in range(start, min(start + group, num_micro_batches))
    ]


def representative_micro_batches(
    stages: int, virtual_stages: int, pipeline_rank: int, num_micro_batches: int, group: int | None = None
) -> int:
    """How many micro-batches to simulate: the fewest with which as many are in flight at once as with all, and two more."""
    group = group or stages
    if virtual_stages == 1:
        return min(num_micro_batches, stages - pipeline_rank + 2)
    in_flight = warmup_turns(stages, virtual_stages, pipeline_rank, group, num_micro_batches) + 1
    groups = -(-(in_flight + 2 * virtual_stages) // (virtual_stages * group)) + 1
    return min(num_micro_batches, groups * group)


def turns_of_rank(layout: Parallelism, stage: int, num_micro_batches: int) -> tuple[Turn, ...]:
    """The turns of pipeline rank `stage` in the order of torch 2.13 `distributed/pipelining/schedules.py`."""
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_stages
    if layout.pipeline_schedule == "gpipe":
        everything, chunks = range(num_micro_batches), range(virtual)
        forward = [Turn(True, micro_batch, chunk) for chunk in chunks for micro_batch in everything]
        order = everything if virtual == 1 else everything[::-1]  # ScheduleGPipe, ScheduleLoopedBFS
        backward = [Turn(False, micro_batch, chunk) for chunk in reversed(chunks) for micro_batch in order]
        return (*forward, *backward)
    if layout.pipeline_schedule == "zero_bubble_v":
        return _zero_bubble_v(stages, stage, num_micro_batches)
    if layout.pipeline_schedule == "dualpipe_v":
        return _dualpipe_v(stages, stage, num_micro_batches)
    group = _round(layout, num_micro_batches)
    if layout.pipeline_schedule == "zero_bubble":
        return _zero_bubble(stages, virtual, stage, num_micro_batches, group)
    return schedule(stages, virtual, stage, num_micro_batches, group)


def _zero_bubble(stages: int, virtual: int, stage: int, num_micro_batches: int, group: int) -> tuple[Turn, ...]:
    """`ScheduleInterleavedZeroBubble` (`_get_1f1b_rank_ops`): the weights' half of a backward runs `stage` backwards
    later."""
    table = _table(num_micro_batches, virtual, group)
    warmup = min((virtual - 1) * group + stages - 1 - stage, len(table))
    backward = [(micro_batch, virtual - 1 - chunk) for micro_batch, chunk in table]
    turns = [Turn(True, *one) for one in table[:warmup]]
    for done, one in enumerate(backward):
        turns += [Turn(True, *ahead) for ahead in table[warmup + done : warmup + done + 1]]
        turns.append(Turn(False, *one, "inputs"))
        if done >= stage:
            turns.append(Turn(False, *backward[done - stage], "weights"))
    return (*turns, *(Turn(False, *one, "weights") for one in backward[max(0, len(backward) - stage) :]))


def _zero_bubble_v(stages: int, stage: int, num_micro_batches: int) -> tuple[Turn, ...]:
    """`ScheduleZBVZeroBubble`: two stages per rank. The weights' half follows at once, except for the last `stage`
    backwards of each."""
    planned = max(2 * stages - 1, num_micro_batches)
    turns: list[Turn] = []
    done: Counter[tuple[int, str]] = Counter()

    def run(chunk: int, *kinds: str) -> None:
        for kind in kinds:
            turns.append(Turn(kind == "forward", done[chunk, kind], chunk, _HALVES[kind]))
            done[chunk, kind] += 1

    for _ in range(2 * (stages - stage) - 1):
        run(0, "forward")
    for _ in range(stage):
        run(1, "forward")
        run(0, "forward")
    for _ in range(stages - stage):
        run(1, "forward", "inputs", "weights")
    while done[1, "forward"] < done[0, "forward"] or done[0, "forward"] < planned:
        run(0, *(["forward"] if done[0, "forward"] < planned else []), "inputs", "weights")
        run(1, "forward", "inputs", "weights")
    for _ in range(stage):
        run(0, "inputs")
        run(1, "inputs")
    for _ in range(stages - stage):
        run(0, "inputs", "weights")
    for chunk in (1, 0):
        while done[chunk, "weights"] < done[chunk, "inputs"]:
            run(chunk, "weights")
    return tuple(turn for turn in turns if turn.micro_batch < num_micro_batches)


def _dualpipe_v(stages: int, stage: int, num_micro_batches: int) -> tuple[Turn, ...]:
    """`ScheduleDualPipeV`. torch runs its overlapped forwards and backwards one after the other, so a backward is split
    only while the pipeline fills and drains."""
    # F0: forward of chunk 0; B1: whole backward of chunk 1; I1: its inputs' half; W: the oldest weights' half still to run
    ahead, half, odd = stages - stage - 1, (stage + 1) // 2, stage % 2 == 1
    emptying = [
        step
        for done in range(stage + 1)
        for step in ("I1" if done > half or (done == half and odd) else "B1", "I0" if done >= half else "B0")
    ]
    order = [
        *["F0"] * (2 * ahead),
        *["F0", "F1"] * (stage + 1),
        *["I1", "W", "F1"] * ahead,
        *["F0", "B1", "F1", "B0"] * (num_micro_batches - 2 * stages + stage + 1),
        *["B1", "F1", "B0"] * ahead,
        *emptying,
        *["W", "I0"] * ahead,
        *["W"] * (stage + 1),
    ]
    turns: list[Turn] = []
    later: deque[Turn] = deque()
    done = Counter[str]()
    for step in order:
        if step == "W":
            turns += [later.popleft()] if later else []
            continue
        forward, chunk = step[0] == "F", int(step[1])
        counted = f"{forward}{chunk}"
        turns.append(Turn(forward, done[counted], chunk, "inputs" if step[0] == "I" else ""))
        if step[0] == "I":
            later.append(Turn(False, done[counted], chunk, "weights"))
        done[counted] += 1
    return tuple(turns)


def _round(layout: Parallelism, num_micro_batches: int) -> int:
    """Micro-batches per round (`ScheduleInterleaved1F1B`). There are as many rounds as full groups of one micro-batch per
    stage."""
    return num_micro_batches // max(1, num_micro_batches // layout.pipeline_parallel_size)


def simulated_micro_batches(layout: Parallelism, stage: int, num_micro_batches: int) -> int:
    """How many micro-batches to simulate so that more would not change the peak. All of them, if every forward runs before
    the first backward, or if weights' gradients are computed later than inputs'."""
    if layout.pipeline_schedule in ("gpipe", *SPLIT_BACKWARD):
        return num_micro_batches
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_stages
    group = _round(layout, num_micro_batches)
    return representative_micro_batches(stages, virtual, stage, num_micro_batches, group)
