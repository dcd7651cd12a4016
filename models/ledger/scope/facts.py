"""The facts of a job that are conditions in the tables of this folder.

Whether a setting has one of some values needs no function (`setting`, `option`, `above`), nor does what a family's code
does or what a library knows of it (`trait`; `catalog/families/`).
"""

from __future__ import annotations

from peakcast.core.versions import OWN_NETWORK_STACKS, compare, release
from peakcast.dialects.common.own_networks import own_network
from peakcast.jobs.conventions import (
    adapter_dtype,
    conventions,
    fsdp_offloads,
    fuses_loss,
    makes_whole_logits,
    mixes_precision,
    replaces_linear,
    steps_in_bitsandbytes,
    torch_release,
)
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.loss import PAIRS
from peakcast.jobs.micro_batch import Batch
from peakcast.jobs.parallelism import Sharding
from peakcast.jobs.spec import ActivationCheckpointing, Offload, TrainingJob
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.huggingface.blocks.context import SHIFTED_WITH_NLL
from peakcast.models.ledger.huggingface.blocks.traits import has_mask_of_heads, kinds_of_layers, slides_anywhere
from peakcast.models.ledger.layouts import expert_ranks, gathered_dtype
from peakcast.models.ledger.layouts.pipeline import SPLIT_BACKWARD
from peakcast.models.ledger.optimizers.choice import COPIES_ON_THE_HOST
from peakcast.models.ledger.parameters.inventory import layer_parameters
from peakcast.models.ledger.scope import adapter_targets
from peakcast.models.ledger.scope.fact import Fact, above, fact, option, setting, trait
from peakcast.networks.families import family, family_of
from peakcast.networks.trained_parts import copied_inside, copies_head, copies_table, ends_named
from peakcast.networks.trained_parts import trains_other_parts as trains_others

# -- stack and task ------------------------------------------------------------------------------------------------------

megatron = setting("framework", "megatron")
huggingface = setting("framework", "huggingface")
plain_torch = setting("framework", "torch")
trains = setting("task", "train")
generates = setting("task", "inference")
compiles = setting("compile")
accumulates = above("gradient_accumulation_steps", 1)

# -- the network ---------------------------------------------------------------------------------------------------------

decoder = setting("architecture.kind", "decoder")
encoder = setting("architecture.kind", "encoder")
encoder_decoder = setting("architecture.kind", "encoder_decoder")
hybrid = setting("architecture.kind", "hybrid")
experts = setting("architecture.moe")
latent_attention = setting("architecture.mla")
ties_embeddings = setting("architecture.tie_word_embeddings")
norms_after_layers = setting("architecture.norm_placement", "post")
predicts_further_tokens = above("architecture.num_nextn_predict_layers", 0)


known_family = Fact(lambda job: family(job.architecture.model_type) is not None, "a known family")
unmodelled_family = trait("traces.unmodelled")
remote_code = Fact(lambda job: family_of(job.architecture).source.startswith("remote code"), "code that comes with weights")


@fact
def like_llama(job: TrainingJob) -> bool:
    """Whether layers are like Llama's: RMSNorm, separate projections, a gated feed-forward of separate matrices, which both
    plans name."""
    architecture = job.architecture
    plain = architecture.kind == "decoder" and architecture.moe is None and architecture.mla is None
    separate = architecture.gated_mlp and not (architecture.fused_qkv or architecture.fused_gate_up)
    usual = architecture.normalization == "rmsnorm" and architecture.norm_placement == "pre"
    whole = architecture.qk_norm in ("none", "head") and not architecture.parallel_block
    return plain and separate and usual and whole and not family_of(architecture).ends.scales_embedding


@fact
def otherwise_than_four_hidden(job: TrainingJob) -> bool:
    """Whether the feed-forward is not as wide as transformers makes it, whatever is asked for."""
    network = job.architecture
    return family_of(network).layer.four_hidden and network.intermediate_size != 4 * network.hidden_size


@fact
def uneven_adam_mini_heads(job: TrainingJob) -> bool:
    """Whether adam-mini 1.1.1 cannot split the keys' weights into heads of hidden_size² / num_attention_heads elements."""
    network = job.architecture
    return network.num_attention_heads * network.num_key_value_heads * network.head_dim % network.hidden_size != 0


alibi_in_mask = Fact(lambda job: has_mask_of_heads(job.architecture), "ALiBi in the mask")
windows_in_some_layers = Fact(lambda job: kinds_of_layers(job.architecture) > 1, "windows in some layers")
beyond_window = Fact(lambda job: slides_anywhere(job.architecture, job.sequence_length), "beyond the sliding window")

# -- what trains ---------------------------------------------------------------------------------------------------------

