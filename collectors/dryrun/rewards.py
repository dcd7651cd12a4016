"""Rewards that a script computes of generated texts: made-up tokens make no text that it could read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.machine.imports import when_imported

TRAINERS = {"trl.trainer.grpo_trainer": "GRPOTrainer", "trl.trainer.rloo_trainer": "RLOOTrainer"}
"""Module of a trainer that takes functions as rewards -> its class."""


def install(notes: RunFindings) -> None:
    """Let a reward that fails be 0, and note it."""
    for module, name in TRAINERS.items():
        when_imported(module, functools.partial(_in_trainer, notes, name))


def _in_trainer(notes: RunFindings, name: str, module: Any) -> None:
    trainer = getattr(module, name)
    begin = trainer.__init__
    signature = inspect.signature(begin)

    @functools.wraps(begin)
    def begun(*arguments: Any, **keywords: Any) -> None:
        given = signature.bind(*arguments, **keywords)
        rewards = given.arguments.get("reward_funcs")
        if isinstance(rewards, (list, tuple)):
            given.arguments["reward_funcs"] = [or_nothing(one, notes) for one in rewards]
        elif rewards is not None:
            given.arguments["reward_funcs"] = or_nothing(rewards, notes)
        begin(*given.args, **given.kwargs)

    trainer.__init__ = begun


def or_nothing(reward: Any, notes: RunFindings) -> Any:
    """`reward`, which is 0 for each text if it is a function that raises an error; networks and their names as they are."""
    if not inspect.isroutine(reward) or inspect.iscoroutinefunction(reward):
        return reward
    compute: Callable[..., Any] = reward

    @functools.wraps(compute)
    def computed(*arguments: Any, **keywords: Any) -> Any:
        try:
            return compute(*arguments, **keywords)
        except Exception as error:
            why = type(error).__name__
            said = f"the reward {compute.__name__} cannot be computed of made-up texts ({why}); 0 was taken."
            notes.add("value_assumed", "reward_funcs", said)
            texts = keywords.get("completions") or next((one for one in arguments if isinstance(one, list)), [])
            return [0.0] * len(texts)

    return computed
