"""Training methods with a loss other than the next-token loss (DPO and similar ones): what they change in a job, or why
they are refused.

Sources: trl 1.16.0 trainer/dpo_trainer.py and reward_trainer.py, trl 0.13-0.24 dpo_trainer.py `concatenated_forward`
(chosen and rejected sequences in one batch); orpo_trainer.py, cpo_trainer.py (the same batch, no reference).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.generation import Generation
from peakcast.dialects.common.translation import Notes
from peakcast.jobs.conventions import makes_whole_logits
from peakcast.jobs.images import IMAGE_CLASSIFIER, compares_images
from peakcast.jobs.loss import REFERRING, Loss, LossKind
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.undescribed import classifier_of_images


class Method(NamedTuple):
    """How a method's step differs from supervised fine-tuning."""

    sequences: int
    """Sequences that pass through the network for each sample."""
    kind: LossKind
    """The job's loss kind; cross entropy for losses that are not modelled."""


METHODS: dict[str, Method] = {
    "sft": Method(1, "cross_entropy"),
    "pt": Method(1, "cross_entropy"),
    "dpo": Method(2, "dpo"),
    "ipo": Method(2, "dpo"),
    "rm": Method(2, "reward"),
    "reward": Method(2, "reward"),
    "prm": Method(1, "reward"),
    "orpo": Method(2, "cross_entropy"),
    "cpo": Method(2, "cross_entropy"),
    "simpo": Method(2, "cross_entropy"),
    "tpo": Method(3, "cross_entropy"),
    "kto": Method(1, "kto"),
    "bco": Method(1, "kto"),
    "grpo": Method(1, "grpo"),
    "rloo": Method(1, "grpo"),
    "gmpo": Method(1, "grpo"),
}
NOT_MODELLED = {
    "ppo": "PPO", "gkd": "distillation", "gold": "distillation", "distillation": "distillation", "minillm": "distillation",
    "dpo_online": "online DPO",
    "sdft": "self-distillation", "sdpo": "self-distillation", "iw_opd": "distillation", "online_dpo": "online DPO",
    "async_grpo": "GRPO with its completions made meanwhile", "a2po": "A*PO", "xpo": "XPO", "nash_md": "Nash-MD",
    "gspo": "GSPO", "gdpo": "GDPO", "ebft": "EBFT",
}  # fmt: skip


def method_of_program(program: str) -> str:
    """The training method in the name of a program, such as `scripts/online_dpo.py`; "" if it has none."""
    stem = re.sub(r"\W+", " ", program.lower().rsplit("/", 1)[-1]).replace("_", " ")
    words = (name.replace("_", " ") for name in (*NOT_MODELLED, *METHODS))  # "online_dpo" before "dpo"
    return next((word.replace(" ", "_") for word in words if re.search(rf"\b{word}\b", stem)), "")


KEYS_OF_METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("num_generations", "use_vllm"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "distillation": ("teacher_model_server_url", "lmbda", "distillation_mode", "teacher_server_urls"),
    "simpo": ("gamma_beta_ratio", "simpo_gamma"),
    "cpo": ("cpo_alpha",),
    "dpo": ("precompute_ref_log_probs", "beta", "rpo_alpha", "reference_free", "sync_ref_model"),
}
"""Keys by which TRL's trainers other than SFTTrainer are recognised."""


def method_of(program: str, training: Mapping[str, Any]) -> str:
    """The training method: by the name of the program, else by keys that only one trainer has, else sft."""
    if named := method_of_program(program):
        return named
    given = {key for key, value in training.items() if value is not None}
    return next((name for name, keys in KEYS_OF_METHODS.items() if given.intersection(keys)), "sft")


def method_called(name: str) -> Method:
    """The training method of that name; supervised fine-tuning if there is none."""
    return METHODS.get(name, METHODS["sft"])


def sequences_per_sample(program: str) -> int:
    """How many sequences pass through the network for each sample in the training method of `program`."""
    return method_called(method_of_program(program)).sequences


SCORING = re.compile(r"AutoModel|\w+For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)")
"""Classes of networks whose head has few outputs, or none, in the place of the vocabulary's."""
CLASSIFIERS: dict[str, Literal["sequence_classifier", "token_classifier"]] = {
    "SequenceClassification": "sequence_classifier",
    "TokenClassification": "token_classifier",
    "QuestionAnswering": "token_classifier",
}
"""What such a class is for -> the head of the architecture."""


def with_head(job: TrainingJob, model_class: str, notes: Notes) -> TrainingJob:
    """`job` with the head of `model_class`. Decoders and encoders get a classifier's head; begin and end of a span are two
    classes of each token. For other classes without logits, decoders get the head of a reward model and other networks keep
    the language model's, with a note."""
    network, found = job.architecture, SCORING.fullmatch(model_class)
    if compares_images(network.model_type) and model_class.endswith(IMAGE_CLASSIFIER):
        return job.replace(architecture=classifier_of_images(network))
    if found is None:
        explicit = model_class and network.head != "language_model"
        return job.replace(architecture=replace(network, head="language_model")) if explicit else job
    if network.kind in ("decoder", "encoder") and (head := CLASSIFIERS.get(found[1] or "")):
        labels = network.num_labels if network.head == head else 2
        network = replace(network, head=head, num_labels=labels)
        return job.replace(architecture=network, loss=replace(job.loss, fused_linear_cross_entropy=False))
    no_logits = f"{model_class} has no output for each word of the vocabulary; "
    if network.kind != "decoder":
        notes.unsupported.append(f"{no_logits}the head that predicts words is counted.", "loss.kind", "less")
        return job
    drops = network.attention_dropout or network.hidden_dropout or network.embedding_dropout
    notes.unsupported.append(
        f"{no_logits}the head of a reward model, which scores each sequence, is counted"
        f"{', without dropout' if drops else ''}.",
        "loss.kind",
        "more" if drops else "either",
    )
    return job.replace(loss=replace(job.loss, kind="reward", fused_linear_cross_entropy=False))