adapts = ~setting("finetuning.method", "full")
keeps_torchs_linear = Fact(lambda job: not replaces_linear(job), "torch's own Linear")
quantized = setting("finetuning.quantization")
classifies = ~setting("architecture.head", "language_model") & setting("loss.kind", "cross_entropy")
preference = ~setting("loss.kind", "cross_entropy")
has_reference = Fact(lambda job: job.reference == "model", "a reference network")
optimizer_in_backward = option("optimizer_in_backward")
fused_loss = Fact(fuses_loss, "fused loss")
whole_logits = Fact(makes_whole_logits, "whole logits")
shifts_logits = option("preference_logits", "shifted_log_softmax") | option("preference_logits", SHIFTED_WITH_NLL)
traced_whole_logits = setting("loss.kind", "dpo") & huggingface & (option("autocast") | shifts_logits)
odd_pairs = Fact(lambda job: job.loss.kind in PAIRS and job.micro_batch_size % 2 == 1, "an odd number of a pair's halves")


def optimizer(*names: str) -> Fact:
    """Whether the optimizer is one of these."""
    return setting("optimizer.name", *names)


of_bitsandbytes = Fact(steps_in_bitsandbytes, "of bitsandbytes")


def adapters_stored_in(dtype: str) -> Fact:
    """Whether adapters have that dtype."""
    return Fact(lambda job: adapter_dtype(job) == dtype, f"adapters in {dtype}")


@fact
def adapters_gathered_otherwise(job: TrainingJob) -> bool:
    """Whether FSDP's mixed precision gathers adapters in another dtype than their own."""
    return mixes_precision(job) and adapter_dtype(job) != gathered_dtype(job)


@fact
def adapters_of_another_dtype(job: TrainingJob) -> bool:
    """Whether adapters are stored in another dtype than the network's weights."""
    return adapter_dtype(job) != job.precision.parameters


@fact
def adapts_gathered_outputs(job: TrainingJob) -> bool:
    """Whether adapters are on parts of a layer whose outputs tensor parallelism gathers."""
    if job.finetuning.method == "full":
        return False
    matrices = (tensor.name.removesuffix(".weight") for tensor in layer_parameters(job.architecture, 0))
    adapted = {name for name in matrices if is_adapter_target(name, job.finetuning, job.architecture)}
    return any(name.partition(".")[0] in family_of(job.architecture).modules.gathered_parts for name in adapted)


names_ends = Fact(ends_named, "adapters on the token table or the head")
copies_ends = Fact(lambda job: copies_table(job) or copies_head(job), "copies of the token table or the head that train")
copies_inside = Fact(lambda job: bool(copied_inside(job)), "modules other than the ends that train beside the adapters")
adapts_shared_experts = Fact(adapter_targets.adapts_shared_experts, "adapters on shared experts")
names_experts = Fact(adapter_targets.names_experts, "targets that name experts")
adapts_experts = Fact(adapter_targets.adapts_experts, "adapters on experts")
leaves_out_experts = Fact(adapter_targets.leaves_out_experts, "adapters on experts that are not counted")
before_baddbmm = Fact(lambda job: compare(job.versions.get("peft", "1"), "<0.21"), "peft before 0.21")
unconfirmed_method = Fact(
    lambda job: job.finetuning.method == conventions(job).get("unconfirmed_adapters"), "a method of another peft release"
)

# -- precision -----------------------------------------------------------------------------------------------------------

autocast = option("autocast")
float8 = setting("precision.compute", "float8")
computes_float16 = setting("precision.compute", "float16")
computes_float32 = setting("precision.compute", "float32")
computes_bfloat16 = setting("precision.compute", "bfloat16")
mixed_precision = Fact(mixes_precision, "mixed precision of FSDP")
changes_dtype = Fact(lambda job: job.precision.parameters != job.precision.compute, "computes in another dtype")


def used_in(dtype: str) -> Fact:
    """Whether blocks use the weights in that dtype (`gathered_dtype`)."""
    return Fact(lambda job: gathered_dtype(job) == dtype, f"weights used in {dtype}")


@fact
def half_precision(job: TrainingJob) -> bool:
    """Whether attention computes in 16 bits."""
    widens = conventions(job).get("autocast") or gathered_dtype(job) != job.precision.parameters
    return (job.precision.compute if widens else job.precision.parameters) in ("bfloat16", "float16")


@fact
def ragged_tiles(job: TrainingJob) -> bool:
    """Whether the tokens of a micro-batch, padding included, are not a multiple of 16, as torch._scaled_mm takes them."""
    return tokens(job) % 16 > 0


def tokens(job: TrainingJob) -> int:
    """Tokens of a micro-batch, including padding."""
    return job.num_tokens if job.batch.form == "padding_free" else job.micro_batch_size * job.sequence_length


