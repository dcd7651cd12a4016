"""What generation keeps of each token: the size of the key-value cache, and how much of it a server has room for."""

from __future__ import annotations

from peakcast.answers.prediction import Prediction
from peakcast.catalog import Device
from peakcast.core.units import KIB, format_gib
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.kv_cache import layer_cache_bytes
from peakcast.models.ledger.huggingface.contexts import block_context

SERVER_SHARE = 0.9
"""The share of the GPU that vLLM allocates when it starts, by default (vLLM, engine argument `gpu_memory_utilization`)."""


def cache_bytes_per_token(job: TrainingJob) -> int:
    """Bytes of keys and values that all layers keep of one token of one sequence. Layers with a window keep no more tokens
    than that."""
    keys, values = layer_cache_bytes(block_context(job.replace(micro_batch_size=1), None), 1)
    return (keys + values) * job.architecture.num_hidden_layers


def cache_sentences(job: TrainingJob, device: Device, p: Prediction) -> tuple[str, ...]:
    """How large the cache of `job` is, how many tokens of cache a server on `device` would have room for beside the same
    weights and activations, and the share of the GPU that it needs for this job's cache."""
    token_bytes = cache_bytes_per_token(job)
    tokens = (job.inference.prompt_length or job.sequence_length) + (job.inference.new_tokens or 1) - 1
    window = job.architecture.sliding_window
    ranks = job.parallelism.tensor_parallel_size
    on_each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    windowed = f" (in layers with a window of the last {window:,})" if window else ""
    size = format_gib(token_bytes * tokens * job.micro_batch_size)
    sentences = [
        f"Key-value cache: {token_bytes / KIB:,.4g} KiB for each token{windowed}{on_each}, "
        f"{job.micro_batch_size:,} × {tokens:,} tokens: {size}."
    ]
    other_bytes = p.peak_allocated_bytes.point - p.composition.get("kv_cache", 0)
    room_bytes = SERVER_SHARE * device.cuda_memory_bytes - other_bytes
    if room_bytes > 0:
        least_share = _share(other_bytes + token_bytes * tokens * job.micro_batch_size, device)
        sentences.append(
            f"vLLM takes {SERVER_SHARE:g} of {'each' if ranks > 1 else 'the'} GPU at start (gpu_memory_utilization): after "
            f"these weights it has room for about {_round(room_bytes / token_bytes):,} tokens of cache. The tokens asked "
            f"for alone need gpu_memory_utilization={least_share:.2f}."
        )
    return tuple(sentences)


def _share(num_bytes: int, device: Device) -> float:
    """`num_bytes` as a fraction of the GPU's memory, rounded up to hundredths."""
    return -(-num_bytes * 100 // device.cuda_memory_bytes) / 100


def _round(number: float) -> int:
    """`number` rounded to two digits, because a server's other memory is not known more exactly."""
    return int(float(f"{number:.2g}"))
