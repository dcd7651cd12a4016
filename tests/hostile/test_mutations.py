"""20,000 unlikely and damaged questions of every kind, by fixed seeds: each ends in an answer or a sentence, and soon.

The first forty of each kind run with the other tests; all of them: `python -P -m pytest tests/hostile -m attacks`.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from peakcast import catalog
from peakcast.collectors.measure.grid import expand
from peakcast.commands import cli
from peakcast.core.errors import PeakcastError
from peakcast.core.fields import flat
from peakcast.dialects.common.pasted import nested
from peakcast.dialects.opening import opened
from peakcast.doors.answering import answer
from peakcast.doors.batching import predict_batch
from peakcast.doors.questions import question, translation_of
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.networks.reverse import hf_config_of

RECORDED = Path(__file__).parents[1] / "dialects" / "recorded"
FIRST = 40
"""Questions of each kind that every run of the tests asks."""
BLOCK = 100
"""Questions of one test of the attacks."""
LONGEST_SECONDS = 20.0
"""Of this process, for one question: how long it takes says how busy the machine is."""
JUNK = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**6, 2**31, 10**18, 10**30, -(10**30), 10**99, 0.0, -0.0, 0.5, 1.5, 1e-300,
    1e308, float("inf"), float("-inf"), float("nan"), "", " ", "auto", "none", "null", "true", "x", "1e9", "-1", "0", "٣",
    "9" * 99, "x" * 400, "a/b", "../..", "/dev/zero", "~", "é" * 9, "\x00", "\ud800", "{}", "--", "$(x)", "${x:-${y}}",
    [], [None], [0], ["x"], [1, 2, 3], [[[]]], {}, {"a": 1}, {"x": {"y": []}}, {"": ""}, ["x"] * 300,
)  # fmt: skip
BITS = "\"'$(){}[]\\`#;&|<>*?!=:,.- \n\t\r-a0~%@^/\x00\x1b\ufeff\u2028é"


@cache
def whole_job() -> dict[str, Any]:
    """Every field of a job by its path, at its default."""
    return flat(job_to_mapping(TrainingJob(architecture=catalog.architecture("gpt2"))))


@cache
def choices(kind: type = TrainingJob, within: str = "") -> dict[str, tuple[Any, ...]]:
    """Every field of a job by its path, with values that its type has."""
    found: dict[str, tuple[Any, ...]] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]) and field.name != "architecture":
            found |= choices(hints[field.name], f"{within}{field.name}.")
        elif values := values_of(hints[field.name]):
            found[within + field.name] = values
    return found


def values_of(hint: Any) -> tuple[Any, ...]:
    """Values of a type, none where it has no small ones."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for part in get_args(hint) for value in values_of(part))
    if get_origin(hint) is tuple:
        return ([], ["q_proj"], ["mlp"]) if str in get_args(hint) else ([], [1], [1, 1], [5, 7], [1, 2, 3, 6])
    plain: dict[Any, tuple[Any, ...]] = {
        NoneType: (None,), bool: (True, False), int: (1, 2, 3, 4, 7, 8, 16, 64, 1000), float: (0.0, 0.1, 0.9, 3.0),
    }  # fmt: skip
    return plain.get(hint, ())


@cache
def switches(framework: str) -> dict[str, Any]:
    """The conventions that hold in a framework."""
    network = catalog.architecture("llama-3.2-1b")
    return dict(conventions(TrainingJob(architecture=network, framework=framework)))  # type: ignore[arg-type]


@cache
def configurations() -> tuple[dict[str, Any], ...]:
    """A config.json of every family that the catalog has one of, cut to two layers where that is possible."""
    found = {}
    for name in catalog.architecture_names():
        architecture = catalog.architecture(name)
        with contextlib.suppress(PeakcastError):
            found.setdefault(architecture.model_type, hf_config_of(architecture))
    return tuple(found.values())


@cache
def files() -> tuple[tuple[Path, str], ...]:
    """Recorded configurations and scripts of real projects, and their texts."""
    paths = (path for path in sorted(RECORDED.rglob("*")) if path.is_file())
    return tuple((path, path.read_text()) for path in paths if path.name not in ("README.md", "expected.yaml"))


