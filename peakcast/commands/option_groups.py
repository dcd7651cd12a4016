"""Options of a command that belong together, declared once as a value that the command receives.

A group is a dataclass that inherits from `OptionGroup`; each field declares an option. A command that is decorated with
`takes_groups` has parameters of such types. On the command line, every one of them becomes the options of its fields.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The type that groups inherit from."""


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of `command` whose type is an `OptionGroup` by the options of that group."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: one.annotation for name, one in own.items() if _is_group(one.annotation)}

    @functools.wraps(command)
    def grouping(*given: Any, **options: Any) -> None:
        values = {name: kind(**{one.name: options.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(*given, **options, **values)

    parameters = [each for name, one in own.items() for each in (_options(groups[name]) if name in groups else [one])]
    grouping.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    grouping.__annotations__ = {}  # typer reads the signature; the command's own annotations name the groups
    return grouping


def _is_group(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, OptionGroup)


def _options(group: type[OptionGroup]) -> list[inspect.Parameter]:
    """The parameters that declare the options of `group`."""
    kinds = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in fields(group)
    ]
