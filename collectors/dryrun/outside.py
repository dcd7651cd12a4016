"""Suppresses what a script does besides training: saving, logging, and loading data in further processes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import RunFindings, where
from peakcast.collectors.machine.imports import when_imported

LOGGERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "TRACKIO_DISABLED": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ACCELERATE_DISABLE_RICH": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that switch loggers off."""


PUSHES = (
    *("create_branch", "create_tag", "create_commit", "create_pull_request", "upload_file", "upload_folder"),
    *("upload_large_folder", "delete_file", "delete_files", "delete_folder", "delete_branch", "delete_tag", "delete_repo"),
)
"""Functions of `huggingface_hub` that change a repository."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_SET: set[str] = set()
"""Variables of `OFFLINE` that the user had not set."""


@contextlib.contextmanager
def hub_as_the_user_has_it() -> Iterator[None]:
    """A context in which the hub may be accessed, unless the user's environment forbids it."""
    for name in _SET:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(dict.fromkeys(_SET, "1"))


def set_environment(folder: Path) -> None:
    """Switch loggers off; those that must write do so in `folder`."""
    os.environ.update(LOGGERS)
    for name in OFFLINE:  # else libraries would look up each name again and again
        if name not in os.environ:
            os.environ[name] = "1"
            _SET.add(name)
            if "huggingface_hub.constants" in sys.modules:  # it has been read already
                sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ["TMPDIR"] = str(folder)
    _set_datasets_cache(folder / "datasets")


def _set_datasets_cache(folder: Path) -> None:
    """Prepared tables are read from the user's cache; new ones, which pyarrow writes, go to `folder`."""
    if folder.is_dir():  # made by the script that started this one
        return
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    for place, _, files in os.walk(cache):  # folders of its own, for the locks beside the tables
        mirrored = folder / Path(place).relative_to(cache)
        mirrored.mkdir(parents=True)
        for file in files:
            if not file.endswith(".lock"):
                (mirrored / file).symlink_to(Path(place) / file)
    folder.mkdir(exist_ok=True)
    os.environ["HF_DATASETS_CACHE"] = str(folder)


def install(notes: RunFindings) -> None:
    """Install it in this process."""

    skip = functools.partial(_skip, notes)
    torch.save = skip("torch.save")
    _load_in_this_process()
    torch.multiprocessing.spawn = _spawn  # type: ignore[assignment]
    torch.multiprocessing.spawn.__globals__["spawn"] = _spawn
    torch.multiprocessing.start_processes = _spawn

    def in_safetensors(module: Any) -> None:
        module.save_file = module.save_model = skip("safetensors")

    def in_trainer(module: Any) -> None:
        module.Trainer.save_model = skip("Trainer.save_model")
        module.Trainer._save_checkpoint = skip("checkpoint")

    def in_modeling(module: Any) -> None:
        module.PreTrainedModel.save_pretrained = skip("save_pretrained")
        module.PreTrainedModel.push_to_hub = skip("push_to_hub")

    def in_checkpoint(module: Any) -> None:
        module.save = module.async_save = skip("torch.distributed.checkpoint")

    def in_accelerate(module: Any) -> None:
        module.Accelerator.save_state = module.Accelerator.save_model = module.Accelerator.save = skip("accelerator")

    when_imported("safetensors.torch", in_safetensors)
    when_imported("huggingface_hub.hf_api", functools.partial(push_nothing, notes=notes))
    when_imported("transformers.trainer", in_trainer)
    when_imported("transformers.modeling_utils", in_modeling)
    when_imported("torch.distributed.checkpoint", in_checkpoint)
    when_imported("accelerate.accelerator", in_accelerate)
    when_imported("transformers.integrations.integration_utils", _no_reporting)
    when_imported("evaluate", _metrics_in)
    when_imported("transformers.generation.stopping_criteria", _generate_to_the_end)


def _skip(notes: RunFindings, what: str) -> Any:
    """A function that only says that it would save."""

    def skipped(*_: Any, **__: Any) -> None:
        notes.add("script_part_skipped", what, f"{where()} saves ({what}), which a dry run skips.")

    return skipped


def push_nothing(module: Any, notes: RunFindings) -> None:
    """Change no repository of the hub, which `module` (`huggingface_hub.hf_api`) asks: by methods, and by functions that it
    has made of them."""
    pushes = {**dict.fromkeys(PUSHES, _skip(notes, "push_to_hub")), "create_repo": _create_repo}
    for name, function in pushes.items():
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, function)
            setattr(module, name, functools.partial(function, module.api))


class _Repository(str):
    """What the hub answers to who makes a repository there: its name."""

    @property
    def repo_id(self) -> str:
        """The name without the hub's address."""
        return str(self)


def _create_repo(_: Any, repo_id: str, **__: Any) -> _Repository:
    return _Repository(repo_id)


def _generate_to_the_end(module: Any) -> None:
    """Generate each sequence up to its largest number of tokens, because only a real run knows where a sequence ends
    earlier."""
    module.EosTokenCriteria.__call__ = lambda self, input_ids, scores, **_: torch.zeros(
        input_ids.shape[0], dtype=torch.bool, device=input_ids.device
    )


def _metrics_in(module: Any) -> None:
    """Replace a metric that cannot be downloaded by one without results; metrics are programs on the hub."""
    fetch = module.load

    def load(*arguments: Any, **keywords: Any) -> Any:
        try:
            return fetch(*arguments, **keywords)
        except Exception:
            return _Metric()

    module.load = load


class _Metric:
    def add_batch(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def compute(self, *_: Any, **__: Any) -> dict[str, float]:
        """Returns no results."""
        return {"accuracy": 0.0, "f1": 0.0}

    add = add_batch


def _no_reporting(module: Any) -> None:
    module.get_reporting_integration_callbacks = lambda *_, **__: []


def _load_in_this_process() -> None:
    """Make data loaders use no workers: each would be a process, whose batches could not become fake tensors here."""
    loader: Any = torch.utils.data.DataLoader
    begin = loader.__init__

    @functools.wraps(begin)  # Lightning makes loaders anew, with the arguments that the signature names
    def begin_alone(self: Any, *arguments: Any, **keywords: Any) -> None:
        arguments = (*arguments[:5], 0, *arguments[6:]) if len(arguments) > 5 else arguments
        keywords = {name: value for name, value in keywords.items() if name not in _OF_WORKERS}
        begin(self, *arguments, **keywords)

    loader.__init__ = begin_alone


_OF_WORKERS = frozenset(
    ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory_device")
)


def _spawn(function: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **_: Any) -> None:
    """`torch.multiprocessing.spawn`: runs the function of this rank in this process."""
    function(int(os.environ.get("PEAKCAST_DRYRUN_RANK", "0")) % max(1, nprocs), *args)
