"""Generation with Hugging Face transformers: prefill and greedy decoding, as `GenerationMixin._sample` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from peakcast.collectors.stacks import layouts, unsupported
from peakcast.collectors.stacks.batches import random_tokens
from peakcast.collectors.stacks.huggingface_model import model_of
from peakcast.collectors.stacks.huggingface_training import causal_model
from peakcast.core.errors import CollectorError
from peakcast.jobs.spec import TrainingJob


class HuggingFaceInference:
    """One generation: `model` with random weights and a batch of random prompts."""

    def __init__(self, job: TrainingJob, model: Any, ids: torch.Tensor) -> None:
        self.job = job
        self.model = model
        self.ids = ids

    def generate(self, on_forward: Callable[[int], None] = lambda index: None) -> None:
        """Prefill, then one forward per further token; calls `on_forward(index)` before each. The loop of transformers
        5.17 generation/utils.py `_sample` without its stopping rules, which read values."""
        ids, cache, position = self.ids, self._cache(), None
        mask = torch.ones_like(ids)
        with torch.no_grad():
            for index in range(self.job.inference.new_tokens or 1):
                on_forward(index)
                fed = ids if index == 0 else ids[:, -1:]
                inputs = {"input_ids": fed, "attention_mask": mask, "past_key_values": cache, "logits_to_keep": 1}
                outputs = self.model(**inputs, position_ids=position, use_cache=True)
                logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
                token = torch.argmax(logits, dim=-1)
                ids = torch.cat([ids, token[:, None]], dim=-1)
                mask = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=-1)
                position = torch.full((1, 1), ids.shape[1] - 1, device=ids.device)
                del outputs

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        return {
            "attention_implementation": causal_model(self.model).config._attn_implementation,
            "cache": type(self._cache()).__name__,
            "transformers": transformers.__version__,
        }

    def _cache(self) -> Any:
        config = causal_model(self.model).config
        if self.job.inference.cache == "dynamic":
            return transformers.DynamicCache(config=config)
        length = self.ids.shape[1] + (self.job.inference.new_tokens or 1) - 1
        return transformers.StaticCache(config=config, max_cache_len=length)


def build_inference(job: TrainingJob, device: str) -> HuggingFaceInference:
    """A generation of `job` on `device`. Raises: CollectorError for what is not run here."""
    for parameter, value, done in (
        ("framework", job.framework, ("huggingface", "torch")),
        ("parallelism", job.parallelism.world_size, (job.parallelism.tensor_parallel_size,)),
        ("compile", job.compile, (False,)),
        ("finetuning.method", job.finetuning.method, ("full",)),
        ("batch.form", job.batch.form, ("rows",)),
        ("batch.shortest_sequence", job.batch.shortest_sequence, (None,)),
    ):
        if value not in done:
            raise CollectorError(
                f"{parameter}={value!r} has no collector with task='inference'; measure {' or '.join(map(str, done))}"
                f"{' rank' if parameter == 'parallelism' else ''}.",
                parameter=parameter,
                value=value,
            )
    longest = (job.inference.prompt_length or job.sequence_length) + (job.inference.new_tokens or 1) - 1
    unsupported.check(job.replace(task="train", sequence_length=longest))
    with torch.device(device):
        model = model_of(job)
        ids = random_tokens(job, job.inference.prompt_length or job.sequence_length)
        layouts.split(model, job)
    model.eval()
    return HuggingFaceInference(job, model, ids)
