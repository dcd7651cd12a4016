"""Files that a script checks for before it reads them, and raises an error without: those for which something stands in
where they are read are taken to be there."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun.checks import expected
from peakcast.collectors.dryrun.noted import DIRECTLY, asker


def install(stands_in: Callable[[Any], bool]) -> None:
    """Change this process's functions that tell whether a file is there. `stands_in` is asked about a path that the script
    itself needs: whether something stands in for it, which it makes if it must be a file."""

    def checking(function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def checked(path: Any, *arguments: Any, **keywords: Any) -> bool:
            found = function(path, *arguments, **keywords)
            if found or not isinstance(path, (str, os.PathLike)) or asker(DIRECTLY) is None:
                return found
            return bool(expected(sys._getframe(1))) and stands_in(path)

        return checked

    for place, names in ((os.path, ("exists", "isfile")), (Path, ("exists", "is_file"))):
        for name in names:
            setattr(place, name, checking(getattr(place, name)))
