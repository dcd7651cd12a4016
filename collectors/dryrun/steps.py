"""Follows a script's training steps from outside: networks when they first run, optimizers when they step."""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from peakcast.collectors.dryrun.attributes import cached_tensors, checkpointing_of, gradient_bytes
from peakcast.collectors.dryrun.evaluation import Evaluations
from peakcast.collectors.dryrun.idle_steps import IdleSteps
from peakcast.collectors.dryrun.lengths import NUM_STEPS, StepLengths
from peakcast.collectors.dryrun.patience import Patience
from peakcast.collectors.dryrun.wrapped import engine_steps
from peakcast.collectors.tracing.phases import announced, inside_backward
from peakcast.collectors.tracing.quantized_constants import constants_of
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.timelines.timeline import Category, Phase, Timeline


class LastSteps(Protocol):
    """What leads a script to its last steps."""

    counts: bool

    @property
    def began(self) -> bool:
        """Whether it has done so."""

    def end_step(self) -> None:
        """A step has ended."""

    def goes_on(self) -> bool:
        """Whether to follow another step."""

    def said(self, error: str = "") -> tuple[str, ...]:
        """Sentences about these steps, after which they count or not. `error`: why they were not followed."""


class ScriptSteps:
    """Tells `tracer` what the script is doing. Calls `enough` when as many steps have ended as `lengths` requires; it waits
    until the next forward begins, so that gradients freed after the last step are seen."""

    def __init__(
        self,
        tracer: Tracer,
        enough: Callable[[], None],
        lengths: StepLengths,
        evaluations: Evaluations,
        patience: Patience,
    ) -> None:
        self.tracer = tracer
        self.evaluations = evaluations
        self.lengths = lengths
        self.patience = patience
        self.idle = IdleSteps()
        self.later: LastSteps | None = None
        self.spans: list[tuple[int, int]] = []
        """(first operation, end) of each step; the first one begins with the script."""
        self.networks: list[torch.nn.Module] = []
        """Outermost modules, in the order in which they first ran."""
        self.optimizers: list[Any] = []
        """Optimizers that step, in the order in which they first did."""
        self.micro_batches = 0
        """Number of micro-batches of the last step that has ended: of its backwards, but not more than its networks ran
        forward, as a loss may go backward in pieces (torchtitan's `ChunkedCELoss`)."""
        self.tokens: tuple[int, ...] = ()
        """Shape of the largest batch of tokens that an embedding got."""
        self.inputs: tuple[int, ...] = ()
        """Shape of the largest input of a network whose embedding was not seen."""
        self.batches: list[int] = []
        """Tokens of the largest input of a network in each step."""
        self.autocast: torch.dtype | None = None
        """The dtype of autocast, if a network ran under it."""
        self.loop = ""
        """The package whose loop calls the optimizer: "transformers" (its Trainer) or "accelerate"; "" for the script's
        own."""
        self.trainer: Any = None
        """The Trainer whose loop that is."""
        self.ran: set[int] = set()
        """Identities of the modules that ran in training."""
        self.checkpointing: dict[int, dict[str, Any]] = {}
        """Identity of a network -> its activation checkpointing when the optimizer stepped."""
        self.output_bytes = 0
        """Bytes of what a network returned, beside the loss, that still exist when the optimizer steps."""
        self.cache_bytes = 0
        """Bytes of keys and values that a network returned and that still exist when the optimizer steps."""
        self.gradient_bytes = 0
        """Bytes on the GPU of gradients of the step before while a network runs forward: `zero_grad` comes later, or keeps
        them."""
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._cached: list[weakref.ref[torch.Tensor]] = []
        self._enough = enough
        self._replays = 0
        """Replays of CUDA graphs since the optimizer has stepped."""
        self._widest = 0
        """Length of the vectors of the embedding from which `tokens` are."""
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._depth = 0
        self._batch = 0
        """Tokens of the largest input of a network since the last step."""
        self._stepped = False
        self._backwards = 0
        self._forwards = 0
        """Forwards of outermost networks, to be trained, since the last step."""
        self._has_gradients = False
        self._after_step: int | None = None
        """The first operation after the last step of an optimizer, while no module has run: functions of tensors do not say
        where their forward begins."""

    def follow(self) -> None:
        """Begin to follow, permanently."""
        self._announced = announced(self.tracer)
        self._announced.__enter__()
        module_hooks.register_module_forward_pre_hook(self._forward_begins)
        module_hooks.register_module_forward_hook(lambda *given: self._forward_ends(given[-1]), always_call=True)
        optimizer_hooks.register_optimizer_step_pre_hook(self._step_begins)
        optimizer_hooks.register_optimizer_step_post_hook(self._step_ended)
        backward = torch.autograd.Variable._execution_engine.run_backward

        def counted(*arguments: Any, accumulate_grad: bool = False, **keywords: Any) -> Any:
            """Counts what `torch.autograd.backward` asks autograd's engine for, which Megatron-LM asks itself; not what
            `torch.autograd.grad` asks for, which leaves no gradients."""
            if accumulate_grad and not inside_backward():
                if self._stepped and self._after_step is not None:
                    self._end_step(self._after_step)
                    if self.lengths.enough:
                        self._enough()
                self.goes_back()
                self.tracer.phase = Phase.BACKWARD
                self._backwards += 1
            answer = backward(*arguments, accumulate_grad=accumulate_grad, **keywords)
            if accumulate_grad:
                self._has_gradients = self._has_gradients or not self._gradients_are_gone()
            return answer

        torch.autograd.Variable._execution_engine = _Engine(counted)

    def timelines(self) -> dict[str, Timeline]:
        """Timelines of the first step, of the later step with most bytes, and of the whole "run". If a script has
        evaluated, an evaluation after its last step is added, with everything that exists then."""
        self._name_unmet()
        self._name_lasting()
        again = self.evaluations.fullest()
        later = [self.tracer.timeline(*span) for span in self.spans[1:-1]]
        last = self.tracer.timeline(*self.spans[-1], again)
        return {
            "first": self.tracer.timeline(*self.spans[0]),
            "steady": max((last, *later), key=lambda step: step.peak().num_bytes),
            "run": self.run(),
        }

    def run(self, *, kept: bool = True) -> Timeline:
        """The timeline of the whole run; `kept`: with what NCCL keeps beyond a step."""
        return self.tracer.timeline(0, self.spans[-1][1], self.evaluations.fullest(), kept=kept)

    def evaluated(self) -> tuple[str, ...]:
        """Sentences about evaluations, which afterwards are in the form in which they count."""
        held = (one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"])
        return self.evaluations.said({id(one) for one in held}, self.spans[-1][1])

    def close(self) -> None:
        """End a step that was not followed by another forward."""
        if self._stepped:
            self._end_step()

    def replayed(self) -> None:
        """Note that a CUDA graph is replayed. A loop that does nothing else has no further forward."""
        self._replays = self._replays + 1 if self._stepped else 0
        if self._replays >= NUM_STEPS:
            self._end_step()
            if self.lengths.enough:
                self._enough()

    def runs(self, network: torch.nn.Module) -> None:
        """Called when an outermost module begins; for subclasses."""

    def goes_back(self) -> None:
        """Called when backward begins; for subclasses."""

    def _forward_begins(self, part: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._depth == 0 and next(part.parameters(), None) is None:  # a loss, or a transform of images
            return self.tracer._enter(part, self._names)
        outermost = self._depth == 0 and not inside_backward()
        self._depth += 1
        if outermost:
            if self._stepped or self._stepped_by_itself():
                self._end_step()
            begins = self.evaluations.forward_begins(part) or self.tracer.phase == Phase.OPTIMIZER_STEP
            if self.lengths.enough and not self._goes_on(part):
                self._enough()
            if id(part) not in self._names:
                self._meet(part)
            if torch.is_grad_enabled():
                batch = _batch(inputs)
                self.inputs, self._batch = max(self.inputs, batch, key=math.prod), max(self._batch, math.prod(batch))
                self._count_forward(part)
            self.runs(part)
            if begins or (self.tracer.phase == Phase.INIT and torch.is_grad_enabled()):
                self.tracer.phase = Phase.FORWARD
        if self.autocast is None and torch.is_autocast_enabled("cuda"):
            self.autocast = torch.get_autocast_dtype("cuda")
        trains = torch.is_grad_enabled()  # batches of an evaluation do not count
        if trains:
            self.ran.add(id(part))
        if trains and isinstance(part, torch.nn.Embedding) and inputs and isinstance(inputs[0], torch.Tensor):
            self._saw_tokens(part.embedding_dim, _shape(inputs[0]))
        self.tracer._enter(part, self._names)

    def _saw_tokens(self, width: int, shape: tuple[int, ...]) -> None:
        """Note what an embedding got that gives vectors of `width` numbers. The widest one is that of tokens: T5 has a
        narrower one for the distances of all pairs of positions."""
        if width > self._widest:
            self._widest, self.tokens = width, ()
        if width == self._widest:
            self.tokens = max(self.tokens, shape, key=math.prod) if self.tokens else shape
            self.lengths.saw(shape[-1] if shape else 1)

    def _goes_on(self, network: torch.nn.Module) -> bool:
        """Whether to go on with an outermost forward of `network` although enough steps have ended. Where that would take
        too long for an evaluation that is still to come, steps are idle until then."""
        if self.evaluations.awaited(network, self.spans[-1][1]):
            self.idle.end()
            return True
        if torch.cuda.is_current_stream_capturing():
            return True
        if self.later is not None and self.later.began:
            return self.later.goes_on()
        evaluates = self.evaluations.come_later
        if not self.idle.began and self.patience.goes_on(evaluates_later=evaluates):
            return True
        if not (evaluates and any(network is one for one in self.networks) and self.patience.idles()):
            self.idle.end()
            return self.later is not None and self.later.goes_on()
        if not self.idle.began:
            self.evaluations.say_idle(len(self.spans))
        self.idle.begin(network)
        return True

    def _forward_ends(self, outputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)
            self.tracer._leave()
            if self._depth == 0 and torch.is_grad_enabled() and not inside_backward():
                tensors = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else ()
                self._outputs = [weakref.ref(one) for one in tensors if isinstance(one, torch.Tensor) and one.ndim > 1]
                self._cached = [weakref.ref(one) for one in cached_tensors(outputs)]

    def _meet(self, network: torch.nn.Module) -> None:
        """Give its modules and parameters names."""
        gc.collect()  # objects that wrapping has replaced are in reference cycles
        self.networks.append(network)
        for name, part in network.named_modules():
            self._names.setdefault(id(part), _plain(name))
        for name, parameter in network.named_parameters():
            self._parameters.setdefault(id(parameter), _plain(name))
        weights = [*network.named_parameters(), *constants_of(network)]
        self.tracer.name(((_plain(name), one) for name, one in weights), Category.PARAMETERS)

    def _name_unmet(self) -> None:
        """Name the weights of modules that never ran by themselves and are in no network that did, such as a teacher that a
        module of the script keeps in a list."""
        modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module) and id(one) not in self._names]
        for module in modules:
            held = vars(module).get("_parameters") or {}
            named = ((f"{type(module).__name__}.{name}", one) for name, one in held.items() if one is not None)
            self.tracer.name(named, Category.PARAMETERS)

    def _name_lasting(self) -> None:
        """Tensors without a name that are there from before the first forward until the last step are no step's inputs:
        buffers of networks, and of DeepSpeed for gradients."""
        begin, end = self.spans[-1]
        last = begin or end
        for number, one in self.tracer._entries.items():
            made_before = one.born < len(self.tracer._phases) and self.tracer._phases[one.born] == Phase.INIT
            if made_before and (one.dies is None or one.dies >= last) and number not in self.tracer._named:
                self.tracer._named[number] = (Category.OTHER, one.name)

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.tracer.name(((self._called(one), one) for one in held), Category.PARAMETERS)
        gradients = ((f"{self._called(one)}.grad", one.grad) for one in held if one.grad is not None)
        self.tracer.name(gradients, Category.GRADIENTS)
        self.tracer.phase = Phase.OPTIMIZER_STEP
        if not self.loop:
            self.loop, self.trainer = _loop()
        self.checkpointing = {id(one): checkpointing_of(one) for one in self.networks}
        self.output_bytes = sum(one.nbytes for output in self._outputs if (one := output()) is not None)
        self.cache_bytes = sum(one.nbytes for kept in self._cached if (one := kept()) is not None)

    def _step_ended(self, optimizer: Any, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                tensors = ((key, one) for key, one in state.items() if isinstance(one, torch.Tensor))
                named = ((f"{self._called(parameter)}.{key}", one) for key, one in tensors)
                self.tracer.name(named, Category.OPTIMIZER_STATES)
        self._stepped = True
        if not self.networks:
            self._after_step, self.tracer.phase = self.tracer.now, Phase.FORWARD

    def _called(self, parameter: Any) -> str:
        return self._parameters.get(id(parameter), "parameter")

    def _stepped_by_itself(self) -> bool:
        """Whether something that is no `torch.optim.Optimizer` has stepped: gradients that backward made were released, and
        not to an engine, which adds up its own until its optimizer steps."""
        watches = not self.optimizers and self._has_gradients and torch.is_grad_enabled()
        watches = watches and not engine_steps(self.networks)
        return watches and self._gradients_are_gone()

    def _gradients_are_gone(self) -> bool:
        return all(one.grad is None for network in self.networks for one in network.parameters())

    def _count_forward(self, network: torch.nn.Module) -> None:
        """Count a forward of an outermost `network`, and at a step's first the gradients of the step before."""
        self._forwards += any(network is one for one in self.networks)
        if self._forwards == 1 and self.spans and not self._backwards:
            self.gradient_bytes = gradient_bytes(self.networks)

    def _end_step(self, end: int | None = None) -> None:
        """End a step, now or at an operation that was the last one's `end`. Idle ones belong to the next that is not."""
        if self.later is not None:
            self.later.end_step()
        if self.idle.going:
            self._stepped = self._has_gradients = False
            self._backwards = self._forwards = 0
            return
        if end is None:
            gc.collect()  # compiling leaves reference cycles
            self.tracer.launched("step ends", ())
            end = self.tracer.now
        start = self.spans[-1][1] if self.spans else 0
        self.spans.append((start, end))
        self.batches.append(self._batch)
        self._batch = 0
        self.lengths.end_step()
        self.patience.end_step()
        self._stepped = self._has_gradients = False
        self._after_step = None
        self.micro_batches = min(self._backwards, self._forwards or self._backwards)
        self._backwards = self._forwards = 0


LOOPS = {"transformers.trainer": "transformers", "accelerate.optimizer": "accelerate"}
"""Modules that call optimizers -> packages."""


def _loop() -> tuple[str, Any]:
    """(the package of the outermost of `LOOPS` that is running, the object whose method that is); ("", None) if none is."""
    found: tuple[str, Any] = ("", None)
    frame = inspect.currentframe()
    while frame is not None:
        if (package := LOOPS.get(frame.f_globals.get("__name__", ""))) is not None:
            found = (package, frame.f_locals.get("self"))
        frame = frame.f_back
    return found


class _Engine(type(torch.autograd.Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which runs backward by `run_backward`."""

    def __init__(self, run_backward: Callable[..., Any]) -> None:
        super().__init__()
        self.run_backward = run_backward


def _batch(inputs: Any) -> tuple[int, ...]:
    """(number, length) of the rows of a batch, from all dimensions of tokens, and from all but the last of other
    tensors. An image, which has more dimensions, is one row of length 1."""
    given = [one for one in inputs if isinstance(one, torch.Tensor)]
    tokens = (_shape(one) for one in given if one.ndim and not (one.is_floating_point() or one.dtype is torch.bool))
    others = ((one.shape[0], 1) if one.ndim > 3 else _shape(one)[:-1] for one in given if one.ndim > 1)
    return next(tokens, None) or next(others, ())


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a jagged one, with the mean length of its rows."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    rows, values = tensor.shape[0], tensor.values().shape
    return (rows, values[0] // rows, *values[1:])


def _plain(name: str) -> str:
    """A name without the parts that wrappers insert."""
    for wrapper in ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
        name = name.replace(f"{wrapper}.", "").removesuffix(wrapper)
    return name.removeprefix("module.")