REFERENCES = {"model": "a frozen copy of the network", "adapter_off": "the network with its adapters switched off"}
"""Kind of reference -> what it is, where it is on the GPU during training."""


def with_method(
    job: TrainingJob,
    name: str,
    parameter: str,
    notes: Notes,
    *,
    precomputed: bool = False,
    generation: Generation | None = None,
    whole_logits: str = "",
    log_softmax: bool = False,
) -> TrainingJob:
    """`job` as the training method `name` runs it. `precomputed`: whether the reference's log-probabilities are computed
    before training. `generation`: the generation of GRPO and similar methods. `whole_logits`: the name of the project if it
    computes log-probabilities from the logits of all tokens at once, as trl did before 1.15; else "". `log_softmax`: if so,
    whether by the log-softmax of shifted logits, as trl did before 0.12.

    Raises: SpecError for methods that are not modelled, with what can be asked instead.
    """
    method = _known_method(name, parameter)
    if method == METHODS["sft"]:
        return job
    size = method.sequences * job.micro_batch_size
    _say_sequences_together(notes, name, method.sequences, job.micro_batch_size)
    if method.kind == "cross_entropy":
        sentence = f"The loss of {name} over log-probabilities is not modelled; the cross entropy's is assumed."
        notes.unsupported.append(sentence, parameter)
        return job.replace(micro_batch_size=size)
    if name.lower() == "prm":
        notes.unsupported.append("The head of prm, which scores each token, is counted as a reward model's.", parameter)
    loss = _loss(job, method.kind, generation, precomputed=precomputed, of_completions=not whole_logits)
    of_logits = {"preference_logits": "shifted_log_softmax" if log_softmax else "whole"}
    given = of_logits if method.kind in REFERRING and whole_logits else {}
    options = FrozenMapping({**job.framework_options, **given})
    held = generation.other_memory_fraction if generation is not None else 0.0
    job = job.replace(micro_batch_size=size, loss=loss, other_memory_fraction=held, framework_options=options)
    if method.kind in REFERRING:
        _say_whose_logits(notes, whole_logits, log_softmax, by_release=makes_whole_logits(job))
    if job.reference in REFERENCES:
        notes.assumptions.append(f"the reference of {name} is {REFERENCES[job.reference]}.")
    return job


def _say_sequences_together(notes: Notes, name: str, sequences: int, samples: int) -> None:
    if sequences == 1:
        return
    both = "the chosen and the rejected sequence" if sequences == 2 else f"{sequences} sequences"
    notes.assumptions.append(
        f"{name} passes {both} of each sample together: micro_batch_size is {sequences} × {samples} = "
        f"{sequences * samples}."
    )


def with_own_reference(job: TrainingJob, notes: Notes, why: str) -> TrainingJob:
    """`job` with a separate frozen network as reference, also where the trained network with its adapters switched off
    could be the reference. `why`: the setting that asks for it, in words."""
    notes.assumptions[:] = [said for said in notes.assumptions if not said.startswith("the reference of ")]
    notes.assumptions.append(f"the reference is a frozen network of its own: {why}.")
    if job.finetuning.quantization:
        notes.unsupported.append("The reference's weights are counted whole, not quantised.", "loss.reference", "less")
    return job.replace(loss=replace(job.loss, reference="model"))


def _known_method(name: str, parameter: str) -> Method:
    """The method called `name`. Raises: SpecError for one that is not modelled, with what can be asked instead."""
    word = name.lower()
    if word not in METHODS:
        raise SpecError(
            f"{parameter}={name!r} is not modelled: {NOT_MODELLED.get(word, 'this method')} holds more than one training "
            "step's tensors. Ask about its optimisation step: a job file has loss: {kind: grpo} and {kind: kto}, with "
            "reference: model where one is kept and the sequences of one forward as micro_batch_size; add generation.",
            parameter=parameter,
            value=name,
        )
    return METHODS[word]


def _loss(
    job: TrainingJob, kind: LossKind, generation: Generation | None, *, precomputed: bool, of_completions: bool
) -> Loss:
    """The loss of `kind`, with its reference. `of_completions`: whether only the completions of a generation are scored."""
    loss = replace(job.loss, kind=kind, fused_linear_cross_entropy=False)
    if kind not in REFERRING:
        return loss
    loss = replace(loss, reference="precomputed" if precomputed else None)
    if generation is not None and generation.refers:
        loss = replace(loss, reference="model" if job.finetuning.method == "full" else "adapter_off")
    if generation is not None and of_completions:
        loss = replace(loss, completion_length=generation.completion_length)
    return loss


def _say_whose_logits(notes: Notes, whole_logits: str, log_softmax: bool, *, by_release: bool) -> None:
    """Say how log-probabilities are made. `by_release`: whether from whole logits in the release of trl that is given."""
    if whole_logits:
        releases = "before 0.12" if log_softmax else "0.15 to 1.14"
        notes.unsupported.append(
            f"{whole_logits} takes log-probabilities from whole logits; they are counted as trl {releases} makes them.",
            "loss",
        )
    elif by_release:
        notes.assumptions.append("log-probabilities are made from whole logits, as in the release of trl that is given.")
    else:
        notes.assumptions.append(
            "log-probabilities are made without whole logits, as in trl since 1.15; for an older one set versions.trl."
        )
