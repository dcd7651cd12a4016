"""The page of what the ledger covers, `docs/capabilities.md`: feature × layout for each stack, then every row of the table.

`python -P -m peakcast.reports.capabilities docs/capabilities.md` writes it. A cell is from the finding of `scope_findings`
about a small change to a plain job or, without one, from whether a traced grid or published rows check such jobs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from peakcast.collectors.measure.grid import load_grid
from peakcast.core.durable import replace_file
from peakcast.core.errors import PeakcastError
from peakcast.core.findings import KINDS, Finding
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.store import load
from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import Fact, option, setting
from peakcast.models.ledger.scope.ignored import ignored_findings
from peakcast.models.ledger.scope.scope import EVERY_STACK, scope_findings, sections
from peakcast.models.ledger.scope.table import STATUS, ScopeLimit

GRIDS = (
    *("agreement", "agreement-deepspeed", "agreement-megatron", "agreement-optimizers"),
    *("agreement-trl", "agreement-trl-deepspeed"),
)
"""Grids whose cells are held against traces, in the pages that the text names."""
MIXED = {"parameters": "float32", "compute": "bfloat16", "gradients": "float32", "optimizer_states": "float32"}


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """A feature or a layout: its name, the settings that a plain job changes for it, and of which jobs it holds."""

    name: str
    settings: Mapping[str, Any]
    holds: Fact


@dataclass(frozen=True, slots=True)
class StackColumns:
    """A stack: its settings, of which jobs it holds, and its layouts."""

    name: str
    settings: Mapping[str, Any]
    holds: Fact
    layouts: tuple[CapabilityRow, ...]


def _layout(name: str, holds: Fact, **parallelism: Any) -> CapabilityRow:
    """A layout, with micro-batches enough to fill a pipeline."""
    steps = {"gradient_accumulation_steps": 4} if "pipeline_parallel_size" in parallelism else {}
    return CapabilityRow(name, steps | {f"parallelism.{key}": value for key, value in parallelism.items()}, holds)


# fmt: off
_ONE = ~job.many_ranks & ~job.zero
_DATA = job.many_ranks & ~job.parallel_otherwise
_LAYOUTS = (
    _layout("one GPU", _ONE),
    _layout("DDP", _DATA & job.asks_ddp & ~job.zero, data_parallel_size=8),
    _layout("FSDP1", _DATA & job.asks_fsdp1, data_parallel_size=8, sharding="fsdp1"),
    _layout("FSDP2", _DATA & job.asks_fsdp2, data_parallel_size=8, sharding="fsdp2"),
    _layout("tensor", job.tensor_parallel, tensor_parallel_size=2),
    _layout("ring attention", job.context_parallel, context_parallel_size=2, data_parallel_size=2, sharding="fsdp2"),
)
_OF_A_LOOP = (
    _layout("pipeline", job.pipeline_parallel, pipeline_parallel_size=2),
    _layout("experts", job.expert_parallel, expert_parallel_size=2, data_parallel_size=2, sharding="fsdp2"),
)
_ZERO = tuple(
    _layout(f"ZeRO-{stage}", setting("parallelism.zero_stage", stage), data_parallel_size=8, zero_stage=stage)
    for stage in (1, 2, 3)
)
_OF_MEGATRON = (
    _layout("one GPU", _ONE),
    _layout("distributed optimizer", job.replicated & job.zero, data_parallel_size=8, zero_stage=1),
    _layout("tensor, sequence", job.tensor_parallel & job.sequence_parallel, tensor_parallel_size=2,
            sequence_parallel=True),
    _layout("pipeline", job.pipeline_parallel, pipeline_parallel_size=2),
    _layout("ring attention", job.context_parallel, context_parallel_size=2),
    _layout("experts", job.expert_parallel, expert_parallel_size=2, data_parallel_size=2),
)
STACKS = (
    StackColumns("transformers' Trainer", {"framework": "huggingface"}, job.huggingface, _LAYOUTS),
    StackColumns("a PyTorch loop, torchtitan", {"framework": "torch", "versions": {"torchtitan": "0.2.0"}}, job.plain_torch,
          _LAYOUTS + _OF_A_LOOP),
    StackColumns("DeepSpeed", {"framework": "deepspeed"}, setting("framework", "deepspeed"), _ZERO),
    StackColumns("Megatron-LM", {"framework": "megatron"}, job.megatron, _OF_MEGATRON),
)
FEATURES = (
    CapabilityRow("full training in bf16", {}, ~job.adapts & ~job.autocast & job.trains),
    CapabilityRow("mixed precision (autocast)", {"precision": MIXED, "framework_options.autocast": True}, job.autocast),
    CapabilityRow("float8", {"precision.compute": "float8"}, job.float8),
    CapabilityRow("LoRA", {"finetuning": {"method": "lora", "rank": 16}},
          setting("finetuning.method", "lora") & ~job.quantized),
    CapabilityRow("QLoRA (nf4)", {"finetuning": {"method": "qlora", "rank": 16, "quantization": "nf4"}},
          job.adapts & setting("finetuning.quantization", "nf4")),
    CapabilityRow("LoHa", {"finetuning": {"method": "loha", "rank": 16}}, setting("finetuning.method", "loha")),
    CapabilityRow("full checkpointing", {"activation_checkpointing.mode": "full"}, job.full_checkpointing),
    CapabilityRow("selective checkpointing", {"activation_checkpointing.mode": "selective"}, job.selective),
    CapabilityRow("offloaded activations", {"offload.activations": True}, job.offloads_activations),
    CapabilityRow("offloaded parameters and optimizer", {"offload": {"parameters": True, "optimizer": True}},
          job.offloads_parameters & job.offloads_optimizer),
    CapabilityRow("eager attention", {"attention": "eager"}, job.eager),
    CapabilityRow("FlashAttention 2", {"attention": "flash_attention_2"}, job.flash),
    CapabilityRow("flex attention", {"attention": "flex"}, job.flex & ~job.megatron),
    CapabilityRow("padding-free rows", {"batch": {"form": "padding_free", "num_tokens": 2048}},
          setting("batch.form", "padding_free")),
    CapabilityRow("Liger's kernels", {"framework_options.liger_kernels": True}, job.liger),
    CapabilityRow("fused linear cross entropy", {"loss.fused_linear_cross_entropy": True}, job.fused_loss),
    CapabilityRow("torch.compile", {"compile": True}, job.compiles),
    CapabilityRow("8-bit AdamW", {"optimizer.name": "adamw_8bit"}, job.optimizer("adamw_8bit", "paged_adamw_8bit")),
    CapabilityRow("Adafactor", {"optimizer.name": "adafactor"}, job.optimizer("adafactor")),
    CapabilityRow("Muon", {"optimizer.name": "muon"}, job.optimizer("muon")),
    CapabilityRow("LOMO", {"optimizer.name": "lomo"}, job.optimizer("lomo")),
    CapabilityRow("GaLore", {"optimizer.name": "galore"}, job.optimizer("galore")),
    CapabilityRow("an optimizer for each parameter, in backward", {"framework_options.optimizer_in_backward": True},
          job.optimizer_in_backward),
    CapabilityRow("DPO", {"loss.kind": "dpo", "micro_batch_size": 2}, setting("loss.kind", "dpo")),
    CapabilityRow("a reward model", {"loss.kind": "reward", "micro_batch_size": 2}, setting("loss.kind", "reward")),
    CapabilityRow("mixture of experts", {"architecture": "qwen3-30b-a3b"}, job.experts),
    CapabilityRow("multi-latent attention", {"architecture": "deepseek-v2-lite"}, job.latent_attention),
    CapabilityRow("BERT", {"architecture": "bert-base", "sequence_length": 512}, job.encoder),
    CapabilityRow("T5", {"architecture": "t5-base", "sequence_length": 512}, job.encoder_decoder),
    CapabilityRow("state-space layers (Jamba)", {"architecture": "jamba-v0.1"}, job.hybrid),
    CapabilityRow("generation", {"task": "inference"}, job.generates),
    CapabilityRow("Megatron-FSDP",
          {"framework_options.use_megatron_fsdp": True,
           "framework_options.data_parallel_sharding_strategy": "optim_grads_params"}, option("use_megatron_fsdp")),
)
# fmt: on
INTRODUCTION = """\
# What is covered

