"""Real optimizers by the names that jobs use. If a package is missing, the error says what to install."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from peakcast.collectors.machine.packages import imported
from peakcast.core.errors import CollectorError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import DECAYING_GRADIENTS, TrainingJob

LEARNING_RATE = 1e-5


class Together:
    """Several optimizers that step as one, as in a loop with Muon for matrices and AdamW for the other parameters."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [part for part in parts if part.param_groups]
        self.defaults = self.parts[0].defaults
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all of them."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Step each."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Release all gradients."""
        for part in self.parts:
            part.zero_grad()


class InBackward(Together):
    """An optimizer for each parameter. It steps and releases the gradient as soon as backward has made it (torchtune 0.6
    `OptimizerInBackward`, `register_optim_in_bwd_hooks`)."""

    def __init__(self, build: Callable[[Any], Any], parameters: Sequence[Any]) -> None:
        parts = [build(parameter) for parameter in parameters]
        super().__init__(*parts)
        self._own = dict(zip(parameters, parts, strict=True))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Any) -> None:
        self._own[parameter].step()
        self._own[parameter].zero_grad()

    def step(self) -> None:
        """Nothing to do: all have stepped during backward."""


def build_optimizer(job: TrainingJob, model: Any) -> Any:
    """The job's optimizer over the trained parameters of `model`: in two groups as the Trainer has them, or in one as a
    plain loop."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [trained]
    if job.framework == "huggingface":
        decaying = _decaying(model, job)
        groups = [[p for p in trained if p in decaying], [p for p in trained if p not in decaying]]
    name = job.optimizer.name
    builder = BUILDERS.get((name, str(conventions(job).get(f"{name}_library", ""))))
    if builder is None:
        known = ", ".join(sorted({"/".join(filter(None, key)) for key in BUILDERS}))
        raise CollectorError(
            f"optimizer.name={name!r} has no collector yet; measure one of {known}.", parameter="optimizer.name", value=name
        )
    if job.framework_options.get("optimizer_in_backward"):
        return InBackward(lambda parameter: builder(job, model, [[parameter]]), trained)
    return builder(job, model, [group for group in groups if group])


def _decaying(model: Any, job: TrainingJob) -> set[Any]:
    """The parameters of the Trainer's first group, which it knows by their names and modules: all but biases and norms, so
    also FSDP1's flat parameters and DoRA's vectors."""
    from transformers import Trainer

    names = {name.replace("_fsdp_wrapped_module.", "") for name in Trainer.get_decay_parameter_names(None, model)}
    return {parameter for name, parameter in model.named_parameters() if name.replace("_fsdp_wrapped_module.", "") in names}


Groups = Sequence[list[Any]]
Builder = Callable[[TrainingJob, Any, Groups], Any]


def _pytorch(kind: str, *, has_fused: bool = True, **options: Any) -> Builder:
    def build(job: TrainingJob, model: Any, groups: Groups) -> Any:
        implementation = job.optimizer.implementation
        if job.framework == "huggingface" and job.parallelism.tensor_parallel_size > 1:
            from transformers.trainer_optimizer import has_mixed_dtensor

            if has_mixed_dtensor(parameter for group in groups for parameter in group):
                implementation = "loop"  # as in `_get_adamw_torch`
        switches = {"foreach": implementation == "foreach", **({"fused": implementation == "fused"} if has_fused else {})}
        parts = _as_groups(groups)
        if job.optimizer.name in DECAYING_GRADIENTS:
            decaying = _decaying(model, job) if job.framework == "huggingface" else None
            for part in parts:  # the Trainer's second group does not decay
                decays = decaying is None or part["params"][0] in decaying
                part["weight_decay"] = job.optimizer.weight_decay if decays else 0.0
        return getattr(torch.optim, kind)(parts, lr=LEARNING_RATE, **switches, **options)

    return build


def _sgd(job: TrainingJob, model: Any, groups: Groups) -> Any:
    return _pytorch("SGD", momentum=job.optimizer.momentum)(job, model, groups)


def _muon(job: TrainingJob, model: Any, groups: Groups) -> Any:
    matrices = [parameter for group in groups for parameter in group if parameter.ndim == 2]
    others = [parameter for group in groups for parameter in group if parameter.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=LEARNING_RATE)
    return Together(muon, *([_pytorch("AdamW")(job, model, [others])] if others else []))


def _from_package(module: str, kind: str, package: str, **options: Any) -> Builder:
    def build(job: TrainingJob, model: Any, groups: Groups) -> Any:
        return getattr(_imported(module, package, job), kind)(_as_groups(groups), lr=LEARNING_RATE, **options)

    return build