plain_float8 = trains & ~adapts & (huggingface | plain_torch) & used_in("bfloat16") & ~autocast
"""Float8 as torchao has it over weights that blocks use in bf16; FSDP's mixed precision gathers wider weights so."""

# -- batches, checkpointing, offload, kernels ----------------------------------------------------------------------------

full_rows = setting("batch.form", "rows")
default_batch = setting("batch", Batch())
changing_lengths = Fact(lengths_change, "lengths that change")
checkpoints = ~setting("activation_checkpointing.mode", "none")
returns_cache = setting("loss.kind", "dpo") & ~checkpoints & Fact(
    lambda job: release("0.12") <= release(str(job.versions.get("trl", "0"))) < release("0.18"), "trl 0.12 to 0.17"
)
full_checkpointing = setting("activation_checkpointing.mode", "full")
selective = setting("activation_checkpointing.mode", "selective")
reentrant = setting("activation_checkpointing.use_reentrant")
checkpoints_around_units = option("checkpoints_around_units")
some_layers = above("activation_checkpointing.every_n_layers", 1)
none_or_plain_full = setting(
    "activation_checkpointing", ActivationCheckpointing(), ActivationCheckpointing(mode="full")
)
offloads = ~setting("offload", Offload())
offloads_activations = setting("offload.activations")
offloads_parameters = setting("offload.parameters")
offloads_optimizer = setting("offload.optimizer")
eager = setting("attention", "eager")
clamps_scores = option("clamps_scores") & (eager | option("sdpa", "eager"))
sdpa = setting("attention", "sdpa")
flash = setting("attention", "flash_attention_2")
flex = setting("attention", "flex")
liger = option("liger_kernels")
unsloth = Fact(lambda job: "unsloth" in job.versions, "Unsloth")
litgpt = Fact(lambda job: "litgpt" in job.versions and "lightning_thunder" not in job.versions, "LitGPT's own programs")
torchtune = Fact(lambda job: "torchtune" in job.versions, "torchtune")
own_networks = Fact(
    lambda job: any(stack in job.versions for stack in OWN_NETWORK_STACKS), "a library with networks of its own"
)
builds_own_network = Fact(lambda job: own_network(job) is not None, "a network of its library's own that is built here")
trains_other_parts = Fact(trains_others, "trained parts that a recipe answers")
fused_lora = option("lora_kernel") & ~option("lora_kernel", "eager") & adapts
ligers_loss = option("loss_kernel", "fused_linear") & ~option("loss_chunks")
asks_loss_chunks = Fact(lambda job: job.framework_options.get("loss_chunks"), "framework_options.loss_chunks")
torchtitans_experts = option("experts_implementation", "torchtitan")
loops_over_experts = option("experts_implementation", "loop")

inputs_are_leaves = (full_checkpointing & reentrant & (norms_after_layers | encoder)) | (
    norms_after_layers & adapts & checkpoints
)
"""Whether projections read a layer's input itself, not a norm's output, and that input is a leaf of the graph."""

# -- layouts -------------------------------------------------------------------------------------------------------------

many_ranks = above("parallelism.world_size", 1)
replicated = above("parallelism.num_replicas", 1)
tensor_parallel = above("parallelism.tensor_parallel_size", 1)
sequence_parallel = setting("parallelism.sequence_parallel")
pipeline_parallel = above("parallelism.pipeline_parallel_size", 1)
context_parallel = above("parallelism.context_parallel_size", 1)
expert_parallel = above("parallelism.expert_parallel_size", 1)
zero = above("parallelism.zero_stage", 0)
zero1 = setting("parallelism.zero_stage", 1)
zero3 = setting("parallelism.zero_stage", 3)
asks_ddp = setting("parallelism.sharding", "none")
asks_fsdp1 = setting("parallelism.sharding", "fsdp1")
asks_fsdp2 = setting("parallelism.sharding", "fsdp2", "hsdp")
fsdp2 = asks_fsdp2 & replicated
sharded_otherwise_than_fsdp1 = replicated & ~asks_fsdp1
divides_weights = tensor_parallel | pipeline_parallel
divides_model = divides_weights | context_parallel
parallel_otherwise = Fact(
    lambda job: job.parallelism.world_size > job.parallelism.data_parallel_size, "other than data parallelism"
)
shards_layers_alone = many_ranks & ~parallel_otherwise & asks_fsdp2
"""Whether each layer is a unit of FSDP2 or HSDP, and nothing else is divided."""
experts_on_every_rank = Fact(lambda job: expert_ranks(job) == 1, "all experts on every rank")
ends_apart = option("fsdp2_units", "ends")
overlaps_reduction = option("overlap_comm", True)
offloads_by_fsdp = Fact(fsdp_offloads, "offloaded by FSDP")


