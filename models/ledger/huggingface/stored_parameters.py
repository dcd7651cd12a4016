"""Every tensor of a Hugging Face network as one rank stores it: split, frozen, quantised, with its adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from peakcast.core.units import DTYPE_BYTES, FP8, FP32
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import adapter_dtype, conventions, mixes_precision
from peakcast.jobs.micro_batch import Batch
from peakcast.jobs.spec import ActivationCheckpointing, Optimizer, TrainingJob
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import ADAPTED_ROLES, NETWORK, network_tensors
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.huggingface.blocks.expert_adapters import expert_adapters
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import tensor_parallel
from peakcast.models.ledger.layouts import adapters_are_whole, expert_ranks, gathered_dtype
from peakcast.models.ledger.layouts.base import StoredTensor, is_decayed
from peakcast.models.ledger.layouts.module_tree import (
    LM_HEAD,
    ORIGINAL,
    TOKEN_TABLE,
    BlockKind,
    block_of,
    layer_index,
    module_of,
)
from peakcast.models.ledger.parameters.adapter_methods import METHODS, matrix_of
from peakcast.models.ledger.parameters.inventory import (
    COPIED_BY_PEFT,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)
from peakcast.models.ledger.parameters.quantization import PARAMETERS, quantized_linear_bytes
from peakcast.models.ledger.parameters.tensor import ParameterTensor
from peakcast.models.ledger.recorded.parameters import recorded_parameters
from peakcast.models.recipes.shelf import recipe_of
from peakcast.networks.trained_parts import copies_head, copies_table, trained_network

QUANTISED_ROLES = ("attention", "mlp", "shared_expert")
"""Roles of every Linear inside the layers, all quantised; embeddings, norms and lm_head are not."""
ROUTED_ROLES = ("expert", "router")
"""Roles that are quantised too if a library makes Linears of them, or if the checkpoint is quantised (GPTQ)."""


@lru_cache(maxsize=1024)
def weights_job(job: TrainingJob) -> TrainingJob:
    """The job with the settings that affect none of its weights replaced by defaults, so that jobs alike in all else share
    one cached result."""
    return job.replace(
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        batch=Batch(),
        sequence_length=job.parallelism.context_parallel_size * job.parallelism.tensor_parallel_size,
        attention="sdpa",
        activation_checkpointing=ActivationCheckpointing(),
        optimizer=Optimizer(),
        allocator=Allocator(),
    )


def stored_parameters(job: TrainingJob) -> tuple[StoredTensor, ...]:
    """Every tensor of the network as a rank stores it, before data parallelism divides it."""
    if (recipe := recipe_of(job)) is not None:
        return recorded_parameters(job, recipe)
    return _stored_parameters(weights_job(job))


@lru_cache(maxsize=512)
def _stored_parameters(job: TrainingJob) -> tuple[StoredTensor, ...]:
    """`stored_parameters` of a network without a recipe, cached by the settings that matter."""
    size, used = int(DTYPE_BYTES[job.precision.parameters]), int(DTYPE_BYTES[gathered_dtype(job)])
    ranks = expert_ranks(job)
    everything = [(module, _rank_experts(tensor, ranks)) for module, tensor in _all_parameters(job)]
    group = tensor_parallel(job)
    waits = group.table and job.parallelism.num_replicas > 1 and not group.table_reduced
    # a tied table also gets a gradient from the lm_head, which is split, so the sum is split
    alone = group.table and job.parallelism.num_replicas == 1 and not job.architecture.tie_word_embeddings
    if job.finetuning.method == "full" and not (job.task == "inference" and job.finetuning.quantization):
        return tuple(
            StoredTensor(
                tensor.name,
                module,
                group.shape(tensor),
                size,
                used,
                trains=True,
                expert_ranks=ranks if tensor.role == "expert" else 1,
                decays=is_decayed(tensor.name, tensor.shape),
                gradient_parts=group.ranks if waits and tensor.role == "embedding" else 1,
                parts_in_optimizer=group.ranks if alone and tensor.role == "embedding" else 1,
                sent_bytes=_sent_bytes(job, tensor, module),
            )
            for module, tensor in everything
        )
    stored = [part for module, tensor in everything for part in _frozen(tensor, module, job, size, used)]
    if job.finetuning.method == "full":
        return tuple(stored)
    copies = list(_copies(job, everything, size, used))  # in the order of the network's modules, as optimizers see it
    of_table = [copy for copy in copies if copy.is_token_table]
    others = [copy for copy in copies if copy not in of_table]
    return (*of_table, *stored, *_adapters(job, everything, used), *others)


def _adapters(job: TrainingJob, everything: Sequence[tuple[str, ParameterTensor]], used: int) -> Iterator[StoredTensor]:
    """The adapters of the network as a whole, and of each matrix of `everything`. `used`: bytes of one element of a weight
    when it is used."""
    tuning, width, group = job.finetuning, int(DTYPE_BYTES[adapter_dtype(job)]), tensor_parallel(job)
    whole = adapters_are_whole(job)
    mixed = used if mixes_precision(job) and not whole else width
    for made in network_tensors(job.architecture, tuning):
        own = made.element_bytes or width
        yield StoredTensor(made.name, NETWORK, made.shape, own, own, trains=made.trains)
    experts = expert_adapters(job.architecture, tuning, str(conventions(job).get("experts_implementation")))
    for module, tensor in everything:
        name = tensor.name.removesuffix(".weight")
        if len(tensor.shape) == 2 and tensor.role in ADAPTED_ROLES and _adapted(name, job):
            sums = group.sequence and tensor.tensor_parallel_dim == 1 and job.parallelism.num_replicas == 1
            for made in METHODS[tuning.method].on_matrix(matrix_of(tuning, name, group.shape(tensor), _layer(module))):
                own, gathered = (made.element_bytes, made.element_bytes) if made.element_bytes else (width, mixed)
                part = StoredTensor(f"{name}.{made.name}", module, made.shape, own, gathered, trains=made.trains)
                yield replace(part, sharded=not whole, sums_gradient=sums and made.name == "lora_B")
        elif name in experts:
            for part_name, shape in experts[name].shapes.items():
                yield StoredTensor(f"{name}.{part_name}", module, shape, width, mixed, trains=True)


def _copies(
    job: TrainingJob, everything: Sequence[tuple[str, ParameterTensor]], size: int, used: int
) -> Iterator[StoredTensor]:
    """The copies that peft trains (`modules_to_save`), in the dtype of what they are copies of: of a classifier's head, in
    any case, of the token table and of the lm_head. A table that both used has two copies then (peft 0.21.2
    `utils/other.py` ModulesToSaveWrapper)."""
    if conventions(job).get("ends_in_float32"):
        size = used = FP32
    group = tensor_parallel(job)
    for module, tensor in (*everything, *_shared_head(job)):
        if _is_copied(tensor.name, job):
            decays = is_decayed(tensor.name, tensor.shape)
            yield StoredTensor(tensor.name, module, group.shape(tensor), size, used, trains=True, decays=decays)


def _shared_head(job: TrainingJob) -> Iterator[tuple[str, ParameterTensor]]:
    """The lm_head's matrix where it is the token table, which is not listed a second time."""
    network = job.architecture
    if network.tie_word_embeddings and trained_network(job).head == "language_model":
        yield "head", ParameterTensor("lm_head.weight", (network.vocab_size, network.hidden_size), "lm_head", 0)


