"""Pipeline parallelism as `torch.distributed.pipelining` runs it: this rank's stages of the network, and its schedule.

The stages are parts of transformers' networks, cut as torchtitan does it (`distributed/pipeline_parallel.py` and
`experiments/transformers_modeling_backend`): modules that a stage does not have are identities.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from peakcast.collectors.processes import gang
from peakcast.collectors.stacks import layouts
from peakcast.collectors.stacks.optimizers import build_optimizer
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import mixes_precision
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Phase

SCHEDULES = {
    ("gpipe", False): "ScheduleGPipe",
    ("gpipe", True): "ScheduleLoopedBFS",
    ("1f1b", False): "Schedule1F1B",
    ("interleaved_1f1b", True): "ScheduleInterleaved1F1B",
    ("zero_bubble", False): "ScheduleInterleavedZeroBubble",
    ("zero_bubble", True): "ScheduleInterleavedZeroBubble",
    ("zero_bubble_v", True): "ScheduleZBVZeroBubble",
    ("dualpipe_v", True): "ScheduleDualPipeV",
}
"""(`parallelism.pipeline_schedule`, whether a rank has several stages) -> torch's class."""

SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping")
"""Settings by which a network of transformers multiplies the inputs of its layers or the outputs of its head. A stage calls
the network's parts one by one, and would leave out or repeat the multiplication."""


def cut(network: Any, layers: range, job: TrainingJob, *, first: bool, last: bool) -> Any:
    """`network` as one stage: token ids or hidden states in, hidden states or logits out. Modules that it lacks become
    identities. Raises: CollectorError for a network that is not made of Llama's parts."""
    body = getattr(network, "model", network)
    parts = ((body, "embed_tokens"), (body, "layers"), (body, "norm"), (network, "lm_head"))
    scales = [name for name in SCALES if getattr(network.config, name, None) not in (None, 1, 1.0)]
    if scales or hasattr(getattr(body, "embed_tokens", None), "scalar_embed_scale") or not all(hasattr(*p) for p in parts):
        raise CollectorError(
            f"model_type={job.architecture.model_type!r} cannot be cut into stages: its parts must be Llama's "
            "(model.embed_tokens, layers, norm, lm_head) with nothing computed between them; measure another family.",
            parameter="architecture.model_type",
            value=job.architecture.model_type,
        )
    body.layers = torch.nn.ModuleList(body.layers[layers.start : layers.stop])
    if not first:
        body.embed_tokens = torch.nn.Identity()
    if not last:
        body.norm, network.lm_head = torch.nn.Identity(), torch.nn.Identity()

    def forward(x: Any, position_ids: Any = None) -> Any:
        positions = torch.arange(job.sequence_length, device=x.device)[None] if position_ids is None else position_ids
        inputs = {"input_ids": x} if first else {"inputs_embeds": x}
        return network.lm_head(body(**inputs, position_ids=positions, use_cache=False).last_hidden_state)

    network.forward = forward
    return network