def alike(value: Any, draw: random.Random) -> Any:
    """Another value of the same kind, which may well be taken."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return draw.choice((0, 1, 2, 3, 5, 8, 64, 1000, value * 2, value + 1, value - 1, -value, value / 2))
    if isinstance(value, list):
        return draw.choice((value[:1], value * 2, value[::-1], [*value, 1], []))
    words = ("full", "lora", "float32", "float8", "masked", "eager", "fsdp1", "hsdp", "gpipe", "dpo", "selective", "nf4")
    return draw.choice((*words, "inference", "megatron", "deepspeed", "adafactor", "block", 2, True, None))


def damaged(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A mapping with one to three of its values, wherever they are, replaced, left out, or put under another key."""
    leaves = flat(values)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(sorted(leaves)) if leaves else "x"
        what = draw.random()
        if what < 0.25:
            leaves[key] = draw.choice(JUNK)
        elif what < 0.75:
            leaves[key] = alike(leaves.get(key), draw)
        elif what < 0.85:
            leaves.pop(key, None)
        elif what < 0.95:
            leaves[key[: draw.randint(0, len(key))] + draw.choice(BITS)] = leaves.get(key)
        else:
            leaves[key.split(".")[0]] = draw.choice(JUNK)
    try:
        return nested(leaves)
    except PeakcastError:
        return leaves


