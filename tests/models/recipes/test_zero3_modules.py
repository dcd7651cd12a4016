"""What ZeRO-3 fetches and releases follows from the modules that were entered and left."""

from __future__ import annotations

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero3_hooks import BlockOperations, PassDirection, TurnPart
from peakcast.models.ledger.recorded.zero3_modules import RecordedModules, recorded_turns
from peakcast.models.recipes.depth import Run, deepened, repeats
from peakcast.models.recipes.walk import Visit
from tests.models.recipes.walks import walk

WEIGHTS = {("layers.0", name): StoredTensor(name, "layers.0", (4, 4), 2, 2, True) for name in ("outer.w", "inner.w")}
OUTER, INNER = ((("", name),) for name in ("outer.w", "inner.w"))


def test_a_module_around_others_keeps_its_own_weights_until_it_is_left() -> None:
    visits = (
        Visit("forward", True, "outer", 0, OUTER),
        Visit("forward", True, "inner", 1, INNER),
        Visit("forward", False, "inner", 3, INNER),
        Visit("forward", False, "outer", 5, OUTER),
    )
    begins, inner, ends = recorded_turns("layers.0", visits, WEIGHTS)
    assert (begins.begins, begins.part) == (0, TurnPart.BEGINS)
    assert (inner.begins, inner.ends, inner.part) == (1, 3, TurnPart.WHOLE)
    assert inner.tensors == (WEIGHTS["layers.0", "inner.w"],)
    assert (ends.ends, ends.part, ends.tensors) == (5, TurnPart.ENDS, begins.tensors)


def test_a_module_that_is_never_left_releases_nothing() -> None:
    (turn,) = recorded_turns("layers.0", (Visit("backward", True, "inner", 2, INNER),), WEIGHTS)
    assert not turn.releases


def test_what_a_checkpoint_runs_again_is_a_turn_of_its_own() -> None:
    visits = (
        Visit("backward", True, "inner", 0, INNER),
        Visit("again", True, "inner", 0, INNER),
        Visit("backward", False, "inner", 4, INNER),
    )
    asks, again, goes_on = recorded_turns("layers.0", visits, WEIGHTS)
    assert asks.part is TurnPart.BEGINS
    assert again.direction is PassDirection.RECOMPUTATION
    assert again.part is TurnPart.UNRELEASED  # the checkpoint stopped inside it
    assert goes_on.part is TurnPart.ENDS


def test_layers_of_a_deep_network_have_turns_with_weights_of_their_own() -> None:
    short = walk(4)
    deep = deepened(short, repeats(short, (Run(1, 1),)), (5,))
    names = [f"layers.{place // 2}" if place % 2 else f"between.{place}" for place in range(deep.num_places)]
    tensors = [StoredTensor("w", f"layers.{layer}", (16, 32), 2, 2, True) for layer in range(9)]
    modules = RecordedModules(short, deep, names, tensors)
    for layer in (0, 3, 8):
        (turn,) = modules.turns(BlockOperations(f"layers.{layer}", [], 100, PassDirection.BACKWARD))
        assert turn.tensors == (tensors[layer],)
        assert turn.begins == 100
        assert modules.turns(BlockOperations(f"layers.{layer}", [], 0))[0].name == turn.name
