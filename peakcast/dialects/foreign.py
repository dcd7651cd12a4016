"""Projects whose configurations are not read here: how they are recognised, and what the user can give instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

JOB = "give the model and the step as a job: --model, --micro-batch-size, --sequence-length, --sharding and the like"
TRACE = "give the step itself: peakcast explain --trace --module FILE.py:FUNCTION runs it on fake tensors"
XLA = "give it to MaxText's own train_compile, which prints what XLA plans: peakcast counts PyTorch's allocator"
SECTIONS = (
    "give its values as a TOML, YAML or JSON mapping with the sections model, training, parallelism, ..., as torchtitan's "
    "train_configs/*.toml have them"
)
FLAGS = "give model, layout and batch as Megatron-LM flags (peakcast megatron --num-layers ...), named as its fields are"


class Foreign(NamedTuple):
    """How the configuration of such a project is recognised."""

    title: str
    way_out: str
    signs: tuple[str, ...] = ()
    """Sets of keys, as for a dialect."""
    words: tuple[str, ...] = ()
    """Prefixes of its `_target_`, `recipe`, program or imports."""
    programs: str = ""
    """A regular expression for the file names of its scripts."""


FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "a Megatron-Bridge configuration",
        FLAGS,
        ("ConfigContainer", "model_config train_config|ddp_config", "perf_matrix"),
        ("megatron.bridge",),
    ),
    Foreign("a Megatron-Bridge launcher", FLAGS, (), (), r"run_recipe\.py|setup_experiment\.py"),
    Foreign("a NeMo AutoModel recipe", JOB, ("step_scheduler model",), ("nemo_automodel", "automodel")),
    Foreign("a NeMo 2 recipe", FLAGS, (), ("nemo.", "nemo_run", "nemo llm", "nemo vlm")),
    Foreign("a GPT-NeoX configuration", FLAGS, ("pipe_parallel_size|pipe-parallel-size",), (), r"deepy\.py"),
    Foreign(
        "an LLM Foundry configuration",
        JOB,
        ("global_train_batch_size device_train_microbatch_size|max_seq_len",),
        ("composer",),
    ),
    Foreign("a verl configuration", JOB, ("actor_rollout_ref", "model.partial_pretrain", "data.train_files"), ("verl.",)),
    Foreign("an OpenRLHF command", JOB, ("pretrain micro_train_batch_size",), ("openrlhf",)),
    Foreign("an ms-swift command for Megatron", FLAGS, (), ("megatron sft", "megatron pt", "megatron rlhf")),
    Foreign("an ms-swift command", JOB, ("train_type model", "tuner_type model"), ("swift",)),
    Foreign(
        "a nanochat run",
        JOB,
        (
            "model_config.n_kv_head model_config.sequence_len",
            "depth device_batch_size|target_param_data_ratio|aspect_ratio",
        ),
        ("nanochat", "scripts.base_train", "scripts.mid_train", "scripts.chat_sft", "scripts.chat_rl"),
    ),
    Foreign(
        "a MaxText configuration",
        XLA,
        ("per_device_batch_size max_target_length", "base_emb_dim base_num_decoder_layers", "ici_fsdp_parallelism"),
        ("MaxText", "maxtext"),
    ),
    Foreign(
        "a diffusers script, which trains an image model",
        TRACE,
        ("pretrained_model_name_or_path resolution|instance_prompt|unet_lr|network_dim",),
        ("diffusers",),
        r"train_(text_to_image|dreambooth|controlnet|instruct_pix2pix|unconditional)\w*\.py"
        r"|sdxl_train\w*\.py",
    ),
)


_PROGRAM = re.compile(
    r"^[ \t]*(?:python[\d.]*[ \t]+-m[ \t]+)?"
    r"((?:openrlhf|verl|swift|nemo_run|nemo_automodel|automodel|composer|MaxText)[.\w]*|(?:megatron|nemo) \w+)",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][\w.]*)", re.MULTILINE)


def foreign_program(text: str) -> str:
    """The sentence of `foreign` about a program that a script's `text` runs at the beginning of a line."""
    return next(filter(None, (foreign((), {}, name) for name in _PROGRAM.findall(text))), "")


def foreign_python(text: str) -> str:
    """The sentence of `foreign` about a Python program with this `text`, recognised by its imports."""
    return next(filter(None, (foreign((), {}, name) for name in _IMPORT.findall(text))), "")


def foreign_launch(program: str, files: Iterable[str]) -> str:
    """What `foreign` says of a launch command's `program`, or of its configuration `files`; "" for all that is read."""
    registered = [file for file in files if "." not in file.rsplit("/", 1)[-1]]
    if program.startswith("torchtitan") and registered:
        return f"is a torchtitan command for {registered[0]!r}, a Python function of its config registry; {SECTIONS}."
    return foreign((), {}, program)


def foreign(keys: Iterable[str], values: Mapping[str, Any], program: str) -> str:
    """The sentence that names the project to which a mapping's `keys` and `values`, or the `program`, belong; "" if it is
    not known."""
    known = set(keys)
    places = [place for place in (values, values.get("model")) if isinstance(place, Mapping)]
    named = [program, *(str(place.get(key, "")) for place in places for key in ("_target_", "recipe"))]
    for each in FOREIGN:
        calls = bool(each.words) and any(name.startswith(each.words) for name in named)
        calls |= bool(each.programs) and re.fullmatch(each.programs, program.rsplit("/", 1)[-1]) is not None
        looks = any(all(known.intersection(word.split("|")) for word in sign.split()) for sign in each.signs)
        if calls or looks:
            return f"is {each.title}, which is not read here; {each.way_out}."
    return ""