@fact
def data_parallel_alone(job: TrainingJob) -> bool:
    """Whether ranks have whole networks, and only add up gradients."""
    return job.parallelism == type(job.parallelism)(data_parallel_size=job.parallelism.data_parallel_size)


def _alone(job: TrainingJob, sharding: Sharding) -> bool:
    layout = job.parallelism
    return layout == type(layout)(data_parallel_size=layout.data_parallel_size, sharding=sharding)


@fact
def fsdp1_alone(job: TrainingJob) -> bool:
    """Whether FSDP1 is all that ranks divide the network by."""
    return _alone(job, "fsdp1")


@fact
def fsdp2_alone(job: TrainingJob) -> bool:
    """Whether FSDP2 is all that ranks divide the network by."""
    return _alone(job, "fsdp2")


@fact
def zero_alone(job: TrainingJob) -> bool:
    """Whether ZeRO is all that ranks divide the network by."""
    layout = job.parallelism
    return layout == type(layout)(data_parallel_size=layout.data_parallel_size, zero_stage=layout.zero_stage)


@fact
def gradients_stay(job: TrainingJob) -> bool:
    """Whether torch is one whose `zero_grad` fills gradients with zeros by default, and so frees none."""
    return job.task == "train" and torch_release(job.versions) < (2, 0)


@fact
def softmax_keeps_input(job: TrainingJob) -> bool:
    """Whether torch's softmax saves its input as well as its result (pytorch/pytorch issue 49600; since 1.11 it keeps the
    input's dtype only)."""
    return job.task == "train" and torch_release(job.versions) < (1, 11)


@fact
def times_kernels_on_copies(job: TrainingJob) -> bool:
    """Whether Inductor copies on the GPU what a kernel overwrites, to time its variants in a first step."""
    return job.compile and torch_release(job.versions) < COPIES_ON_THE_HOST


@fact
def early_fsdp2(job: TrainingJob) -> bool:
    """Whether torchtitan ran it when FSDP2 was new, with fixed segments and FSDP2 as its only parallelism."""
    alone = job.parallelism.world_size == job.parallelism.num_replicas
    early = "torchtitan" in job.versions and torch_release(job.versions) < (2, 6)
    return job.framework == "torch" and early and alone and not job.allocator.expandable_segments


@fact
def parts_of_heads(job: TrainingJob) -> bool:
    """Whether tensor parallelism does not divide the key heads and the feed-forward evenly."""
    network, ranks = job.architecture, job.parallelism.tensor_parallel_size
    return network.num_key_value_heads % ranks > 0 or network.intermediate_size % ranks > 0


@fact
def vocabulary_in_uneven_parts(job: TrainingJob) -> bool:
    """Whether tensor parallelism does not divide the vocabulary evenly."""
    return job.architecture.vocab_size % job.parallelism.tensor_parallel_size > 0


@fact
def uneven_chunks(job: TrainingJob) -> bool:
    """Whether the sequence is not divided in two chunks for each rank of context parallelism."""
    return job.sequence_length % (2 * job.parallelism.context_parallel_size) > 0


# -- pipelines -----------------------------------------------------------------------------------------------------------

PIPELINE_SCHEDULES = {
    *(("gpipe", False), ("gpipe", True), ("1f1b", False), ("interleaved_1f1b", True)),
    *(("zero_bubble", False), ("zero_bubble", True), ("zero_bubble_v", True)),
    ("dualpipe_v", True),
}
"""(schedule, whether a rank has several stages): the combinations that torch has and the ledger covers."""
splits_backward = setting("parallelism.pipeline_schedule", *SPLIT_BACKWARD)


@fact
def known_schedule(job: TrainingJob) -> bool:
    """Whether the ledger covers the schedule with that number of stages per rank."""
    layout = job.parallelism
    return (layout.pipeline_schedule, layout.virtual_pipeline_stages > 1) in PIPELINE_SCHEDULES


def rounds(job: TrainingJob) -> int:
    """Number of rounds in which ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble run their micro-batches."""
    return max(1, job.gradient_accumulation_steps // job.parallelism.pipeline_parallel_size)


uneven_rounds = setting("parallelism.pipeline_schedule", "interleaved_1f1b", "zero_bubble") & Fact(
    lambda job: job.gradient_accumulation_steps % rounds(job), "uneven rounds"
)
empty_stages = Fact(lambda job: 0 in job.parallelism.pipeline_layers, "stages without layers")


def fewer_micro_batches(than: int) -> Fact:
    """Whether there are fewer micro-batches than that many for each rank of the pipeline."""
    return Fact(
        lambda job: job.gradient_accumulation_steps < than * job.parallelism.pipeline_parallel_size,
        f"fewer micro-batches than {than} for each pipeline rank",
    )
