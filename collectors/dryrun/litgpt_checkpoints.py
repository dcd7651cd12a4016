"""Checkpoints of litgpt that are not here: its commands want a folder of them, or download and convert one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.machine.imports import when_imported

TOKENS = ("<unk>", "<s>", "</s>", "word")


def install(notes: RunFindings, folder: Path) -> None:
    """Let a folder in `folder` stand in for a checkpoint that is not here, and note it."""
    when_imported("litgpt.utils", functools.partial(_in_utils, notes, folder))


def _in_utils(notes: RunFindings, folder: Path, module: Any) -> None:
    find, load = module.auto_download_checkpoint, module.load_checkpoint

    @functools.wraps(find)
    def found(model_name: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return find(model_name, *arguments, **keywords)
        except Exception:  # of the hub, or FileNotFoundError
            made = _checkpoint(Path(model_name).name, folder)
            if made is None:
                raise
        sentence = f"the checkpoint {model_name} is not here: the shapes of litgpt's configuration of that name were taken."
        notes.add("script_part_skipped", "command", sentence)
        return made

    @functools.wraps(load)
    def loaded(fabric: Any, model: Any, checkpoint_path: Any, *arguments: Any, **keywords: Any) -> Any:
        if Path(checkpoint_path).parent.parent != folder:
            return load(fabric, model, checkpoint_path, *arguments, **keywords)
        return None

    module.auto_download_checkpoint, module.load_checkpoint = found, loaded


def _checkpoint(name: str, folder: Path) -> Path | None:
    """A folder of the files that litgpt looks for, without weights; None if it has no configuration of this name."""
    from litgpt.config import Config
    from litgpt.utils import save_config

    try:
        config = Config.from_name(name)
    except ValueError:
        return None
    made = folder / name
    made.mkdir(exist_ok=True)
    (made / "lit_model.pth").touch()
    save_config(config, made)
    _write_tokenizer(made, config.vocab_size)
    return made


def _write_tokenizer(made: Path, size: int) -> None:
    """A tokenizer of `size` words in a file, each of which is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = (*TOKENS, *(f"word{number}" for number in range(len(TOKENS), size)))
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, TOKENS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (made / "tokenizer.json").write_text(words.to_str(), encoding="utf-8")
    named = {"bos_token": TOKENS[1], "eos_token": TOKENS[2], "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
