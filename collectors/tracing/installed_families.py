"""The families of networks that the installed transformers can train, and its defaults for their configurations.

`python -P -m peakcast.collectors.tracing.installed_families` prints them as JSON, with the releases of the libraries.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)
"""Mappings of `transformers.models.auto.modeling_auto`: family -> class that trains it."""

SHARED = (
    "configuration_utils.py", "modeling_utils.py", "modeling_rope_utils.py", "masking_utils.py",
    "modeling_attn_mask_utils.py", "modeling_flash_attention_utils.py", "activations.py", "pytorch_utils.py",
    "cache_utils.py", "loss/*.py", "integrations/sdpa_attention.py", "integrations/flash_attention.py",
    "integrations/moe.py",
)  # fmt: skip
"""Files of transformers whose code runs for networks of every family."""
READ = re.compile(r'config\w*\.(\w+)|attr\(\s*[\w.]*config\w*,\s*"(\w+)"|kwargs\.\w+\(\s*"(\w+)"')
"""How code reads a value of a configuration."""
SAID = re.compile(r'self\.(\w+)|"(\w+)"')
"""How a configuration's own class does."""


def read_of(config: Mapping[str, Any]) -> list[str]:
    """Names under which the library's code may read values of `config`, rather more than it does; a value under another
    name changes no network. Empty if transformers has no such class."""
    import transformers

    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return []
    read_by = transformers.CONFIG_MAPPING[config["model_type"]]
    library, own = Path(transformers.__file__).parent, Path(inspect.getfile(read_by)).parent
    code = _text_of([*own.glob("modeling_*.py"), *(file for pattern in SHARED for file in library.glob(pattern))])
    by_itself = _text_of(own.glob("configuration_*.py"))
    found = {*inspect.signature(read_by.__init__).parameters} & {*re.findall(r"\w+", code)}
    for way, text in ((READ, code), (READ, by_itself), (SAID, by_itself)):
        found |= {name for groups in way.finditer(text) for name in groups.groups() if name}
    return sorted(found)


def _text_of(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def defaults_of(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The defaults in the signature of the class that reads `config`, and of classes that read its parts, by flat names.
    None if transformers has no such class."""
    import transformers

    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return
    read_by = transformers.CONFIG_MAPPING[config["model_type"]]
    parts = getattr(read_by, "sub_configs", None) or {}
    for name, parameter in inspect.signature(read_by.__init__).parameters.items():
        plain = isinstance(parameter.default, (bool, int, float, str, type(None)))
        if plain and parameter.default is not parameter.empty and name not in parts:
            yield prefix + name, parameter.default
    for name, part in parts.items():
        own = config.get(name) or {}
        model_type = own.get("model_type", getattr(part, "model_type", None))
        if model_type in transformers.CONFIG_MAPPING:
            yield from defaults_of({**own, "model_type": model_type}, f"{prefix}{name}.")


def families() -> dict[str, dict[str, Any]]:
    """Family -> a configuration with all defaults, for families whose class has no parts that other classes read."""
    import transformers
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, Any]] = {}
    for model_type in dict.fromkeys(name for mapping in MAPPINGS for name in getattr(modeling_auto, mapping, ())):
        if model_type in transformers.CONFIG_MAPPING:
            values = dict(defaults_of({"model_type": model_type}))
            if not any("." in name for name in values):
                values |= _computed(transformers.CONFIG_MAPPING[model_type], values)
                said = {name: value for name, value in values.items() if value is not None}
                found[model_type] = {"model_type": model_type, **said}
    return found


def _computed(read_by: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the class itself sets if its signature says None: numbers, and lists of the layers' kinds."""
    try:
        made = read_by()
    except Exception:  # some classes refuse their own defaults
        return {}
    found = {}
    for name in (name for name, value in values.items() if value is None):
        value = getattr(made, name, None)
        plain = isinstance(value, int) and not isinstance(value, bool)
        if plain or (isinstance(value, list) and all(isinstance(one, (str, int)) for one in value)):
            found[name] = value
    return found


if __name__ == "__main__":
    from peakcast.collectors.machine.probes import versions

    json.dump({"families": families(), "versions": versions()}, sys.stdout)