def _bitsandbytes(kind: str) -> Builder:
    """Builder of a bitsandbytes optimizer. With the Trainer, embeddings have 32-bit states (transformers 5.17 trainer.py
    `create_optimizer`)."""

    def build(job: TrainingJob, model: Any, groups: Groups) -> Any:
        optimizer = _from_package("bitsandbytes.optim", kind, "bitsandbytes")(job, model, groups)
        if kind.endswith("8bit") and job.framework == "huggingface":
            manager = _imported("bitsandbytes.optim", "bitsandbytes", job).GlobalOptimManager.get_instance()
            for part in model.modules():
                if isinstance(part, torch.nn.Embedding):
                    manager.register_module_override(part, "weight", {"optim_bits": 32})
        return optimizer

    return build


def _galore(job: TrainingJob, model: Any, groups: Groups) -> Any:
    """GaLore as the Trainer makes it with optim_target_modules="all-linear" (transformers 5.17 trainer_optimizer.py)."""
    linear = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Linear)}
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    projected = [p for p in everything if id(p) in linear - embeddings]
    others = [p for p in everything if id(p) not in linear - embeddings]
    rank = int(conventions(job)["galore_rank"])
    target = {"params": projected, "rank": rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    kind = _imported("galore_torch", "galore-torch", job).GaLoreAdamW
    return kind([{"params": others}, target], lr=LEARNING_RATE, no_deprecation_warning=True)


def _adam_mini(job: TrainingJob, model: Any, groups: Groups) -> Any:
    """Adam-mini as LLaMA-Factory makes it (train/trainer_utils.py `_create_adam_mini_optimizer`), over all parameters."""
    network = job.architecture
    return _imported("adam_mini", "adam-mini", job).Adam_mini(
        model.named_parameters(),
        lr=LEARNING_RATE,
        dim=network.hidden_size,
        n_heads=network.num_attention_heads,
        n_kv_heads=network.num_key_value_heads,
        verbose=False,
    )


def _lomo(kind: str) -> Builder:
    def build(job: TrainingJob, model: Any, groups: Groups) -> Any:
        return getattr(_imported("lomo_optim", "lomo-optim", job), kind)(model, lr=LEARNING_RATE)

    return build


def _imported(module: str, package: str, job: TrainingJob) -> Any:
    return imported(module, package, parameter="optimizer.name", value=job.optimizer.name)


def _as_groups(groups: Groups) -> list[dict[str, Any]]:
    return [{"params": group} for group in groups]


BUILDERS: dict[tuple[str, str], Builder] = {
    ("adamw", ""): _pytorch("AdamW"),
    ("adam", ""): _pytorch("Adam"),
    ("sgd", ""): _sgd,
    ("adagrad", ""): _pytorch("Adagrad"),
    ("rmsprop", "torch"): _pytorch("RMSprop", has_fused=False),
    ("rmsprop", "bitsandbytes"): _bitsandbytes("RMSprop"),
    ("rmsprop_8bit", ""): _bitsandbytes("RMSprop8bit"),
    ("adafactor", "torch"): _pytorch("Adafactor", has_fused=False),
    ("adafactor", "transformers"): _from_package(
        "transformers.optimization", "Adafactor", "transformers", scale_parameter=False, relative_step=False
    ),
    ("muon", ""): _muon,
    ("lion", "lion_pytorch"): _from_package("lion_pytorch", "Lion", "lion-pytorch"),
    ("lion", "bitsandbytes"): _bitsandbytes("Lion"),
    ("lion_8bit", ""): _bitsandbytes("Lion8bit"),
    ("adamw_8bit", "bitsandbytes"): _bitsandbytes("AdamW8bit"),
    ("paged_adamw_8bit", ""): _bitsandbytes("PagedAdamW8bit"),
    ("paged_adamw_32bit", ""): _bitsandbytes("PagedAdamW32bit"),
    ("paged_lion_8bit", ""): _bitsandbytes("PagedLion8bit"),
    ("paged_lion_32bit", ""): _bitsandbytes("PagedLion32bit"),
    ("ademamix", ""): _bitsandbytes("AdEMAMix"),
    ("ademamix_8bit", ""): _bitsandbytes("AdEMAMix8bit"),
    ("paged_ademamix_32bit", ""): _bitsandbytes("PagedAdEMAMix32bit"),
    ("paged_ademamix_8bit", ""): _bitsandbytes("PagedAdEMAMix8bit"),
    ("adamw_8bit", "torchao"): _from_package("torchao.optim", "AdamW8bit", "torchao"),
    ("adamw_4bit", ""): _from_package("torchao.optim", "AdamW4bit", "torchao"),
    ("adamw_fp8", ""): _from_package("torchao.optim", "AdamWFp8", "torchao"),
    ("galore", ""): _galore,
    ("adam_mini", ""): _adam_mini,
    ("lomo", ""): _lomo("Lomo"),
    ("adalomo", ""): _lomo("AdaLomo"),
}
"""(name, library if several have it) -> function that builds the optimizer."""
