"""The facts of Megatron-LM's jobs, and the values that sentences about them name."""

from __future__ import annotations

from typing import get_args

from peakcast.core.units import format_gib
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.context import ContextExchange
from peakcast.models.ledger.megatron.contexts import ADAPTABLE, HYBRID_PARTS
from peakcast.models.ledger.scope.fact import Fact, fact, option
from peakcast.models.ledger.scope.facts import experts, optimizer
from peakcast.models.ledger.scope.words import WORDS

RECOMPUTABLE_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"})
RECOMPUTED_IN_FLOAT8 = frozenset({"core_attn", "shared_experts"})
FP8_BLOCK = 128
"""Elements along a row that share a scale (Transformer Engine 2.8 `Float8BlockQuantizer`)."""
EXCHANGES = frozenset(get_args(ContextExchange))

transformer_engine = option("transformer_impl", "transformer_engine")
own_modules = option("transformer_impl", "local")
asks_fsdp = option("use_megatron_fsdp")
precision_aware = option("use_precision_aware_optimizer")
narrow_gradients = ~option("main_grads_dtype", "fp32", None)
narrow_parameters = ~option("main_params_dtype", "fp32", None)
flex_dispatcher = experts & option("moe_token_dispatcher_type", "flex")
overlaps = experts & option("overlap_moe_expert_parallel_comm")
adam = optimizer("adam", "adamw")
muon = optimizer("muon")
records_graphs = ~option("cuda_graph_impl", "none", None) & ~option("cuda_graph_scope", "full_iteration_inference")
graphs_of_engine = option("cuda_graph_impl", "transformer_engine")
graphs_of_own_layers = option("cuda_graph_impl", "local") & ~option("cuda_graph_scope", "full_iteration")
graphs_from_the_start = ~graphs_of_own_layers & option("cuda_graph_warmup_steps", 0, 1)


@fact
def known_hybrid(job: TrainingJob) -> bool:
    """A network of Mamba-2, attention and feed-forward layers."""
    mixer, parts = job.architecture.ssm, set(job.architecture.layer_types)
    mamba_2 = job.architecture.kind == "hybrid" and mixer is not None and mixer.version == 2
    return mamba_2 and bool(parts) and parts <= HYBRID_PARTS


@fact
def more_ranks_than_key_heads(job: TrainingJob) -> bool:
    """Whether tensor parallelism has more ranks than there are key and value heads."""
    return job.architecture.num_key_value_heads < job.parallelism.tensor_parallel_size


@fact
def recomputes_other_modules(job: TrainingJob) -> bool:
    """Whether modules are recomputed that the ledger does not know."""
    return job.activation_checkpointing.mode != "none" and bool(_other_modules(job))


@fact
def recomputes_more_in_float8(job: TrainingJob) -> bool:
    """Whether selective recomputation has modules other than those that were seen in float8."""
    again = job.activation_checkpointing
    return again.mode == "selective" and not RECOMPUTED_IN_FLOAT8.issuperset(again.modules)


@fact
def recomputes_biased_feed_forward(job: TrainingJob) -> bool:
    """Whether a feed-forward with biases is recomputed by itself."""
    again = job.activation_checkpointing
    return again.mode == "selective" and "mlp" in again.modules and job.architecture.mlp_bias


@fact
def adapts_other_modules(job: TrainingJob) -> bool:
    """Whether adapters are asked for on modules that the ledger does not know under that name."""
    return job.finetuning.method != "full" and bool(_other_targets(job))


@fact
def several_instances(job: TrainingJob) -> bool:
    """Whether the distributed optimizer shards within several groups."""
    return int(conventions(job).get("num_distributed_optimizer_instances", 1) or 1) > 1


@fact
def offloads_a_part(job: TrainingJob) -> bool:
    """Whether a part of the optimizer is on the host."""
    return job.offload.optimizer and float(conventions(job).get("optimizer_offload_fraction", 1.0)) < 1


@fact
def ragged_latent_ranks(job: TrainingJob) -> bool:
    """Whether the ranks of latent attention are not multiples of a float8 block."""
    latent = job.architecture.mla
    return latent is not None and ((latent.q_lora_rank or 0) % FP8_BLOCK > 0 or latent.kv_lora_rank % FP8_BLOCK > 0)


@fact
def mixed_exchange(job: TrainingJob) -> bool:
    """Whether layers of context parallelism exchange in several ways, or in one that the ledger does not know."""
    kinds = _exchanges(job)
    return len(kinds) > 1 or not kinds <= EXCHANGES


@fact
def several_expert_tensor_ranks(job: TrainingJob) -> bool:
    """Whether experts are divided by tensor parallelism."""
    return (job.parallelism.expert_tensor_parallel_size or job.parallelism.tensor_parallel_size) > 1


no_layers_on_last_stage = Fact(lambda job: job.parallelism.pipeline_layers[-1:] == (0,), "no layers on the last stage")
experts_with_biases = Fact(lambda job: job.architecture.moe and job.architecture.moe.expert_bias, "experts with biases")


def _other_modules(job: TrainingJob) -> set[str]:
    return set(job.activation_checkpointing.modules) - RECOMPUTABLE_MODULES


def _other_targets(job: TrainingJob) -> set[str]:
    return set(job.finetuning.targets) - {*ADAPTABLE, "all-linear"}


def _exchanges(job: TrainingJob) -> set[str]:
    """How layers of context parallelism exchange keys and values."""
    return set(str(conventions(job).get("cp_comm_type") or "p2p").split())


def _graphed_bytes(job: TrainingJob) -> str:
    """The most that graphed parts of the first stage have at once in a step, for people."""
    from peakcast.models.ledger.megatron.ledger import graphed_bytes

    return format_gib(graphed_bytes(job))


def _narrow(job: TrainingJob) -> list[str]:
    names = ("main_grads_dtype", "main_params_dtype")
    return [name for name in names if conventions(job).get(name, "fp32") != "fp32"]


WORDS.update(
    other_targets=lambda job: ", ".join(sorted(_other_targets(job))),
    adaptable=lambda job: ", ".join(ADAPTABLE),
    other_modules=lambda job: ", ".join(sorted(_other_modules(job))),
    recomputable_modules=lambda job: ", ".join(sorted(RECOMPUTABLE_MODULES)),
    exchanges=lambda job: " ".join(sorted(_exchanges(job))),
    known_exchanges=lambda job: ", ".join(sorted(EXCHANGES)),
    graphed_bytes=_graphed_bytes,
    graph_warmup_steps=lambda job: conventions(job).get("cuda_graph_warmup_steps"),
    narrow_dtypes=lambda job: " and ".join(_narrow(job)),
    optimizer_capitalised=lambda job: job.optimizer.name.capitalize(),
    sharding_strategy=lambda job: conventions(job).get("data_parallel_sharding_strategy"),
)
