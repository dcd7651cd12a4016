"""Traces a job: runs the same stack and phases as a measurement, on fake tensors, in a separate process."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from peakcast import catalog
from peakcast.collectors.stacks.steps.stepping import name_gradients, name_states, run_steps
from peakcast.collectors.tracing.traceable import check_traceable
from peakcast.core.errors import CollectorError
from peakcast.core.extras import need
from peakcast.dialects.common.own_networks import own_network
from peakcast.jobs.conventions import conventions, steps_in_bitsandbytes
from peakcast.jobs.lengths import at_its_longest
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.timelines.files import timeline_from_mapping as timeline_from_mapping
from peakcast.timelines.files import timeline_to_mapping as timeline_to_mapping
from peakcast.timelines.timeline import Category, Phase, Timeline
from peakcast.timelines.traced import Traced

NUM_STEPS = 2
"""Number of steps: the first makes the optimizer states; the second is like all later ones."""


def trace_job(
    job: TrainingJob, *, rank: int = 0, gpu: str | None = None, timeout_seconds: float = 600
) -> Traced:
    """The timelines of the first two steps of `job` on `rank`, traced in a subprocess without a GPU. With a GPU of the
    catalog, memory that its kernels allocate for themselves is included.

    Raises: CollectorError with the message of the subprocess.
    """
    need("a trace", "torch")
    command = [sys.executable, "-P", "-m", "peakcast.collectors.tracing", "-", str(rank)]
    command += [gpu] if gpu is not None else []
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job_to_mapping(job)),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CollectorError(f"the trace took longer than {timeout_seconds:g} s; give it more time.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        own = [line for line in lines if line.startswith("peakcast: ")]  # libraries may print more as the process ends
        raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ", line)]
        raise CollectorError(f"the trace failed: {(own or raised or lines)[-1].removeprefix('peakcast: ')}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    steps = {step: timeline_from_mapping(answer[step]) for step in ("first", "steady")}
    return Traced(**steps, replaced=answer["replaced"])


def trace_here(job: TrainingJob, rank: int = 0, gpu: str | None = None) -> dict[str, Timeline]:
    """The same as `trace_job`, in this process, which it changes permanently (fake CUDA, patched attention)."""
    if job.framework == "deepspeed" and job.finetuning.quantization:
        return trace_on_cpu(job, rank)  # weights are quantised by their values
    check_traceable(job)
    from peakcast.collectors.tracing.tracer import Tracer

    tracer = Tracer()
    tracer.gpu = catalog.gpu(gpu) if gpu is not None else None
    compiling = prepare(job, tracer, rank)
    if job.task == "inference":
        with compiling, fake_mode(), tracer:
            span = _generate(job, tracer)
        return {step: tracer.timeline(*span) for step in ("first", "steady")}
    with compiling, fake_mode(num_nonzero(job), knows_values=reads_values(job)), one_thread():
        return _train(job, "cuda:0", tracer)


def prepare(job: TrainingJob, tracer: Any, rank: int = 0) -> contextlib.AbstractContextManager[None]:
    """Prepare this process permanently so that `tracer` can trace jobs like `job`. Returns a context in which the trace
    must run."""
    from peakcast.collectors.stacks import layouts
    from peakcast.collectors.tracing import deepspeed_fakes, fake_cuda, known_values, patches

    if job.framework == "deepspeed":
        deepspeed_fakes.install()
    fake_cuda.install()
    patches.install(masks_of_batch=job.batch.form != "rows")
    if reads_values(job):
        known_values.install()
    compiled = compiles(job) or _compiles_part(job)
    if compiled:
        from peakcast.collectors.tracing import inductor

        inductor.load()
    _install_packages(job, compiled=compiled)
    _install_streams(job)
    if job.parallelism.world_size > 1:
        from peakcast.collectors.tracing import dtensors  # of internals that torch 2.4 has elsewhere

        dtensors.install()
    layouts.start_group(job, rank)
    if job.framework == "megatron":
        _install_megatron(job, tracer)
    compiling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if compiled:
        compiling = inductor.compiling(tracer)
        if job.attention == "flex":
            inductor.forget_flex_attention()
    if job.attention == "flash_attention_2":
        from peakcast.collectors.tracing import flash_attention_stub

        padded = job.batch.form == "masked" and job.task != "inference"
        flash_attention_stub.install(packed=job.batch.form == "padding_free", padded=padded)
    return compiling


def reads_values(job: TrainingJob) -> bool:
    """Whether the network reads values of small tensors while it is built or runs: the positions of images in a row, the
    tokens of each expert where experts run one after the other (transformers before 5, such as 4.57
    models/qwen3_moe/modeling_qwen3_moe.py `Qwen3MoeSparseMoeBlock.forward`), or (torchtune 0.6.1
    models/llama3_1/_position_embeddings.py `apply_scaling`) the frequencies of its rotary tables."""
    routes = job.architecture.moe is not None and job.framework != "megatron"
    return bool(job.images.per_sequence) or routes or own_network(job) is not None


def _compiles_part(job: TrainingJob) -> bool:
    """Whether Megatron compiles a function of its own: squared ReLU, or its fused cross entropy."""
    squares = job.architecture.hidden_act == "relu2"
    return job.framework == "megatron" and (squares or bool(conventions(job)["cross_entropy_loss_fusion"]))


def _install_packages(job: TrainingJob, *, compiled: bool) -> None:
    """Replace the parts of other packages that need a GPU: Triton's kernels, bitsandbytes', TRL's, torchtitan's experts."""
    from peakcast.collectors.stacks.layouts import torchtitan_experts
    from peakcast.collectors.stacks.parts import quantized_fakes
    from peakcast.collectors.tracing import kernel_packages, megatron_fakes, triton_stub, trl_fakes

    if not compiled:
        kernel_packages.install()  # before other stubs: it imports what must not find them
    if job.loss.fused_linear_cross_entropy or job.framework_options.get("liger_kernels"):
        triton_stub.install()
    if job.finetuning.quantization == "nf4":
        quantized_fakes.install()
    if job.loss.kind != "cross_entropy":
        trl_fakes.install()
    if torchtitan_experts.has_torchtitan_experts(job):
        _import_torchtitan()
    if torchtitan_experts.are_divided(job):
        megatron_fakes.answer_counts(_routed_rows(job))


def _install_streams(job: TrainingJob) -> None:
    """Replace CUDA's streams and events, and what the Trainer asks of the GPU, for jobs that use them."""
    from peakcast.collectors.tracing import fake_streams, patches

    loops_itself = conventions(job).get("loop") == "trainer"  # the Trainer sets the device
    if loops_itself:
        patches.install_for_trainer()
    waits = steps_in_bitsandbytes(job)  # its step waits for the GPU
    if job.parallelism.world_size > 1 or job.framework in ("megatron", "deepspeed") or loops_itself or waits:
        fake_streams.install()