def _is_copied(name: str, job: TrainingJob) -> bool:
    """Whether peft trains a copy of the weight `name`."""
    module = module_of(name)
    copied = (module == TOKEN_TABLE and copies_table(job)) or (module == LM_HEAD and copies_head(job))
    classifies = trained_network(job).head != "language_model" and module_of(name).names[0] in COPIED_BY_PEFT
    return job.finetuning.method != "full" and (copied or classifies)


def _original(name: str) -> str:
    """What the frozen weight `name` is called beside its copy."""
    module, _, last = name.rpartition(".")
    return f"{module}.{ORIGINAL}.{last}"


def _sent_bytes(job: TrainingJob, tensor: ParameterTensor, module: str) -> int:
    """Bytes of an element of `tensor` while FSDP2 gathers it, if it is the weight of a product in float8 that is gathered
    so (torchao 0.18 `float8/fsdp_utils.py` WeightWithDynamicFloat8CastTensor; `fsdp_post_all_gather` does not copy it)."""
    asked = job.precision.compute == "float8" and conventions(job).get("fsdp_float8_all_gather")
    in_layer = block_of(module) is BlockKind.LAYER
    of_product = in_layer and len(tensor.shape) == 2 and all(size % 16 == 0 for size in tensor.shape)
    return FP8 if asked and of_product and tensor.role != "expert" else 0