<!-- written by `python -P -m peakcast.reports.capabilities docs/capabilities.md` -->

Which jobs the ledger counts, and how that is known. A cell is the answer to a plain job of Llama 3.1 8B (or of the network
that the row names) with that one feature in that layout; other networks and combinations have limits of their own, which
[every limit](#every-limit) lists. `peakcast predict` says of each job what of it is not covered.

| in a cell | means |
| --- | --- |
| traced | equal to the traced step of the real library, within the share that its page says ([transformers and torch](../reports/ledger.md), [DeepSpeed](../reports/deepspeed/ledger.md), [Megatron-LM](../reports/megatron-core/ledger.md), [optimizers](../reports/optimizers/ledger.md), [TRL](../reports/trl/ledger.md), [TRL with DeepSpeed](../reports/trl-deepspeed/ledger.md)) |
| measured | no trace, but rows measured on GPUs are predicted by it ([how well](../reports/index.html)) |
| counted | read from the library's source; no trace or measurement has both the feature and the layout |
| nearly | differs from its trace by a few percent at most, in the direction that is said, if any |
| needs more, needs less | something is not counted, and moves the peak that way |
| unknown | not counted, or compared with nothing |
| fails | a library refuses it |
| – | the stack does not have it, or the network cannot be divided so |
"""  # noqa: E501


def page() -> str:
    """The page as Markdown."""
    seen = {"traced": _traced(), "measured": _measured()}
    stacks = (f"\n## {stack.name[0].upper()}{stack.name[1:]}\n\n{_table(stack, seen)}" for stack in STACKS)
    return "".join((INTRODUCTION, *stacks, "\n## Every limit\n", *_limits()))


def _traced() -> list[TrainingJob]:
    return [one for name in GRIDS for one in load_grid(name) if not scope_findings(one)]


def _measured() -> list[TrainingJob]:
    rows = (row for row in load() if row.outcome == "ok" and not row.out_of_scope and not row.spoiled)
    return [row.job for row in rows if not scope_findings(row.job)]


def _table(stack: StackColumns, seen: Mapping[str, list[TrainingJob]]) -> str:
    """Feature × layout of one stack. Features that it has in no layout are left out."""
    own = {how: [one for one in jobs if stack.holds(one)] for how, jobs in seen.items()}
    lines = [
        "| | " + " | ".join(layout.name for layout in stack.layouts) + " |",
        "| --- |" + " --- |" * len(stack.layouts),
    ]
    for feature in FEATURES:
        cells = [_cell(stack, feature, layout, own) for layout in stack.layouts]
        if set(cells) != {"–"}:
            lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(stack: StackColumns, feature: CapabilityRow, layout: CapabilityRow, seen: Mapping[str, list[TrainingJob]]) -> str:
    """The table's status of a plain job with that feature in that layout or, without one, how the job was checked."""
    experts = {"architecture": "qwen3-30b-a3b"} if "parallelism.expert_parallel_size" in layout.settings else {}
    try:
        asked = job_of({**experts, **stack.settings, **layout.settings, **feature.settings})
    except PeakcastError:
        return "–"
    passed_over = any(finding.code == "setting_ignored" for finding in ignored_findings(asked))
    if passed_over or not feature.holds(asked):
        return "–"
    if findings := scope_findings(asked):
        return _worst(findings)
    with_both = (how for how, jobs in seen.items() if any(feature.holds(one) and layout.holds(one) for one in jobs))
    return next(with_both, "counted")


def job_of(settings: Mapping[str, Any]) -> TrainingJob:
    """A plain job with `settings`, whose dotted keys reach inside. Raises: SpecError."""
    mapping: dict[str, Any] = {"architecture": "llama-3.1-8b", "sequence_length": 2048}
    for key, value in settings.items():
        *path, last = key.split(".")
        inner = mapping
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return job_from_mapping(mapping)


def _worst(findings: tuple[Finding, ...]) -> str:
    """The status of a job with these findings: that it fails, else what is not counted, else by how much it is off."""
    worst = max(findings, key=lambda finding: (KINDS[finding.code].prevents, finding.uncounted))
    return STATUS[worst.code, worst.direction]


def _limits() -> Iterator[str]:
    """The rows of the table by section, in their order. What is in braces is a job's own value."""
    tables = {"": sections("huggingface"), " (Megatron-LM)": sections("megatron")[len(EVERY_STACK) :]}
    for stack, table in tables.items():
        rows: dict[str, list[str]] = {}
        for limit in chain.from_iterable(section.every() for section in table):
            rows.setdefault(limit.feature, []).append(_row(limit))
        for feature, some in rows.items():
            yield f"\n### {feature[0].upper()}{feature[1:]}{stack}\n\n| | setting | |\n| --- | --- | --- |\n"
            yield "\n".join(some) + "\n"


def _row(limit: ScopeLimit) -> str:
    sentence = limit.sentence.replace("!r}", "}").replace(":,}", "}").replace("|", "\\|")
    return f"| {STATUS[limit.effect]} | `{limit.parameter}` | {sentence} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/capabilities.md"), help="default: %(default)s")
    replace_file(parser.parse_args(arguments).file, page().encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
