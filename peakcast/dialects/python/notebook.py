"""The code of Jupyter notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def notebook_source(values: Mapping[str, Any]) -> str:
    """The code of a Jupyter notebook's cells."""
    cells = values["cells"] if isinstance(values["cells"], list) else []
    codes = [cell.get("source", "") for cell in cells if isinstance(cell, Mapping) and cell.get("cell_type") == "code"]
    return "\n".join("".join(code) if isinstance(code, list) else str(code) for code in codes)