def torn(text: str, draw: random.Random) -> str:
    """A text with one to four pieces cut out, doubled, or replaced by characters that mean something to some parser."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(text))
        piece = text[start : start + draw.choice((0, 1, 3, 20, 200))]
        bits = "".join(draw.choices(BITS, k=draw.randint(0, 5)))
        change = draw.choice((bits, piece * draw.randint(2, 40), str(draw.choice(JUNK))))
        text = text[:start] + change + text[start + len(piece) :]
    return text


# -- what is asked --------------------------------------------------------------------------------------------------------


def line(question: dict[str, Any]) -> None:
    """One line of a batch, which must be answered in strict JSON."""
    for answered in predict_batch([json.dumps(question).encode(errors="surrogatepass")]):
        said = json.dumps(answered, allow_nan=False)
        assert "this is a bug" not in said, said[-400:]


def gpu(draw: random.Random) -> str:
    return draw.choice(("H100-80GB", "A100-40GB", "B200"))


def text(pasted: str) -> None:
    """A configuration or script of another project, by its text, as the page and the command line read it."""
    with contextlib.suppress(PeakcastError):
        answer(question(translation_of(pasted + "\n"), "H100-80GB"))


NETWORKS = (
    "gpt2", "llama-3.2-1b", "bert-base-uncased", "jamba-v0.1", "mixtral-8x7b", "t5-small", "deepseek-v3", "mamba-130m",
    "gemma-2-2b", "gpt-oss-20b",
)  # fmt: skip


def an_unlikely_job(draw: random.Random) -> None:
    """One to six settings that each may be, side by side."""
    known = choices()
    framework = draw.choice(known["framework"])
    values = {path: draw.choice(known[path]) for path in draw.sample(sorted(known), draw.randint(1, 6))}
    options = switches(framework)
    for name in draw.sample(sorted(options), draw.choice((0, 0, 1, 2))):
        values[f"framework_options.{name}"] = alike(options[name], draw)
    if draw.random() < 0.2:
        values["finetuning.rank"], values["finetuning.method"] = 8, draw.choice(known["finetuning.method"])
    values |= {"architecture": draw.choice(NETWORKS), "framework": framework}
    line({"gpu": gpu(draw), "rank": draw.choice(("worst", "last", 0)), "job": nested(values)})


def a_job(draw: random.Random) -> None:
    leaves = whole_job()
    own = draw.random() < 0.3
    values = {key: value for key, value in leaves.items() if own or not key.startswith("architecture.")}
    if not own:
        values["architecture"] = draw.choice(("gpt2", "llama-3.2-1b", "bert-base-uncased", "jamba-v0.1", "mixtral-8x7b"))
    if draw.random() < 0.3:
        values |= {f"framework_options.{name}": draw.choice(JUNK) for name in draw.sample(OPTIONS, 2)}
    if draw.random() < 0.3:
        values |= {f"versions.{name}": draw.choice(JUNK) for name in draw.sample(PACKAGES, 2)}
    line({"gpu": gpu(draw), "job": damaged(nested(values), draw)})


OPTIONS = (
    "autocast", "fsdp1_backward_prefetch", "fsdp2_units", "outputs_dropped", "compiles_loss", "liger_kernels", "loop", "x",
    "fused_kernels", "experts_implementation", "overlap_comm", "allgather_bucket_size", "reduce_bucket_size",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "deepspeed", "megatron", "ngc_pytorch", "torchtitan", "litgpt", "torchtune", "x")


def a_network(draw: random.Random) -> None:
    config = draw.choice(configurations())
    line({"gpu": gpu(draw), "job": {"architecture": damaged(config, draw), "sequence_length": 128}})


def objects(draw: random.Random) -> None:
    """Hugging Face's objects."""
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": True, "optim": "adamw_torch"}
    peft = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16}
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    fsdp = {"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False}
    parts = {"training_arguments": arguments, "peft": peft, "versions": {"torch": "2.9.0"}}
    parts |= draw.choice(({"deepspeed": zero}, {"fsdp": fsdp}, {}))
    asked = {name: part for name, part in parts.items() if draw.random() < 0.7}
    config = draw.choice(("llama-3.2-1b", "mixtral-8x7b", "gemma-2-2b", draw.choice(configurations())))
    line({"gpu": gpu(draw), "huggingface": damaged({"config": config, "num_gpus": 2, **asked}, draw)})


MEGATRON = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 512, "micro_batch_size": 2, "bf16": True,
    "max_position_embeddings": 512, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "swiglu": True,
    "sequence_parallel": True, "use_distributed_optimizer": True, "num_experts": 8, "expert_model_parallel_size": 2,
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "global_batch_size": 32,
    "padded_vocab_size": 1024, "group_query_attention": True, "num_query_groups": 4, "moe_router_topk": 2,
    "context_parallel_size": 1, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
RARE_MEGATRON = {
    "num_layers_per_virtual_pipeline_stage": 1, "multi_latent_attention": True, "moe_layer_freq": "([0]*1+[1]*7)",
    "pipeline_model_parallel_layout": "Ett|tt|tt|ttL", "hybrid_override_pattern": "M-*EM-*E", "context_parallel_size": 2,
    "fp8_format": "hybrid", "mtp_num_layers": 1, "cross_entropy_loss_fusion": True, "expert_tensor_parallel_size": 1,
    "moe_shared_expert_intermediate_size": 64, "optimizer_cpu_offload": True, "fp16": True, "spec": "x",
    "use_torch_fsdp2": True, "use_megatron_fsdp": True, "recompute_granularity": "selective", "transformer_impl": "local",
    "decoder_first_pipeline_num_layers": 2, "account_for_embedding_in_pipeline_split": True, "optimizer": "muon",
}  # fmt: skip


def arguments(draw: random.Random) -> None:
    """Megatron-LM's arguments."""
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
    often = 0.9 if draw.random() < 0.5 else 0.4
    flags = {name: value for name, value in MEGATRON.items() if name in needed or draw.random() < often}
    for name in draw.sample(sorted(RARE_MEGATRON), draw.choice((0, 0, 1, 2))):
        flags[name] = RARE_MEGATRON[name]
    num_gpus = draw.choice((8, 16, 64)) if draw.random() < 0.9 else draw.choice((0, 1, 3, None, "x"))
    line({"gpu": gpu(draw), "megatron": {"arguments": damaged(flags, draw), "num_gpus": num_gpus}})


def bytes_of_a_line(draw: random.Random) -> None:
    whole = json.dumps({"id": 1, "gpu": "B200", "rank": "last", "job": {"architecture": "gpt2", "micro_batch_size": 2}})
    answers = list(predict_batch([torn(whole, draw).encode(errors="surrogatepass").replace(b"\n", b" ")]))
    assert "this is a bug" not in json.dumps(answers, allow_nan=False)


def command_line(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli._run(words)
    assert code in (0, 2, 3, 4), (code, words, err.getvalue()[-400:])
    assert (code == 2) == err.getvalue().startswith("peakcast: "), err.getvalue()
    assert err.getvalue().count("\n") == (code == 2), err.getvalue()


def flags(draw: random.Random) -> None:
    """Flags of the command line."""
    known = {
        "--model": "gpt2", "--micro-batch-size": 2, "--sequence-length": 128, "--precision": "float32", "--method": "lora",
        "--lora-rank": 8, "--quantization": "nf4", "--optimizer": "lion", "--checkpointing": "full", "--sharding": "fsdp2",
        "--attention": "flex", "--data-parallel-size": 2, "--zero-stage": 3, "--tensor-parallel-size": 2, "--rank": "last",
        "--pipeline-parallel-size": 2, "--context-parallel-size": 2, "--expert-parallel-size": 2, "--framework": "megatron",
        "--other-memory-fraction": 0.2, "--num-gpus": 8, "--set": "allocator.expandable_segments=true", "--dialect": "trl",
    }  # fmt: skip
    words = [draw.choice(("predict", "predict", "predict", "explain")), "--gpu", gpu(draw), "--model", "gpt2"]
    for flag in draw.sample(sorted(known), draw.randint(0, 4)):
        value = draw.choice(JUNK) if draw.random() < 0.5 else known[flag]
        path = draw.choice(sorted(whole_job()))
        words += [flag, f"{path}={draw.choice(JUNK)}" if flag == "--set" and draw.random() < 0.8 else str(value)]
    if draw.random() < 0.2:
        words.insert(draw.randint(1, len(words)), str(draw.choice(JUNK)))
    command_line([word.replace("\x00", "") for word in words if word not in ("--help", "-h")])


def pasted(draw: random.Random, suffixes: tuple[str, ...]) -> None:
    """A file of another project, its text torn or its values damaged."""
    path, content = draw.choice([(path, content) for path, content in files() if path.suffix in suffixes])
    if draw.random() < 0.5:
        text(torn(content, draw))
    else:
        text(json.dumps(damaged(dict(opened(path).values), draw), default=str))


def a_script(draw: random.Random) -> None:
    pasted(draw, (".sh",))


def a_file(draw: random.Random) -> None:
    pasted(draw, (".yaml", ".yml", ".toml", ".json"))


def a_grid(draw: random.Random) -> None:
    grid = {
        "base": {"sequence_length": 128, "optimizer": {"name": "sgd"}},
        "axes": {"architecture": ["gpt2", {"name": "gpt2", "num_hidden_layers": 2}], "micro_batch_size": [1, 2]},
        "include": [{"architecture": "opt-125m", "parallelism.zero_stage": 0}],
        "exclude": [{"architecture": "gpt2", "micro_batch_size": 2}],
        "parts": [{"base": {"compile": True}, "include": [{"architecture": "gpt2"}]}],
    }
    bad = damaged(grid, draw)
    if draw.random() < 0.5:
        part = draw.choice(sorted(grid))
        bad[part] = draw.choice([*JUNK, [draw.choice(JUNK)], {str(draw.choice(JUNK)): draw.choice(JUNK)}])
    with contextlib.suppress(PeakcastError):
        expand(bad)


KINDS: dict[str, tuple[Callable[[random.Random], None], int]] = {
    "unlikely jobs": (an_unlikely_job, 5000),
    "damaged jobs": (a_job, 2000),
    "damaged networks": (a_network, 3000),
    "damaged objects of Hugging Face": (objects, 2000),
    "damaged arguments of Megatron-LM": (arguments, 2000),
    "torn lines of a batch": (bytes_of_a_line, 1000),
    "flags": (flags, 500),
    "torn scripts": (a_script, 2000),
    "torn configuration files": (a_file, 2000),
    "damaged grids": (a_grid, 500),
}
"""What is damaged, how it is asked, and how many of it are asked in all."""
BLOCKS = [(kind, block) for kind, (_, number) in KINDS.items() for block in range(number // BLOCK)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def test_there_are_20000():
    assert sum(number for _, number in KINDS.values()) == 20_000 == BLOCK * len(BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_forty_of_each_kind_end_in_an_answer_or_a_sentence(kind):
    ask(kind, range(FIRST))


@pytest.mark.attacks
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_each_ends_in_an_answer_or_a_sentence(kind, block, record_property):
    record_property("attacks", BLOCK)
    record_property("kind", kind)
    ask(kind, range(block * BLOCK, (block + 1) * BLOCK))


def ask(kind: str, numbers: range) -> None:
    """Ask questions of a kind by their numbers, which are their seeds."""
    for number in numbers:
        begun = time.process_time()
        try:
            KINDS[kind][0](random.Random(f"{kind} {number}"))
        except Exception as error:
            raise AssertionError(f"{kind} {number}: {type(error).__name__}: {str(error)[:500]}") from error
        taken = time.process_time() - begun
        assert taken < LONGEST_SECONDS, f"{kind} {number} took {taken:.0f} s"