def _install_megatron(job: TrainingJob, tracer: Any) -> None:
    """Replace what megatron-core and Transformer Engine need a GPU for; tokens go to experts in equal shares."""
    from peakcast.collectors.tracing import megatron_fakes

    convention, layout = conventions(job), job.parallelism
    blocks = convention["fp8_recipe"] == "mxfp8"  # no GPU before Blackwell has it
    seen = megatron_fakes.BLACKWELL if blocks else megatron_fakes.HOPPER
    engine = convention["adam_library"] != "torch"
    megatron_fakes.install(tracer, engine=engine, compiles=_compiles_part(job), gpu=seen)
    if job.architecture.moe is not None:
        shares = layout.expert_tensor_parallel_size or layout.tensor_parallel_size
        megatron_fakes.balance(_routed_rows(job), shares, str(convention["moe_token_dispatcher_type"]))


def num_nonzero(job: TrainingJob) -> int | None:
    """Number of true entries of a mask: flash attention gathers the tokens that are not padding, or finds the sequences by
    their first positions; an expert of LitGPT's gathers its tokens, an equal share. None: all, as with images, none of
    which is padding."""
    moe = job.architecture.moe
    if moe is not None and own_network(job) is not None:
        return -(-at_its_longest(job).num_tokens * moe.num_experts_per_tok // moe.num_experts)
    if job.images.per_sequence:
        return None
    return job.micro_batch_size if job.batch.form == "padding_free" else at_its_longest(job).num_tokens


def one_thread() -> contextlib.AbstractContextManager[Any]:
    """A context in which backward runs in this thread; in autograd's own, tensors made in backward would not be fake."""
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.autograd.set_multithreading_enabled(False)
    return context


def _import_torchtitan() -> None:
    """Import its modules, which import Triton's kernels for expert parallelism that are never launched here."""
    import importlib.util

    from peakcast.collectors.stacks.layouts import torchtitan_experts
    from peakcast.collectors.tracing import triton_stub

    triton_stub.load_others()
    missing = importlib.util.find_spec("triton") is None
    with triton_stub.while_importing("triton") if missing else contextlib.nullcontext():
        torchtitan_experts.modules()


def trace_on_cpu(job: TrainingJob, rank: int = 0) -> dict[str, Timeline]:
    """The same as `trace_here`, on real tensors of this machine's CPU, whose operators allocate nearly as the GPU's do; the
    job must fit in its memory. Raises: CollectorError for offloading, as offloaded tensors could not be distinguished."""
    if job.offload.parameters or job.offload.optimizer or job.offload.activations:
        raise CollectorError(
            f"framework={job.framework!r} is traced on the CPU, where offloaded tensors cannot be told from others; "
            "measure it on a GPU, or trace without offload.",
            parameter="offload",
            value=job.offload,
        )
    from peakcast.collectors.stacks import layouts
    from peakcast.collectors.tracing.tracer import Tracer

    layouts.start_group(job, rank)
    return _train(job, "cpu", Tracer("cpu"))


def _train(job: TrainingJob, device: str, tracer: Any) -> dict[str, Timeline]:
    from peakcast.collectors.stacks import build

    with tracer:
        training = build(job, device, longest=True)
        gc.collect()  # objects that wrapping has replaced are in reference cycles
        tracer.name(training.model.named_parameters(), Category.PARAMETERS)
        steps = StepFollower(training, tracer)
        with tracer.watching(training.model), _cycles_kept() if compiles(job) else contextlib.nullcontext():
            run_steps(training, NUM_STEPS, steps)
    spans = zip(("first", "steady"), steps.spans, strict=False)
    return {step: tracer.timeline(*span) for step, span in spans}


@contextlib.contextmanager
def _cycles_kept() -> Iterator[None]:
    """A context in which Python does not search for reference cycles by itself. Whether it does so in the middle of a first
    step, and what it then frees, depends on the number of objects in the process, and would differ from trace to trace."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class StepFollower:
    """Follows the steps of `training`, and tells `tracer` the phases and the purpose of tensors."""

    def __init__(self, training: Any, tracer: Any) -> None:
        self.training = training
        self.tracer = tracer
        self.spans: list[tuple[int, int]] = []
        """(first operation, end) of each step."""
        self._start = 0

    def step_begins(self) -> None:
        """A step begins here."""
        self._start = self.tracer.now

    def begin(self, phase: Phase) -> None:
        """Operations from here on belong to this phase."""
        self.tracer.phase = phase

    def loss_made(self, loss: Any) -> None:
        """Does nothing."""

    def gradients_made(self) -> None:
        """Name the gradients."""
        name_gradients(self.training, self.tracer.name)

    def states_made(self) -> None:
        """Name the optimizer states."""
        name_states(self.training, self.tracer.name)

    def step_ends(self) -> None:
        """The step ends here, with an additional instant, because not every `zero_grad` runs an operation after it has
        freed the gradients. Objects that compiling leaves in reference cycles (with graph breaks also tensors of the step)
        are freed; in a real run, Python's next collection frees them."""
        if compiles(self.training.job):
            gc.collect()
        self.tracer.launched("step ends", ())
        self.spans.append((self._start, self.tracer.now))


def compiles(job: TrainingJob) -> bool:
    """Whether any part of `job` is compiled; transformers itself compiles flex attention and its masks."""
    return job.compile or job.attention == "flex"


def _routed_rows(job: TrainingJob) -> int:
    """Number of copies of a rank's tokens that go to experts; 0 without experts."""
    layout, moe = job.parallelism, job.architecture.moe
    tokens = job.micro_batch_size * job.sequence_length // layout.context_parallel_size
    if layout.sequence_parallel:
        tokens //= layout.tensor_parallel_size
    if moe is None:
        return 0
    options, rows = conventions(job), tokens * moe.num_experts_per_tok
    if job.framework == "megatron" and options["moe_pad_expert_input_to_capacity"]:
        return math.ceil(rows / moe.num_experts * float(options["moe_expert_capacity_factor"])) * moe.num_experts
    return rows


def fake_mode(num_nonzero: int | None = None, *, knows_values: bool = False) -> Any:
    """The mode in which every tensor is fake. `num_nonzero`: number of true entries of a mask, when code asks.
    `knows_values`: small tensors have values if they follow from the batch's."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    from peakcast.collectors.tracing import ones
    from peakcast.collectors.tracing.cache_keys import CheaperKeys
    from peakcast.collectors.tracing.known_values import KnownValuesMode

    base: Any = KnownValuesMode if knows_values else CheaperKeys

    class AnsweringMode(base):  # type: ignore[misc]
        """Answers `.item()`: 1 for a number (step counters and norms are read back, never shapes), False for a boolean (OPT
        asks whether to drop a layer) unless it says that all of a mask of ones is true. A mask that selects elements
        selects all."""

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                result = super().dispatch(func, types, args, kwargs or {})
            except DataDependentOutputException:
                asked = args[0] if args and getattr(args[0], "dtype", None) is torch.bool else None
                return 1.0 if asked is None else ones.are_ones(asked)
            except DynamicOutputShapeException:
                if func is torch.ops.aten.nonzero.default:
                    chosen = args[0].numel() if num_nonzero is None else num_nonzero
                    with self:
                        return args[0].new_empty((chosen, args[0].ndim), dtype=torch.int64)
                if func is not torch.ops.aten.index.Tensor or len(args[1]) != 1:
                    raise
                tensor, (mask,) = args
                with self:
                    return tensor.new_empty((mask.numel(), *tensor.shape[mask.ndim :]))
            if not knows_values:
                ones.note(func, args, result)
            return result

    return AnsweringMode(allow_non_fake_inputs=True)


def _generate(job: TrainingJob, tracer: Any) -> tuple[int, int]:
    """Run prefill and decoding of `job`, all as forward. Returns (first operation, end)."""
    from peakcast.collectors.stacks import build_inference

    inference = build_inference(job, "cuda:0")
    tracer.name(inference.model.named_parameters(), Category.PARAMETERS)
    start = tracer.now
    tracer.phase = Phase.FORWARD
    with tracer.watching(inference.model):
        inference.generate()
    return start, tracer.now
