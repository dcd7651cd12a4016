"""The blocks of a Hugging Face network: which template each layer has, and how layers run forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.embedding import embedding
from peakcast.models.ledger.huggingface.blocks.hybrid import layer_template
from peakcast.models.ledger.huggingface.checkpoint import recompute
from peakcast.models.ledger.huggingface.contexts import context_again, keeping_matmuls, layer_contexts
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template


class Blocks:
    """The templates of one job's network. Equal layers share one context object, whose template is made once."""

    def __init__(self, job: TrainingJob, context: HFContext) -> None:
        self.job = job
        self.context = context
        self.contexts = layer_contexts(context, job)
        recomputed = [*map(job.activation_checkpointing.recomputes, range(job.architecture.num_hidden_layers))]
        self.recomputed = recomputed
        self.compiled = _compiled_alone(job, self.contexts)
        # accelerate's FSDP2 compiles layers in place: their hooks break the graph, inside the checkpoint
        around = job.framework == "huggingface" and job.parallelism.world_size > 1
        around = around or bool(conventions(job).get("checkpoints_around_compiled"))
        self.checkpointed = [
            again and (around or not compiled) for again, compiled in zip(recomputed, self.compiled, strict=True)
        ]
        """Which layers are recomputed before their backward. What other compiled layers recompute is part of their
        backward."""
        self._made: dict[tuple[int, bool, bool], Template] = {}

    def network(self) -> Template | None:
        """One template for the whole network if it is compiled as a whole; else None."""
        alone = self.job.parallelism.world_size == 1 and not self.job.offload.activations
        if not (self.job.compile and alone):
            return None
        from peakcast.models.ledger.compiled.network import compiled_network, is_compiled_whole

        if not is_compiled_whole(self.context):
            return None
        contexts = [keeping_matmuls(self.job, one) for one in dict.fromkeys(self.contexts)]
        kinds = {kind: index for index, kind in enumerate(dict.fromkeys(self.contexts))}
        return compiled_network(tuple(contexts), tuple(kinds[one] for one in self.contexts), tuple(self.recomputed))

    def embedding(self) -> Template:
        """The template of the embedding, whose output requires a gradient if the first layer needs it."""
        requires_grad = self.contexts[0].layer.input_requires_grad
        return embedding(replace(self.context, layer=replace(self.context.layer, input_requires_grad=requires_grad)))

    def layer(self, index: int, *, input_held: bool = False) -> Template:
        """The template of layer `index`. `input_held`: something outside the layer keeps its input alive."""
        one = self.contexts[index]
        key = id(one), self.recomputed[index], input_held
        if key not in self._made:
            one = self._as_run(index, input_held)
            inside = self.recomputed[index] and not self.checkpointed[index]
            self._made[key] = _compiled(one, inside) if self.compiled[index] else layer_template(one)
        return self._made[key]

    def layer_again(self, index: int) -> Template:
        """The template of the checkpointed layer `index` as its backward runs it."""
        template = self.layer(index)
        if self.compiled[index]:
            return template
        return layer_template(context_again(self.job, self._as_run(index), template.reads_saved_first))

    def _as_run(self, index: int, input_held: bool = False) -> HFContext:
        """The context of layer `index`, with what its checkpoint changes."""
        one = self.contexts[index]
        if self.recomputed[index]:
            one = keeping_matmuls(self.job, one)
        if input_held or self.checkpointed[index]:
            reentrant = self.job.activation_checkpointing.use_reentrant
            one = replace(one, backward=replace(one.backward, checkpointed=True, reentrant=reentrant))
        return one

    def forward(
        self, step: Step, layers: Iterable[int], *, keeps_gradients: bool = True, input_held: bool = False
    ) -> dict[int, BlockRun]:
        """Run `layers` forward and return their runs by index. `input_held`: something keeps the first one's input
        alive."""
        runs: dict[int, BlockRun] = {}
        for index in layers:
            template, module = self.layer(index, input_held=input_held and not runs), f"layers.{index}"
            if self.checkpointed[index]:
                runs[index] = step.run_without_graph(template, module)
            else:
                runs[index] = step.run_forward(template, module, keeps_gradients=keeps_gradients)
        return runs

    def backward(
        self,
        step: Step,
        runs: Mapping[int, BlockRun],
        *,
        keeps_gradients: bool = True,
        input_held: bool = False,
        gradient_held: bool = False,
    ) -> None:
        """Run the backward of the runs that `forward` returned. `gradient_held`: something outside the last layer keeps the
        gradient that comes into it alive."""
        first, last = min(runs, default=0), max(runs, default=0)
        for index, run in reversed(list(runs.items())):
            if self.checkpointed[index]:
                held = {"input_held": input_held and index == first, "gradient_held": gradient_held and index == last}
                recompute(step, run, self.job, keeps_gradients, template=self.layer_again(index), **held)
            else:
                run.keeps_gradients = keeps_gradients
                step.run_backward(run)


def _compiled_alone(job: TrainingJob, contexts: Sequence[HFContext]) -> list[bool]:
    """Which layers are compiled one by one. (Modules about compiled graphs are imported only if something is compiled.)"""
    if not job.compile or job.offload.activations:
        return [False] * len(contexts)
    from peakcast.models.ledger.compiled.layer import is_compiled_alone

    return [is_compiled_alone(one) for one in contexts]


def _compiled(context: HFContext, recomputes: bool) -> Template:
    """The template of a compiled layer; `recomputes`: its backward recomputes what checkpointing does not keep."""
    from peakcast.models.ledger.compiled.layer import compiled_layer

    return compiled_layer(context, recomputes)
