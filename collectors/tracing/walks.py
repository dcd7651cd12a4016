"""Walks: one step of a network on one GPU, cut at its blocks, with sizes that are not rounded by an allocator.

`python -P -m peakcast.collectors.tracing.walks` reads lines of JSON from standard input: a job, then for each walk [layers
(null: as many as the job has), micro_batch_size, sequence_length, steps, changed values, numbers of skipped layers], then
null before another job; it answers each with a line. Recipes are made of walks (`peakcast.models.recipes`).
"""

from __future__ import annotations

import bisect
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from peakcast.collectors.machine.packages import import_for_good
from peakcast.collectors.processes.warm_parent import die_with_parent
from peakcast.collectors.stacks.parts.skipped_layers import Results, numbered_kinds, skipping
from peakcast.collectors.stacks.parts.skipped_layers import observed as observed_results
from peakcast.collectors.stacks.steps.stepping import name_gradients
from peakcast.collectors.tracing import kernel_packages, known_values, zero3_linear
from peakcast.collectors.tracing.fsdp_wrapping import ModuleGroup, groups_of, wraps_blocks
from peakcast.collectors.tracing.installed_families import defaults_of, read_of
from peakcast.collectors.tracing.quantized_constants import constants_of
from peakcast.collectors.tracing.stretches import Cut, StretchTracer, blocks_of
from peakcast.collectors.tracing.trace import fake_mode, num_nonzero, one_thread, prepare, reads_values
from peakcast.collectors.tracing.traceable import check_traceable
from peakcast.collectors.tracing.visits import FORWARD
from peakcast.collectors.tracing.walk_names import PEFT, WalkNames
from peakcast.core.errors import CollectorError, PeakcastError
from peakcast.dialects.common.network_values import NETWORK_PREFIX, with_values
from peakcast.dialects.common.own_networks import own_network
from peakcast.jobs.audio import hears
from peakcast.jobs.spec import Parallelism, TrainingJob
from peakcast.networks.layer_count import with_layers
from peakcast.timelines.timeline import Category, Phase

LIBRARIES = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
"""Without them, networks of libraries that have their own can be walked."""
PLACED = (Category.PARAMETERS, Category.OPTIMIZER_STATES)
"""Categories that layouts and optimizers add by themselves."""
Observed = list[tuple[str, Results]]
STEPS = 2
"""The second step begins with what the first has left in memory, as every later one does."""


