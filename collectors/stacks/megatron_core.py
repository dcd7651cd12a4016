"""megatron-core as a measurable stack: GPTModel, DistributedDataParallel, its optimizers and its schedules, on one rank.

The code around them is as in Megatron-LM's training script (`pretrain_gpt.py`, `megatron/training/training.py`): a batch
for each micro-batch, the masked loss, zeroed gradients before a step. The process group is torch's fake one, so a row's
`collectives` say `fake`. The library's own schedule runs forward and backward, so this class has `forward_backward`.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from peakcast.collectors.stacks.megatron_config import TORCH_DTYPES, check, transformer_config
from peakcast.core.errors import CollectorError
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.timelines.timeline import Phase

MAX_GRAD_NORM = 1.0
SEED = 1234

with warnings.catch_warnings():  # one warning for every part of Transformer Engine and apex that is not there
    warnings.simplefilter("ignore")
    import megatron.core  # noqa: F401
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.core.transformer.module import Float16Module


class MegatronTraining:
    """One rank of a run of GPTModel."""

    def __init__(self, job: TrainingJob, chunks: list[Any], optimizer: Any, device: str) -> None:
        self.job = job
        self.chunks = chunks
        self.model = torch.nn.ModuleList(chunks)
        self._optimizer = optimizer
        self.device = device
        self._begin: Callable[[Phase], None] = lambda phase: None

    @property
    def optimizer(self) -> Any:
        """An object with the states of all optimizers (Megatron chains one for dense and one for expert parameters)."""
        inner = [part.optimizer for part in self._optimizer.chained_optimizers]
        states = {key: value for part in inner if part is not None for key, value in part.state.items()}
        return SimpleNamespace(state=states, param_groups=[group for part in inner if part for group in part.param_groups])

    def forward_backward(self, begin: Callable[[Phase], None]) -> None:
        """Run all micro-batches of a step in the library's schedule; calls `begin` at each forward, loss and backward."""
        self._begin = begin
        begin(Phase.FORWARD)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        forward, backward = schedules.forward_step, schedules.backward_step

        def forward_step(*arguments: Any, **keywords: Any) -> Any:
            begin(Phase.FORWARD)
            return forward(*arguments, **keywords)

        def backward_step(*arguments: Any, **keywords: Any) -> Any:
            begin(Phase.BACKWARD)
            return backward(*arguments, **keywords)

        schedules.forward_step, schedules.backward_step = forward_step, backward_step
        try:
            get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=[None] * len(self.chunks),
                model=self.chunks,
                num_microbatches=self.job.gradient_accumulation_steps,
                seq_length=self.job.sequence_length,
                micro_batch_size=self.job.micro_batch_size,
            )
        finally:
            schedules.forward_step, schedules.backward_step = forward, backward

    def clip(self) -> None:
        """Nothing to do: the optimizer clips in its step."""

    def step(self) -> None:
        """Gradient norm, clipping and update."""
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Nothing to do: gradients are zeroed before the next step's first forward."""

    def facts(self) -> dict[str, Any]:
        """Settings that were really used."""
        inner = self._optimizer.chained_optimizers[0].optimizer
        return {
            "attention_implementation": conventions(self.job)["attention_backend"],
            "optimizer": f"{type(inner).__module__}.{type(inner).__name__}",
            "megatron_core": importlib.metadata.version("megatron-core"),
        }

    def _forward_step(
        self, _: Iterator[Any] | None, chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """The forward step of `pretrain_gpt.py`, or of the script for another kind of network. `return_schedule_plan`:
        return a plan of the chunk's parts instead, which run beside the backward of another micro-batch."""
        kind = self.job.architecture.kind
        if kind != "decoder":
            return self._forward_of_encoder(chunk, kind)
        batch = self._batch(chunk)
        loss_mask = batch.pop("loss_mask", None)
        model = unwrapped(chunk)
        inputs = [batch.get(name) for name in ("tokens", "position_ids", "attention_mask")]
        if return_schedule_plan:
            plan = model.build_schedule_plan(*inputs, labels=batch.get("labels"), loss_mask=loss_mask)
            return plan, lambda losses: _loss(losses, loss_mask)
        losses, predicted = model.compute_language_model_loss, self.job.architecture.num_nextn_predict_layers
        calls = iter(range(predicted + 1))

        def announced(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == predicted:
                self._begin(Phase.LOSS)
            return losses(*arguments, **keywords)

        model.compute_language_model_loss = announced
        try:
            output = chunk(*inputs, labels=batch.get("labels"))
        finally:
            model.compute_language_model_loss = losses
        return output, lambda losses: _loss(losses, loss_mask)

    def _forward_of_encoder(self, chunk: Any, kind: str) -> tuple[Any, Any]:
        from peakcast.collectors.stacks.megatron_encoders import FORWARDS

        model = unwrapped(chunk)
        losses = model.compute_language_model_loss

        def announced(*arguments: Any) -> Any:
            self._begin(Phase.LOSS)
            return losses(*arguments)

        model.compute_language_model_loss = announced
        try:
            return FORWARDS[kind](chunk, self.job, self.device)
        finally:
            model.compute_language_model_loss = losses

    def _batch(self, chunk: Any) -> dict[str, Any]:
        """The tensors of a micro-batch that the chunk reads, as Megatron-LM sends them to a rank
        (`get_batch_on_this_tp_rank`)."""
        job, convention, model = self.job, conventions(self.job), unwrapped(chunk)
        shape = job.micro_batch_size, job.sequence_length // job.parallelism.context_parallel_size
        reads_tokens = model.pre_process or (model.post_process and job.architecture.num_nextn_predict_layers > 0)
        batch: dict[str, Any] = {}
        if reads_tokens:
            batch["tokens"] = torch.randint(job.architecture.vocab_size, shape, device=self.device)
            batch["position_ids"] = torch.arange(shape[1], device=self.device).repeat(shape[0], 1)
        if model.post_process:
            batch["labels"] = torch.randint(job.architecture.vocab_size, shape, device=self.device)
            batch["loss_mask"] = torch.ones(shape, device=self.device)
        if convention["create_attention_mask_in_dataloader"] and (model.pre_process or model.post_process):
            size = shape[0], 1, shape[1], job.sequence_length
            batch["attention_mask"] = torch.zeros(size, dtype=torch.bool, device=self.device)
        return batch


def _loss(losses: Any, mask: Any) -> tuple[Any, Any, dict[str, Any]]:
    """`loss_func` of pretrain_gpt.py: the sum over unmasked tokens, their number, and what is reported."""
    mask = mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def unwrapped(chunk: Any) -> Any:
    """GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def build(job: TrainingJob, device: str) -> MegatronTraining:
    """A run of `job` on the rank that this process has in the default process group."""
    check(job)
    start_parallel_groups(job)
    config = transformer_config(job)
    convention, dtype = conventions(job), TORCH_DTYPES[job.precision.parameters]
    virtual = job.parallelism.virtual_pipeline_stages
    networks = [_network(job, config, i if virtual > 1 else None, device) for i in range(virtual)]
    buckets = _buckets(job)
    half = dtype is not torch.float32
    chunks = [
        DistributedDataParallel(
            config, buckets, Float16Module(config, network) if half else network, disable_bucketing=index > 0
        )
        for index, network in enumerate(networks)
    ]
    optimizer = get_megatron_optimizer(_optimizer_config(job), chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if convention["overlap_grad_reduce"]:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return MegatronTraining(job, chunks, optimizer, device)


def _buckets(job: TrainingJob) -> DistributedDataParallelConfig:
    """How gradients are gathered in buckets and reduced."""
    convention = conventions(job)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.precision.gradients == "float32",
        overlap_grad_reduce=bool(convention["overlap_grad_reduce"]),
        overlap_param_gather=bool(convention["overlap_param_gather"]),
        use_distributed_optimizer=job.parallelism.zero_stage > 0,
        num_distributed_optimizer_instances=int(convention["num_distributed_optimizer_instances"]),
        bucket_size=int(convention["ddp_bucket_size"]) or None,
        pad_buckets_for_high_nccl_busbw=bool(convention["ddp_pad_buckets_for_high_nccl_busbw"]),
        average_in_collective=bool(convention["ddp_average_in_collective"]),
        fp8_param_gather=bool(convention.get("fp8_param_gather")),
        reuse_grad_buf_for_mxfp8_param_ag=_reuses_gradients(job),
    )


def _optimizer_config(job: TrainingJob) -> OptimizerConfig:
    convention, dtype = conventions(job), TORCH_DTYPES[job.precision.parameters]
    return OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        clip_grad=MAX_GRAD_NORM,
        use_distributed_optimizer=job.parallelism.zero_stage > 0,
        overlap_param_gather=bool(convention["overlap_param_gather"]),
        fp8_recipe=convention.get("fp8_recipe") if convention.get("fp8_param_gather") else None,
        reuse_grad_buf_for_mxfp8_param_ag=_reuses_gradients(job),
    )


def _reuses_gradients(job: TrainingJob) -> bool:
    """Whether MXFP8 parameters are gathered in the gradients' buffer, the one way that the ledger has."""
    convention = conventions(job)
    return bool(convention.get("fp8_param_gather")) and convention.get("fp8_recipe") == "mxfp8"


def start_parallel_groups(job: TrainingJob) -> None:
    """Make Megatron's process groups from the default group, and its random states."""
    layout, convention = job.parallelism, conventions(job)
    order = "tp-cp-ep-pp-dp" if convention["use_tp_pp_dp_mapping"] else "tp-cp-ep-dp-pp"
    virtual = layout.virtual_pipeline_stages
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        virtual if virtual > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=int(convention["num_distributed_optimizer_instances"]),
        order=order,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


def _network(job: TrainingJob, config: Any, virtual_stage: int | None, device: str) -> Any:
    """The chunk of GPTModel of this rank (Megatron-LM `gpt_builder`)."""
    architecture, convention = job.architecture, conventions(job)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
    engine = convention["transformer_impl"] == "transformer_engine"
    if engine and not specs.HAVE_TE:
        raise CollectorError(
            "framework_options.transformer_impl='transformer_engine' needs Transformer Engine; install it with: "
            "pip install 'transformer_engine[pytorch]', or use transformer_impl: local.",
            parameter="framework_options.transformer_impl",
        )
    common: dict[str, Any] = {
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": architecture.max_position_embeddings or job.sequence_length,
        "pre_process": first,
        "post_process": last,
        "fp16_lm_cross_entropy": bool(convention["fp16_lm_cross_entropy"]),
        "parallel_output": True,
        "share_embeddings_and_output_weights": architecture.tie_word_embeddings,
        "position_embedding_type": {"learned": "learned_absolute"}.get(
            architecture.position_embedding, architecture.position_embedding
        ),
        "rotary_percent": float(convention["rotary_percent"]),
        "vp_stage": virtual_stage,
    }
    if architecture.kind != "decoder":
        from peakcast.collectors.stacks.megatron_encoders import ENCODER_NETWORKS

        with torch.device(device):
            return ENCODER_NETWORKS[architecture.kind](job, config, common)
    spec = _layers(architecture, config, engine, virtual_stage)
    ahead = None
    if architecture.num_nextn_predict_layers:
        last = _last_layer(architecture, config, engine, spec)
        ahead = specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=engine, vp_stage=virtual_stage)
    with torch.device(device):
        return GPTModel(config, spec, mtp_block_spec=ahead, **common)


def _last_layer(architecture: Architecture, config: Any, engine: bool, spec: Any) -> Any:
    """The network's last layer, which those of multi-token prediction are like; this stage may not have it (Megatron-LM
    `gpt_builders.py`)."""
    if architecture.moe is None:
        return spec
    normalization = config.normalization
    return specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=engine, normalization=normalization)[-1]


def _layers(architecture: Architecture, config: Any, engine: bool, virtual_stage: int | None) -> Any:
    if architecture.moe is not None:
        return specs.get_gpt_decoder_block_spec(config, use_transformer_engine=engine, vp_stage=virtual_stage)
    normed, latent = config.qk_layernorm, architecture.mla is not None
    if engine:
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=normed, multi_latent_attention=latent)
    return specs.get_gpt_layer_local_spec(
        qk_layernorm=normed, multi_latent_attention=latent, normalization=config.normalization
    )
