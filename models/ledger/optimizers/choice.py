"""Which rule describes a job's optimizer. The rules are in this folder, one file for each library or family."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from peakcast.core.errors import SpecError, near_misses
from peakcast.jobs.conventions import conventions, torch_release
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.optimizers import adam_mini, low_bit, others, pytorch
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options
from peakcast.models.ledger.parameters.inventory import head_parameters, layer_parameters

RULES: dict[tuple[str, str, str], OptimizerRule] = {
    **{(name, "torch", implementation): rule for (name, implementation), rule in pytorch.RULES.items()},
    **{(name, "bitsandbytes", implementation): rule for (name, implementation), rule in low_bit.BITSANDBYTES.items()},
    **{(name, "torchao", implementation): rule for (name, implementation), rule in low_bit.TORCHAO.items()},
    **others.RULES,
    **adam_mini.RULES,
}
"""(name, library, implementation) -> rule; implementation "" if a library has only one. If several libraries have the
optimizer, the first is used unless the framework has a convention `<name>_library`."""


COPIES_ON_THE_HOST = (2, 6)
"""The first torch whose Inductor copies what a timed kernel writes to the host, where the copy would raise the peak
(pytorch/pytorch pull request 136701, October 2024; 2.5 `_inductor/runtime/triton_heuristics.py` `clone_args`)."""

WIDE_CODES = (2, 5)
"""The first torch whose compiled update of 4-bit states is counted with wide codes. torchao's own table (torch 2.4) leaves
at most 11.6 bytes per element for its update; with codes in 8 bytes it is 24, which is what Inductor of torch 2.13 makes of
it. No release between the two was looked at."""

IN_PLACE_DENOMINATOR = (2, 1)
"""The first torch whose foreach Adam and AdamW add eps in place (pytorch/pytorch pull request 104898, July 2023; torch 2.0
optim/adam.py and adamw.py `_multi_tensor_adam`: `denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`)."""


def optimizer_rule(job: TrainingJob) -> OptimizerRule:
    """The rule of the job's optimizer. Raises: SpecError if there is none, naming those that exist."""
    name, implementation = job.optimizer.name, _implementation(job)
    libraries = list(dict.fromkeys(library for known, library, _ in RULES if known == name))
    library = str(conventions(job).get(f"{name}_library", libraries[0] if libraries else ""))
    rule = RULES.get((name, library, "")) or RULES.get((name, library, implementation))
    if rule is None:
        known = sorted({"/".join(filter(None, key)) for key in RULES})
        raise SpecError(
            f"optimizer.name={name!r} of {library or 'any library'} with implementation={implementation!r} is not modelled"
            f"{near_misses(f'{name}/{library}/{implementation}', known)}; modelled: {', '.join(known)}.",
            parameter="optimizer.name",
            value=name,
        )
    return _in_backward(rule) if conventions(job).get("optimizer_in_backward") and not rule.updates_in_backward else rule


@lru_cache(maxsize=64)
def _in_backward(rule: OptimizerRule) -> OptimizerRule:
    """The rule with an optimizer for each parameter, which steps as soon as the gradient is ready."""
    return replace(rule, updates_in_backward="at_once")


def adamw_rule(job: TrainingJob) -> OptimizerRule:
    """The rule of the AdamW that updates the parameters which the job's optimizer leaves out."""
    return RULES["adamw", "torch", _implementation(job)]


def _implementation(job: TrainingJob) -> str:
    """Which implementation of the optimizer runs. The Trainer steps parameter by parameter if some are DTensors and some
    are not, as its tensor parallelism leaves them (transformers 5.17 trainer_optimizer.py `_get_adamw_torch`)."""
    if job.framework != "huggingface" or job.parallelism.tensor_parallel_size == 1:
        return job.optimizer.implementation
    architecture, full = job.architecture, job.finetuning.method == "full"
    tensors = (*layer_parameters(architecture, 0), *head_parameters(architecture))
    left_whole = any(tensor.tensor_parallel_dim is None for tensor in tensors) or not architecture.tie_word_embeddings
    return "loop" if left_whole or not full else job.optimizer.implementation


def optimizer_options(job: TrainingJob, step: str) -> Options:
    """What the rules depend on besides tensors, in the "first" or a "steady" step."""
    return Options(
        momentum=job.optimizer.momentum,
        decays_gradients=job.optimizer.decays_gradients,
        rank=int(conventions(job).get("galore_rank", Options().rank)),
        head_elements=job.architecture.hidden_size**2 // job.architecture.num_attention_heads,
        first_step=step == "first",
        trainer=bool(conventions(job).get("trainer")),
        times_kernels_on_copies=torch_release(job.versions) < COPIES_ON_THE_HOST,
        keeps_wide_codes=torch_release(job.versions) >= WIDE_CODES,
        adds_epsilon_in_place=torch_release(job.versions) >= IN_PLACE_DENOMINATOR,
    )
