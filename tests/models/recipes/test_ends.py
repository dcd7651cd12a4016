"""FSDP2 groups the ends of a recorded network by the modules that accelerate finds in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peakcast import catalog
from peakcast.jobs.spec import Parallelism, Precision, TrainingJob
from peakcast.models.ledger.recorded.composing import recipe_ledger
from peakcast.models.ledger.recorded.covering import gathered_otherwise
from peakcast.models.ledger.recorded.outside_layers import overlap
from peakcast.models.recipes.recipe import Recipe, recorded
from peakcast.models.recipes.walk import GatheredGroup, WalkedParameter
from peakcast.timelines.timeline import Timeline
from tests.models.recipes.walks import Library

LAYERS, RANKS = 8, 4
TABLE, HEAD, NORM = ("embedding", "table"), ("head", "lm_head"), ("head", "norm")
JOB = TrainingJob(
    architecture=catalog.architecture("llama-3.2-1b"),
    framework="huggingface",
    micro_batch_size=2,
    sequence_length=256,
    parallelism=Parallelism(data_parallel_size=RANKS, sharding="fsdp2"),
)
AUTOCAST = JOB.replace(precision=Precision(parameters="float32", gradients="float32", optimizer_states="float32"))


def step(*groups: GatheredGroup, **more: Any) -> Timeline:
    """A step of a network whose ends FSDP2 groups like this."""
    return recipe_ledger(JOB, grouped(*groups, **more))


def grouped(*groups: GatheredGroup, **more: Any) -> Recipe:
    recipe = recorded(Library(LAYERS), (2, 256))
    ends = (WalkedParameter(*HEAD, (400, 64), 2, True), WalkedParameter(*NORM, (64,), 2, True))
    return replace(recipe, walk=replace(recipe.walk, parameters=(*recipe.walk.parameters, *ends), groups=groups, **more))


def gathered(timeline: Timeline) -> dict[str, list[tuple[int, int, int]]]:
    """Unit -> (when it is gathered, when it is let go, bytes) of each time, the first time first."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for index, name in enumerate(timeline.names):
        if name == "gathered":
            life = int(timeline.born[index]), int(timeline.dies[index]), int(timeline.num_bytes[index])
            found.setdefault(timeline.modules[index], []).append(life)
    return {unit: sorted(lives) for unit, lives in found.items()}


def test_a_tail_is_gathered_where_the_first_of_its_modules_runs() -> None:
    """A final norm without weights may also run on the embedding's output; the lm_head is gathered with it."""
    table = GatheredGroup("table", "embedding", (TABLE,))
    late = gathered(step(table, GatheredGroup("tail", "head", (HEAD,))))
    early = gathered(step(table, GatheredGroup("tail", "embedding", (HEAD,))))
    assert late["tail"][0][0] > late["layers.7"][0][0]
    assert early["tail"][0][0] < early["layers.0"][0][0]
    assert early["tail"][0][1] > early["layers.0"][-1][1] > late["tail"][0][1]  # backward reaches that norm last


@pytest.mark.parametrize("role", ["table", "tail"])
def test_the_table_is_known_by_the_module_not_by_its_name(role: str) -> None:
    """With the lm_head it is one group, which stays gathered."""
    groups = [GatheredGroup(role, "embedding", (TABLE, HEAD) if role == "tail" else (TABLE,))]
    found = gathered(step(*groups))
    assert set(found) == {*(f"layers.{i}" for i in range(LAYERS)), "root", "embedding" if role == "table" else "tail"}
    assert len(found["root"]) == (1 if role == "tail" else 2)  # tensors: the norm, and the lm_head where no group has it


def test_layers_that_are_not_named_to_fsdp_are_gathered_all_at_once() -> None:
    groups = GatheredGroup("table", "embedding", (TABLE,)), GatheredGroup("tail", "head", (HEAD,))
    found = gathered(step(*groups, wrapped=False))
    assert set(found) == {"root", "embedding", "tail"}
    begins, ends = found["root"][0][0], found["root"][0][1]
    assert len(found["root"]) == LAYERS + 1  # each layer's weight, and the norm
    assert {(born, dies) for born, dies, _ in found["root"]} == {(begins, ends)}
    assert begins < found["embedding"][0][0]


def test_groups_that_share_a_weight_overlap() -> None:
    """As where the token embedding is in a module of a class that is never split, and the lm_head has its weight too."""
    tail = GatheredGroup("tail", "embedding", (TABLE, HEAD))
    assert not overlap(grouped(tail).walk)
    assert overlap(grouped(GatheredGroup("class", "embedding", (TABLE,)), tail).walk)


def test_layers_of_two_dtypes_cannot_be_sharded_together() -> None:
    """A router that the library keeps in float32 (torch 2.13 `FSDPParamGroup._init_mp_dtypes`)."""
    router = WalkedParameter("layers.3", "gate", (8, 64), 4, True)
    recipe = grouped(GatheredGroup("tail", "embedding", (TABLE, HEAD)))
    for more, fails in (((), False), ((router,), True)):
        walk = replace(recipe.walk, parameters=(*recipe.walk.parameters, *more))
        found = gathered_otherwise(JOB, replace(recipe, walk=walk))
        assert any(one.code == "run_would_fail" and "gate stays in float32" in one.sentence for one in found) is fails
    assert gathered_otherwise(AUTOCAST, replace(recipe, walk=walk)) == ()