class PipelineTraining:
    """One training run of a rank's stages."""

    def __init__(
        self, job: TrainingJob, stages: list[Any], wrapped: list[layouts.WrappedModel], draw: Callable[[], torch.Tensor]
    ) -> None:
        self.job = job
        self.model = torch.nn.ModuleList(stages)
        self.optimizer = build_optimizer(job, self.model)
        self._draw = draw
        ids = draw()
        self.batch = {"input_ids": ids, "labels": ids.clone()}  # as from a data loader
        self._layouts = wrapped
        self._begin: Callable[[Phase], None] = lambda phase: None
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._loss = stages[-1].loss_function
        self._schedule = _schedule(job, [one.model for one in wrapped], self._compute_loss, ids.device)
        self._announce()

    def forward_backward(self, begin: Callable[[Phase], None]) -> None:
        """Run all forwards and backwards of a step; `begin` is called with each phase."""
        self._begin = begin
        begin(Phase.FORWARD)  # stages are gathered before the first forward
        stages = self._stages()
        with self._layouts[-1].computing_loss(), self._sharing():
            arguments = (self.batch["input_ids"],) if any(stage.is_first for stage in stages) else ()
            targets = self.batch.get("shift_labels", self.batch["labels"])
            positions = {name: given for name, given in self.batch.items() if name == "position_ids"}
            target = targets if any(stage.is_last for stage in stages) else None
            self._schedule.step(*arguments, target=target, return_outputs=False, **positions)

    def _sharing(self) -> contextlib.AbstractContextManager[None]:
        """Under context parallelism: make a new batch for each step and keep only this rank's part of it."""
        if self.job.parallelism.context_parallel_size == 1:
            return contextlib.nullcontext()
        from peakcast.collectors.stacks.layouts import context_parallel

        self.batch = {}
        ids = self._draw()
        self.batch = context_parallel.inputs({"input_ids": ids, "labels": ids})
        return context_parallel.sharing(self.batch, self.job)

    def _compute_loss(self, logits: Any, labels: Any) -> Any:
        self._begin(Phase.LOSS)
        shared = self.job.parallelism.context_parallel_size > 1  # labels have then been shifted before sequences are split
        given = {"labels": None, "shift_labels": labels} if shared else {"labels": labels}
        return self._loss(logits=logits, vocab_size=self.job.architecture.vocab_size, **given)

    def _stages(self) -> list[Any]:
        return getattr(self._schedule, "_stages", None) or [self._schedule._stage]

    def _announce(self) -> None:
        """Make every forward and backward of a stage report its phase first."""
        for stage in self._stages():
            for name, phase in (
                ("forward_one_chunk", Phase.FORWARD),
                ("backward_one_chunk", Phase.BACKWARD),
                ("backward_weight_one_chunk", Phase.BACKWARD),
            ):
                setattr(stage, name, self._announcing(phase, getattr(stage, name)))

    def _announcing(self, phase: Phase, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def announced(*arguments: Any, **keywords: Any) -> Any:
            self._begin(phase)
            return run(*arguments, **keywords)

        return announced

    def clip(self) -> None:
        """Clip by the norm over this rank's stages."""
        self._layouts[-1].clip(self._trained, 1.0)

    def step(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Release the gradients."""
        self.optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        return {"optimizer": type(self.optimizer).__name__, "pipeline_schedule": type(self._schedule).__name__}


def build(
    job: TrainingJob,
    new_network: Callable[[], Any],
    draw: Callable[[], torch.Tensor],
    settle: Callable[[Any], None] | None = None,
) -> PipelineTraining:
    """A run on this process's rank. `new_network` makes the whole network, with checkpointing if the job has it; `draw`
    makes the token ids of a whole step; `settle` moves a stage to the GPU if it is not there yet."""
    layout = job.parallelism
    total = layout.pipeline_parallel_size * layout.virtual_pipeline_stages
    sizes = layout.pipeline_layers or (job.architecture.num_hidden_layers // total,) * total
    stages = []
    for stage in stages_of_rank(job, layouts.mesh(job)["stage"].get_local_rank()):
        start = sum(sizes[:stage])
        layers = range(start, start + sizes[stage])
        stages.append(cut(new_network(), layers, job, first=stage == 0, last=stage == total - 1))
    for stage in stages:
        layouts.split(stage, job)
    wrapped = [layouts.wrap(stage, job) for stage in stages]
    if settle is not None:
        for stage in stages:
            settle(stage)
    return PipelineTraining(job, stages, wrapped, draw)


def stages_of_rank(job: TrainingJob, rank: int) -> list[int]:
    """Numbers of the stages of pipeline rank `rank`, in model order: every p-th stage, or the two of a V schedule."""
    layout = job.parallelism
    ranks, back = layout.pipeline_parallel_size, layout.pipeline_schedule in ("zero_bubble_v", "dualpipe_v")
    return [
        chunk * ranks + (ranks - 1 - rank if back and chunk % 2 else rank)
        for chunk in range(layout.virtual_pipeline_stages)
    ]


def _schedule(job: TrainingJob, stages: list[Any], loss: Callable[..., Any], device: torch.device) -> Any:
    layout = job.parallelism
    key = layout.pipeline_schedule, layout.virtual_pipeline_stages > 1
    if key not in SCHEDULES:
        raise CollectorError(
            f"pipeline_schedule={key[0]!r} with virtual_pipeline_stages={layout.virtual_pipeline_stages} is no schedule of "
            "torch's; use gpipe, 1f1b or zero_bubble with 1, gpipe, interleaved_1f1b or zero_bubble with more, "
            "zero_bubble_v with 2.",
            parameter="parallelism.pipeline_schedule",
            value=key[0],
        )
    group = layouts.mesh(job)["stage"].get_group()
    total = layout.pipeline_parallel_size * layout.virtual_pipeline_stages
    numbers = stages_of_rank(job, dist.get_rank(group))
    pipeline = [
        PipelineStage(stage, number, total, device, *_edges(job, number, total), group=group)
        for stage, number in zip(stages, numbers, strict=True)
    ]
    if not gang.launched():
        for stage in pipeline:
            _agree(stage)
    kind = getattr(torch_schedules, SCHEDULES[key])
    takes_many = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    return kind(pipeline if takes_many else pipeline[0], job.gradient_accumulation_steps, loss_fn=loss)


def _agree(stage: Any) -> None:
    """Stages vote on whether all know the shapes of their inputs and outputs (torch 2.13 `_warmup_forward_vote`). In a fake
    group nothing arrives, which counts as a no, so each stage decides yes by itself."""
    for vote in ("_warmup_forward_vote", "_warmup_backward_result"):
        if hasattr(stage, vote):
            setattr(stage, vote, lambda *_, **__: torch.ones(1, dtype=torch.int32))


def _edges(job: TrainingJob, stage: int, total: int) -> tuple[Any, Any]:
    """Examples of a stage's inputs and outputs. Without them stages would send each other the shapes, which a fake group
    cannot do."""
    layout, sequences = job.parallelism, job.micro_batch_size
    length = job.sequence_length // layout.context_parallel_size
    part = length // (layout.tensor_parallel_size if layout.sequence_parallel else 1)
    dtype = getattr(torch, job.precision.compute if mixes_precision(job) else job.precision.parameters)
    with torch.device("meta"):
        ids = torch.zeros((sequences, length), dtype=torch.int64)
        hidden = torch.zeros((sequences, part, job.architecture.hidden_size), dtype=dtype, requires_grad=True)
        vocabulary = job.architecture.vocab_size
        logits = torch.zeros((sequences, length, vocabulary), dtype=dtype, requires_grad=True)
    return (hidden if stage else ids), (logits if stage == total - 1 else hidden)