def _rank_experts(tensor: ParameterTensor, ranks: int) -> ParameterTensor:
    """`tensor` with this rank's part of the experts, which are stacked along the first dimension."""
    if tensor.role != "expert" or ranks == 1:
        return tensor
    num_experts, *rest = tensor.shape
    return replace(tensor, shape=(num_experts // ranks, *rest))


def _frozen(tensor: ParameterTensor, module: str, job: TrainingJob, size: int, used: int) -> list[StoredTensor]:
    """The stored form of a weight that does not train: quantised if its role is one of `quantised_roles`, else, or if it is
    `left_whole`, the weight itself."""
    if len(tensor.shape) >= 2 and tensor.role in quantised_roles(job) and (module, tensor.name) != left_whole(job):
        *stacked, out_features, in_features = tensor.shape  # experts may be stacked along a first dimension
        chosen = conventions(job)
        parts = quantized_linear_bytes(
            (out_features, in_features),
            job.finetuning,
            int(chosen.get("gptq_group_size", 128)),
            gptq_kernel=str(chosen.get("gptq_kernel", "")),
        )
        divided = PARAMETERS if divides_packed(job) else ()
        return [
            StoredTensor(f"{tensor.name}.{name}", module, (num_bytes,), 1, 1, trains=False, sharded=name in divided)
            for name, num_bytes in parts
        ] * math.prod(stacked)
    ranks = expert_ranks(job) if tensor.role == "expert" else 1
    if tensor.role == "norm" and conventions(job).get("norms_in_float32"):
        size = used = FP32
    if module in ("embedding", "head") and tensor.role != "norm" and conventions(job).get("ends_in_float32"):
        size = used = FP32
    shape = tensor_parallel(job).shape(tensor)
    name = _original(tensor.name) if _is_copied(tensor.name, job) else tensor.name
    return [StoredTensor(name, module, shape, size, used, trains=False, expert_ranks=ranks)]


def divides_packed(job: TrainingJob) -> bool:
    """Whether the ranks divide packed weights, if they divide any. FSDP2 leaves 4-bit ones that are stored as integers on
    every rank (accelerate 1.15 `fsdp2_prepare_model`: `ignored_params`), and nothing divides buffers."""
    stored, sharding = conventions(job).get("quantized_storage"), job.parallelism.sharding
    if job.finetuning.quantization == "gptq":
        return stored != "buffers"
    return not (job.finetuning.quantization == "nf4" and stored == "uint8" and sharding in ("fsdp2", "hsdp"))


def quantised_roles(job: TrainingJob) -> tuple[str, ...]:
    """Roles of the matrices that are quantised; empty without quantization.

    Source: transformers 5.17 integrations/bitsandbytes.py replace_with_bnb_linear (`type(module) is nn.Linear`),
    models/mixtral/modeling_mixtral.py MixtralExperts and MixtralTopKRouter (these are parameters, not Linears).
    """
    method = job.finetuning.quantization
    if not method:
        return ()
    routed = method == "gptq" or bool(conventions(job).get("quantized_experts"))
    head = ("lm_head",) if conventions(job).get("quantized_lm_head") else ()
    return (*QUANTISED_ROLES, *head, *(ROUTED_ROLES if routed else ()))


def left_whole(job: TrainingJob) -> tuple[str, str]:
    """(module, name) of the matrix that bitsandbytes leaves whole because it is the network's last parameter; empty names
    if that is a norm, a bias or the head, as of most networks. OLMo's norms have no weights, and a shared head no own ones.

    Source: transformers 5.17 quantizers/base.py get_keys_to_not_convert; 4.44 integrations/bitsandbytes.py has it too.
    """
    if job.finetuning.quantization not in ("nf4", "int8"):
        return "", ""
    return _last_matrix(weights_job(job))


@lru_cache(maxsize=512)
def _last_matrix(job: TrainingJob) -> tuple[str, str]:
    """The network's last parameter, if it is the matrix of a Linear inside a layer."""
    everything = list(_all_parameters(job))
    module, last = everything[-1]
    norms = any(tensor.role == "norm" for other, tensor in everything if other == module)  # which come after matrices
    is_matrix = last.role in QUANTISED_ROLES and last.name.endswith(".weight")
    return (module, last.name) if is_matrix and not norms else ("", "")


def _layer(module: str) -> int:
    """The index of the layer named `module`; 0 if it is not a layer."""
    return layer_index(module) if block_of(module) is BlockKind.LAYER else 0


def quantised_shapes(job: TrainingJob) -> list[tuple[int, ...]]:
    """[out_features, in_features] of every matrix that is quantised; stacked experts appear once."""
    roles = quantised_roles(job)
    return [tensor.shape[-2:] for _, tensor in _all_parameters(job) if len(tensor.shape) > 1 and tensor.role in roles]


def _adapted(name: str, job: TrainingJob) -> bool:
    """Whether an adapter is put on the matrix `name`."""
    return is_adapter_target(name, job.finetuning, job.architecture)


def _all_parameters(job: TrainingJob) -> Iterator[tuple[str, ParameterTensor]]:
    """(module, tensor) of the whole network: embedding, layers, head."""
    architecture = job.architecture
    for tensor in embedding_parameters(architecture):
        yield "embedding", tensor
    for layer in range(architecture.num_layers):
        for tensor in layer_parameters(architecture, layer):
            yield f"layers.{layer}", tensor
    for tensor in head_parameters(trained_network(job)):
        yield "head", tensor
