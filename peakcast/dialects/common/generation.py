"""Completions of GRPO: the length of sequences in its training step, whether there is a reference model, and the memory
that generation holds on the GPU.

Source: trl 1.16.0 `trainer/grpo_config.py`, 0.14-0.24 for `max_prompt_length`; axolotl 0.19 `utils/schemas/trl.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from peakcast.dialects.common.translation import Settings

PROMPT, COMPLETION, UTILIZATION = 512, 512, 0.3
"""trl's defaults of `max_prompt_length` (not in releases since 1.0), `max_completion_length` and
`vllm_gpu_memory_utilization`."""
RLOO_BETA = 0.05
"""trl's default of `beta` in RLOOConfig; GRPO's is 0."""
READ = (
    "num_generations", "max_prompt_length", "max_completion_length", "beta", "use_vllm", "vllm_mode", "vllm_device",
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_max_model_length",
    "vllm_max_model_len",
)  # fmt: skip
SAMPLING = re.compile(
    r"vllm_.*|num_generations.*|generation_.*|steps_per_generation|temperature|top_[pk]|min_p|repetition_penalty|epsilon.*"
    r"|cache_implementation|delta|sapo_.*|vespo_.*|importance_sampling_.*|reward_.*|multi_objective_.*|scale_rewards"
    r"|mask_truncated_completions|num_iterations|log_completions.*|log_(unique_prompts|multimodal)|shuffle_dataset"
    r"|max_tool_calling_iterations|off_policy_.*|use_bias_correction_kl|use_transformers_.*|sync_ref_model"
    r"|transformers_continuous_batching_config|entropy_.*|use_adaptive_entropy|use_vllm|max_(prompt|completion)_length|beta"
    r"|ds3_gather_for_generation|chat_template_kwargs|top_entropy_quantile|normalize_advantages"
)
"""Settings of GRPO that are read here or that do not affect the memory of its optimisation step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What generation changes in GRPO's training step."""

    sequence_length: int
    """Tokens of the longest prompt plus the longest completion."""
    completion_length: int | None
    """Tokens of the longest completion; None where the log-probabilities of prompts are made too."""
    refers: bool
    """Whether there is a reference model, i.e. beta is not 0."""
    other_memory_fraction: float
    """Fraction of the GPU's memory that generation holds during the step."""


def generation_of(settings: Settings, batch: str) -> Generation:
    """Read the generation of a GRPO run from `settings`, which have trl's names; adds notes. `batch`: the key of the
    micro-batch size in the user's configuration, for messages."""
    notes = settings.notes
    lengths = [settings.integer(f"max_{part}_length") for part in ("prompt", "completion")]
    defaults = (PROMPT, COMPLETION)
    length = sum(given or default for given, default in zip(lengths, defaults, strict=True))
    longest = _longest(settings)
    for part, given, default in zip(("prompt", "completion"), lengths, defaults, strict=True):
        if given is None:
            notes.assumptions.append(f"max_{part}_length is not given; {default} tokens are assumed.")
    if longest is not None and longest < length:
        notes.assumptions.append(
            f"vLLM ends completions at {longest} tokens with their prompts (vllm_max_model_len), before the {length} of "
            "both lengths together."
        )
        length = longest
    notes.assumptions.append(
        f"the sequences of GRPO's step are prompts with their completions, of {length} tokens; {batch} counts "
        f"completions, {settings.integer('num_generations', 8)} of which answer one prompt (num_generations)."
    )
    held, sentence = _beside_the_step(settings)
    notes.warnings.append(f"The number is that of GRPO's optimisation step; {sentence}.", "vllm", "more")
    return Generation(
        sequence_length=length,
        completion_length=min(lengths[1] or COMPLETION, length - 1),
        refers=bool(settings.number("beta", 0.0)),
        other_memory_fraction=held,
    )


def _longest(settings: Settings) -> int | None:
    """The most tokens that vLLM makes of a prompt with its completion; None where nothing limits them. The key is
    `vllm_max_model_len` in trl 0.16 to 0.18 and in ms-swift."""
    named = [settings.integer(f"vllm_max_model_{word}") for word in ("length", "len")]
    return next(filter(None, named), None) if settings.switch("use_vllm") else None


def _beside_the_step(settings: Settings) -> tuple[float, str]:
    """(fraction of the GPU that generation holds during the optimisation step, a sentence about it)."""
    if not settings.switch("use_vllm"):
        return 0.0, "transformers generates before it (use_vllm: false), whose cache and logits are not in the number"
    if settings.given("vllm_device"):  # trl 0.14 to 0.15, GRPOConfig: "auto" is the first GPU that does not train
        return 0.0, "vLLM generates on a GPU of its own (vllm_device), which is not in the number"
    if settings.text("vllm_mode", "colocate") != "colocate":
        return 0.0, "vLLM generates in a server of its own (vllm_mode: server), whose GPUs are not in the number"
    share = settings.number("vllm_gpu_memory_utilization", UTILIZATION) or UTILIZATION
    ranks = settings.integer("vllm_tensor_parallel_size", 1)
    shared = f", its weights over {ranks} GPUs" if ranks and ranks > 1 else ""
    takes = f"vLLM generates on the same GPU and takes vllm_gpu_memory_utilization={share:g} × its memory{shared}"
    if settings.switch("vllm_enable_sleep_mode"):
        return 0.0, f"{takes}, freed while the step runs (vllm_enable_sleep_mode): what it keeps is not in the number"
    return share, f"{takes}, also during the step: that is not in the number, and the job has to fit in the rest"
