"""Every key of every dialect is read, told of or refused: keys are added, misspelt and given values that nobody knows, one
by one, in each recorded configuration and in each file that stands beside one.

A key counts as told of where a sentence names it (or, of a section, something in it), or where it or the section that it is
in is listed among those that are known not to matter to memory (`Translation.ignored`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from peakcast.core.errors import PeakcastError
from peakcast.dialects.common.pasted import Document, Pasted, mapping_of_file
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import DIALECTS, dialect_of
from peakcast.dialects.translate import ReadOptions, translated

RECORDED = Path(__file__).parent / "recorded"
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
         "intermediate_size": 128, "hidden_act": "silu"}  # fmt: skip
TRAINER = {"output_dir": "o", "per_device_train_batch_size": 1, "learning_rate": 1e-4, "num_train_epochs": 1}
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "gpt2"}
JOB = {"architecture": "gpt2", "sequence_length": 64, "optimizer": {"name": "sgd"}, "allocator": {"max_split_size_mb": 64}}
UNKNOWN, STRANGE = "no_such_key", "no_such_value"
MODELS = ("base_model", "pretrain", "partial_pretrain")
"""Keys that name the network, which another given beside the configuration takes the place of."""
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Example:
    """A configuration of which one mapping is changed: that of `main`, or that of the file `part` beside it."""

    main: Pasted
    beside: ReadOptions
    part: str = ""

    @property
    def values(self) -> Any:
        if not self.part:
            return plain(self.main.values)
        (document,) = (file for file in self.beside.files if isinstance(file, Document) and file.name == self.part)
        return json.loads(document.text)

    def read(self, values: Any) -> Translation | PeakcastError:
        """What it gives with `values` in the place of its own."""
        main, beside = replace(self.main, used=set()), self.beside
        if self.part:
            others = [file for file in beside.files if not (isinstance(file, Document) and file.name == self.part)]
            beside = replace(beside, files=(*others, Document(self.part, json.dumps(values))))
        else:
            main = replace(main, values=values)
        try:
            return translated(main, beside)
        except PeakcastError as error:
            return error


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def examples() -> dict[str, Example]:
    found = {}
    for file in sorted(RECORDED.glob("*/expected.yaml")):
        for name, expected in yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader).items():
            given = dict(expected.get("beside", {}))
            files = tuple(
                Document(Path(each).name, json.dumps(plain(mapping_of_file(RECORDED / each))))
                for each in given.pop("files", ())
            )
            main, beside = opened(file.parent / name), ReadOptions(files=files, **given)
            found[f"{file.parent.name}/{name}"] = Example(main, beside)
            found |= {f"{file.parent.name}/{name} + {each.name}": Example(main, beside, each.name) for each in files}
    zero = Document("zero.json", (RECORDED / "llamafactory/ds_z3_config.json").read_text(encoding="utf-8"))
    offload = Document("fsdp.yaml", json.dumps(mapping_of_file(RECORDED / "accelerate/fsdp_offload.yaml")))
    wrapped = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_version": 2}
    sharded = Document("trainer-fsdp.json", json.dumps(wrapped))
    adapter, network = Document("adapter.json", json.dumps(LORA)), Document("config.json", json.dumps(LLAMA))
    for part, more in (
        (zero, {"bf16": True}),
        (offload, {}),
        (adapter, {}),
        (network, {}),
        (sharded, {"fsdp": "full_shard", "fsdp_config": sharded.name}),
    ):
        named = {} if part is network else {"model_name_or_path": "gpt2"}
        main = Pasted(values={**TRAINER, **named, **more}, where="trainer.yaml")
        found[f"trainer + {part.name}"] = Example(main, ReadOptions(files=(part,), num_gpus=2), part.name)
    found["job"] = Example(Pasted(values=JOB, where="job.yaml"), ReadOptions())
    return found


EXAMPLES = examples()


def mappings(values: Any, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every mapping in `values`, and where it is."""
    if isinstance(values, dict):
        yield place, values
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from mappings(value, (*place, key))


def changed(values: Any, place: Place, key: str, value: Any, instead_of: str | None = None) -> Any:
    """A copy of `values` whose mapping at `place` has `value` at `key`, in the place of the key `instead_of`."""
    found = inner = copy.deepcopy(values)
    for step in place:
        inner = inner[step]
    inner.pop(instead_of, None)
    inner[key] = value
    return found


def folded(name: object) -> str:
    """Megatron's names for comparison: its flags have dashes, and its YAML any case."""
    return str(name).replace("-", "_").lower()


def is_told(read: Translation, place: Place) -> bool:
    """Whether a sentence names the key at `place`, or it or its section is listed as ignored. Dialects spell a key with or
    without the sections that it is in."""
    parts = [folded(part) for part in place]
    inside = {".".join(parts[start:end]) for end in range(1, len(parts) + 1) for start in range(end)}
    named = {folded(name) for name in (*read.ignored, *(finding.parameter for finding in read.findings))}
    if inside & named or any(name.startswith(f"{'.'.join(parts)}.") for name in named):
        return True
    return any(re.search(rf"\b{re.escape(parts[-1])}\b", folded(said)) for said in read.assumptions)


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


def test_a_key_that_nobody_knows_is_told_of_wherever_it_stands(example: Example) -> None:
    values = example.values
    silent = []
    for place, _ in mappings(values):
        read = example.read(changed(values, place, UNKNOWN, 7))
        if not isinstance(read, PeakcastError) and not is_told(read, (*place, UNKNOWN)):
            silent.append(".".join(map(str, place)) or "the top")
    assert silent == []


def test_a_misspelt_key_is_told_of(example: Example) -> None:
    values = example.values
    silent = []
    for place, mapping in mappings(values):
        for key, value in mapping.items():
            misspelt = f"{key}_x"
            read = example.read(changed(values, place, misspelt, value, instead_of=key))
            given = value is not None
            if given and not isinstance(read, PeakcastError) and not is_told(read, (*place, misspelt)):
                silent.append(".".join(map(str, (*place, misspelt))))
    assert silent == []


def test_a_value_that_nobody_knows_changes_the_answer_or_is_told_of(example: Example) -> None:
    values = example.values
    before = example.read(values)
    assert isinstance(before, Translation)
    silent = []
    for place, mapping in mappings(values):
        for key, value in mapping.items():
            if isinstance(value, dict) or (key.rpartition(".")[2] in MODELS and example.beside.model):
                continue
            read = example.read(changed(values, place, key, STRANGE))
            if isinstance(read, PeakcastError) or is_told(read, (*place, key)):
                continue
            if (read.job, read.assumptions, read.findings) == (before.job, before.assumptions, before.findings):
                silent.append(".".join(map(str, (*place, key))))
    assert silent == []


def test_every_dialect_is_among_the_examples() -> None:
    there = {dialect_of(example.values) for example in EXAMPLES.values()}
    assert set(DIALECTS) - there == {"trl", "transformers", "nemo_2"}  # told by a flag, or read from a package