class Walker:
    """Walks of `job`, in this process, which it changes permanently. Raises: CollectorError if it cannot be traced."""

    def __init__(self, job: TrainingJob) -> None:
        check_traceable(job)
        if job.compile or job.attention == "flex":
            raise CollectorError(
                "compiled code has no blocks to record; trace it (`peakcast explain --trace`).",
                parameter="compile",
                value=True,
            )
        if job.parallelism.zero_stage == 3:  # the only layout that changes a walk on one GPU
            zero3_linear.install()
        self._job = job.replace(parallelism=Parallelism())
        self._beside = 0
        """Number of blocks that the layer count does not include, such as a vision tower's; known from the walk of the
        whole network."""
        self._stacks = 1
        """2 for an encoder-decoder, of whose stacks each has the layer count's blocks."""
        self._observed: dict[int | None, Observed] = {}
        """Number of layers -> name and results of each block, in the order in which they run."""
        self._knows_values = False
        self._has_walked = False
        prepare(self._job, None)

    def defaults(self) -> dict[str, Any]:
        """The library's defaults for values of the network's configuration, by flat names."""
        kept = "" if own_network(self._job) else self._job.architecture.configuration
        return dict(defaults_of(json.loads(kept), NETWORK_PREFIX)) if kept else {}

    def read(self) -> list[str]:
        """Names of values that the library's code may read from the network's configuration."""
        kept = "" if own_network(self._job) else self._job.architecture.configuration
        return read_of(json.loads(kept)) if kept else []

    def walk(
        self,
        layers: int | None,
        batch: int,
        length: int,
        steps: int = STEPS,
        changes: Mapping[str, Any] | None = None,
        skipped: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The walk of the last of `steps` steps, with the first `layers` layers (None: all), `batch` sequences of `length`
        tokens, and `changes` to the job (`peakcast.dialects.common.network_values`). `skipped`: numbers of blocks that hand
        on what they are given, as an earlier walk with the same `layers` ran them."""
        asked = with_values(self._job, changes or {}).replace(micro_batch_size=batch, sequence_length=length)
        if layers is not None:
            of_each = max(1, (layers - self._beside) // self._stacks)
            asked = asked.replace(architecture=with_layers(asked.architecture, of_each))
        self._knows_values |= reads_values(asked)
        without = dict(self._observed[layers][number] for number in skipped)
        try:
            found, observed = self._walked(asked, steps, without)
        except PeakcastError:
            raise
        except Exception:  # if the library reads values, such as the tokens that a router gives each expert
            if self._knows_values or self._has_walked:  # it has read none before: these numbers make no network
                raise
            self._knows_values = True
            known_values.install()
            found, observed = self._walked(asked, steps, without)
        self._has_walked = True
        if skipped:
            return found | {"stacks": self._stacks}
        self._observed[layers] = observed
        if layers is None:
            self._stacks = found["stacks"]
            self._beside = max(0, found["num_places"] // 2 - self._stacks * asked.architecture.num_hidden_layers)
        return found

    def _walked(self, job: TrainingJob, steps: int, without: Mapping[str, Results]) -> tuple[dict[str, Any], Observed]:
        with fake_mode(num_nonzero(job), knows_values=self._knows_values), one_thread(), skipping(without):
            return _walk(job, StretchTracer(), steps)


def _walk(job: TrainingJob, tracer: StretchTracer, steps: int) -> tuple[dict[str, Any], Observed]:
    """The walk, and the name and results of each block in the order in which they run; empty if none can be skipped."""
    from peakcast.collectors.stacks import build

    with tracer:
        training = build(job, "cuda:0", longest=True)
        if hasattr(training, "drive"):
            raise CollectorError("a recipe is recorded of a loop's calls, not of the Trainer's own loop.")
        gc.collect()  # objects that wrapping has replaced are in reference cycles
        weights = list(training.model.named_parameters())
        tracer.name(weights, Category.PARAMETERS)
        tracer.name(training.model.named_buffers(), Category.OTHER)
        tracer.name(constants_of(training.model), Category.OTHER)
        blocks = dict(blocks_of(training.model))
        with tracer.watching(training.model), tracer.following(training.model), observed_results(blocks) as results:
            for _ in range(steps):
                before = len(tracer.cuts)
                _step(training, tracer)
                end = tracer.now
                name_gradients(training, tracer.name)
                updated = {name for name, weight in weights if weight.grad is not None}
                training.zero_grad()
        found = mapping_of(tracer, weights, updated, tracer.cuts[before:], end, _groups(training))
    if own_network(job) is not None:  # its library's own loop says which of its modules FSDP takes as units: the blocks
        return found | {"wrapped": True, "stacks": 1, "image_tokens": 0}, []
    in_order = sorted(results, key=tracer.first_place.__getitem__)
    if len(in_order) == found["num_places"] // 2:  # else a block runs more than once
        found["kinds"] = numbered_kinds([blocks[name] for name in in_order])
    two = _config(training).is_encoder_decoder and found["num_places"] // 2 == 2 * job.architecture.num_hidden_layers
    found |= {"wrapped": wraps_blocks(training.model), "stacks": 1 + two, "image_tokens": _image_tokens(training)}
    found["has_targets"] = bool(_config(training).is_encoder_decoder) and not hears(job.architecture)
    return found, [(name.removeprefix(PEFT), results[name]) for name in in_order]


def _groups(training: Any) -> list[ModuleGroup]:
    """What FSDP gathers together outside of the blocks; unknown for other libraries' networks."""
    return [] if own_network(training.job) is not None else groups_of(training.model)


def _step(training: Any, tracer: StretchTracer) -> None:
    for _ in range(training.job.gradient_accumulation_steps):
        tracer.phase = Phase.FORWARD
        tracer.micro_batch_begins()
        loss = training.forward(lambda: setattr(tracer, "phase", Phase.LOSS))
        tracer.phase = Phase.BACKWARD
        tracer.backward_begins()
        training.backward(loss)
        del loss


def mapping_of(
    tracer: StretchTracer,
    weights: Sequence[tuple[str, Any]],
    updated: Set[str],
    cuts: Sequence[Cut],
    end: int,
    groups: Sequence[ModuleGroup] = (),
) -> dict[str, Any]:
    """The walk with these `cuts` as JSON values; it ends before the operation `end`. `updated`: the names of `weights` that
    got gradients."""
    start, first = cuts[0].instant, cuts[0].micro_batch
    last_place = max(cut.place for cut in cuts)
    num_places, num_micro_batches = last_place + 1, cuts[-1].micro_batch - first + 1

    def stretch(cut: Cut) -> int:
        """The number of the cut's stretch: all places of a micro-batch forward, then all of them backward from the last."""
        within = 2 * num_places - 1 - cut.place if cut.backward else cut.place
        return (cut.micro_batch - first) * 2 * num_places + within

    starts = [end] * (2 * num_places * num_micro_batches)
    for cut in reversed(cuts):
        starts[stretch(cut)] = cut.instant
    for index in reversed(range(len(starts) - 1)):  # if nothing ran, the stretch is empty
        starts[index] = min(starts[index], starts[index + 1])
    spans = list(zip(starts, [*starts[1:], end], strict=True))
    own = WalkNames(tracer, weights, last_place)
    entries = dict(_entries(tracer, own, starts, start, end, num_places))
    numbers = list(entries)
    return {
        "num_places": num_places,
        "stretches": [[tracer._labels[since:until], tracer._phases[since:until]] for since, until in spans],
        "entries": list(entries.values()),
        "returned": [numbers.index(number) for number in tracer.returned if number in entries],
        "visits": _visits(tracer, own, starts, first, num_places),
        "groups": own.groups(groups, weights, num_places),
        "replaced": sorted(kernel_packages.replaced.items()),
        "parameters": own.parameters(weights, updated),
    }


def _entries(
    tracer: StretchTracer, own: WalkNames, starts: list[int], start: int, end: int, num_places: int
) -> Iterator[tuple[int, list[Any]]]:
    """(number, [name, category, bytes, place, born: stretch, offset, dies: stretch, offset, given: stretch, offset, whether
    it is a parameter's gradient]). Stretch -1 for birth means before this step, with offset 0 if before the first step,
    else 1; for death it means never. `place`: to which it belongs. Given: when autograd gives it to its parameter as a
    gradient.
    """
    for number, one in sorted(tracer._entries.items(), key=lambda item: (item[1].born, item[0])):
        born, ends = one.born, sys.maxsize if one.dies is None else one.dies
        category, called = tracer._named.get(number, (None, ""))
        if born >= end or ends <= start or category in PLACED or number not in tracer.raw_bytes:
            continue
        if born < start:
            origin = [-1, int(born >= tracer.cuts[0].instant)]
        else:
            at = bisect.bisect_right(starts, born) - 1
            origin = [at, born - starts[at]]
        fate = [-1, 0] if ends >= end + (ends == end) else _after(ends, starts)
        gradient = tracer.gradients.get(number)
        if category is Category.GRADIENTS or gradient is not None:
            name, category = own.of_weight(gradient or called.removesuffix(".grad")) + ".grad", Category.GRADIENTS
        else:
            if category is None:
                category = Category(int(tracer._guess(born, min(ends, end), end)))
            name = own.of_weight(called) or own.of_module(one.module) or one.name
        is_gradient = category is Category.GRADIENTS
        place = own.place_of(called) if origin[0] < 0 else _place(origin[0], num_places)
        handed_on = _after(tracer.handed_on[number], starts) if gradient is not None else [-1, 0]
        yield number, [name, int(category), tracer.raw_bytes[number], place, *origin, *fate, *handed_on, int(is_gradient)]


def _after(instant: int, starts: list[int]) -> list[int]:
    """[stretch, offset], counted to the end of the stretch in which the operation before `instant` ran."""
    at = bisect.bisect_right(starts, instant - 1) - 1
    return [at, instant - starts[at]]


def _visits(tracer: StretchTracer, own: WalkNames, starts: list[int], first: int, num_places: int) -> list[list[list[Any]]]:
    """For each stretch, [what runs, whether it is entered, module, offset, weights as their modules and names] in order."""
    found: list[list[list[Any]]] = [[] for _ in starts]
    for visit in tracer.visits.seen:
        within = visit.place if visit.runs == FORWARD else 2 * num_places - 1 - visit.place
        stretch = (visit.micro_batch - first) * 2 * num_places + within
        if visit.micro_batch < first or stretch >= len(starts):
            continue
        weights = [own.owner(weight, visit.place) for weight in tracer.visits.weights.get(visit.module, ())]
        offset = max(0, visit.instant - starts[stretch])
        found[stretch].append([visit.runs, visit.enters, own.as_it_is(visit.module), offset, weights])
    return found


def _place(stretch: int, num_places: int) -> int:
    within = stretch % (2 * num_places)
    return min(within, 2 * num_places - 1 - within)


def _image_tokens(training: Any) -> int:
    """Number of tokens that stand for each image of the batch; 0 without images."""
    from peakcast.collectors.stacks.images import tokens_of_image

    return tokens_of_image(training.job, training.batch, _config(training))


def _config(training: Any) -> Any:
    """The network's configuration, as the library has it."""
    from peakcast.collectors.stacks.huggingface_training import causal_model

    return causal_model(training.model).config


_WAYS = {
    "target_modules": "name the adapted layers (finetuning.targets), such as all-linear, or ask with your script",
    "pixel_values": "it takes no step without images: give images.per_sequence and images.height, or ask with your script",
    "scalar type": "it mixes dtypes: try float32 weights (precision.parameters), or ask with your script",
    "_attention'": "a layer without keys of its own reuses those of an earlier layer of its kind: give layer_types such a "
    "layer, or change num_kv_shared_layers",
    "dtype": "its dtypes do not fit: try float32 weights (precision.parameters), or ask with your script",
}
"""Words in an error message of a library -> what the user can do."""


def refusal(error: Exception) -> str:
    """A sentence with the message of a library's `error`, the line of the library's code that raised it, and what to do."""
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers" in Path(frame.filename).parts]
    where = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    way = next((way for sign, way in _WAYS.items() if sign in said), "if a script of yours trains it, ask with that")
    return f"it raised {said}{where}; {way} (`peakcast dryrun`)"


def main() -> int:
    """Serve jobs until standard input ends, each in a forked process that has the libraries loaded."""
    try:
        import torch
    except ImportError as error:
        print(f"peakcast: recording needs {error.name}; install it with: pip install 'peakcast[collect]'", file=sys.stderr)
        return 2
    del torch
    die_with_parent()  # a walk takes minutes, which nobody would wait for
    import_for_good(LIBRARIES)  # once for all jobs
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            die_with_parent()
            serve(line)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
    return 0


def serve(job_line: str) -> None:
    """Answer each line with a line, until one is null: first the releases and defaults of the libraries for the job, then a
    walk for each line, or `{"refused": a sentence}`."""
    from peakcast.collectors.machine.probes import versions
    from peakcast.dialects.common.job_file import job_from_mapping

    walker: Walker | None = None

    def answer(line: str) -> dict[str, Any]:
        nonlocal walker
        if walker is not None:
            return walker.walk(*json.loads(line))
        walker = Walker(job_from_mapping(json.loads(line)))
        gc.collect()
        gc.freeze()  # the libraries' objects stay; examining them takes a quarter of a walk
        return {"versions": versions(), "defaults": walker.defaults(), "read": walker.read()}

    line = job_line
    while line and line.strip() != "null":
        try:
            found = answer(line)
        except PeakcastError as error:
            found = {"refused": str(error)}
        except ImportError as error:
            found = {"refused": f"recording needs {error.name}; install it with: pip install 'peakcast[collect]'"}
        except Exception as error:  # library code may raise any error for a configuration that it does not support
            found = {"refused": refusal(error)}
        print(json.dumps(found), flush=True)
        line = sys.stdin.readline()
    print("null", flush=True)


if __name__ == "__main__":
    sys.exit(main())
