"""What a Megatron-LM rank's libraries hold during the whole step: workspaces, cached tables and placeholders, FP8 copies of
weights."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from peakcast.catalog import Device
from peakcast.core.units import FP32, KIB, MIB
from peakcast.models.ledger.megatron.buffers import shares_gradient_buffer
from peakcast.models.ledger.megatron.first_runs import FirstRuns
from peakcast.models.ledger.megatron.fp8_parameters import MXFP8_BLOCK, is_fp8_parameter, reads_either_layout
from peakcast.models.ledger.megatron.fsdp import is_fully_sharded
from peakcast.models.ledger.megatron.optimizer import end_of_columns
from peakcast.models.ledger.megatron.parameters import Projection, layer_parameters
from peakcast.models.ledger.megatron.share import RankShare, weights_share
from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.models.ledger.tape.workspaces import cublas_workspace_bytes
from peakcast.timelines.timeline import Category

FP8_STATE_TENSORS = 5
"""Tensors of a projection with delayed scaling: scales and histories, forward and backward, and the weight's inverse
scale."""
CONTAINS_NORM = {"linear_qkv": True, "linear_fc1": True, "linear_proj": False, "linear_fc2": False}
"""Transformer Engine's projections, and whether the norm before is part of them. When their backward makes a placeholder,
the norm's output and what was gathered are freed (2.8 `pytorch/module/layernorm_linear.py`, `linear.py`)."""
GROUPED_PRODUCT_STREAMS = 4
"""Streams of Transformer Engine's grouped products, each with a workspace (`get_num_cublas_streams`, 2.8
`multi_stream.cpp`)."""


def hold_workspaces(step: Step, share: RankShare, first: FirstRuns) -> None:
    """Hold the global memory buffer, placeholder gradients, and the workspaces of both threads. In a steady step nothing
    runs for the first time."""
    context = share.context
    for number, chunk in enumerate(share.chunks):  # every RotaryEmbedding caches its table: one per model or latent layer
        predicted = share.job.architecture.num_nextn_predict_layers if chunk.is_last else 0
        for _ in range(len(chunk.layers) + predicted if context.latent is not None else 1):
            width = context.attention.rotary_dim if context.latent is None else context.latent.rotary_dim
            step.hold("rotary_table", Category.OTHER, context.sequence * width * FP32, 0, module=f"chunk.{number}")
    step.hold("global_memory_buffer", Category.COMMUNICATION_BUFFERS, memory_buffer_bytes(share), 0, module="mpu")
    for (rows, columns), labels in sorted(placeholder_shapes(weights_share(share)).items()):
        size = rows * columns * context.element_bytes
        ran = [(first.backward[label], label) for label in labels if label in first.backward]
        born, made_by = min(ran, default=(first.product, ""))
        if context.transformer_engine and made_by in CONTAINS_NORM:
            norm = CONTAINS_NORM[made_by] and not context.fp8_recipe  # in FP8 other tensors exist until the norm is done
            gone = context.stream_bytes * norm + context.gathered_bytes * context.groups.sequence_parallel
            if size > gone:
                step.hold("placeholder_weight_gradient", Category.OTHER, size - gone, born, born + 1)
            born += 1
        step.hold("placeholder_weight_gradient", Category.OTHER, size, born, module="transformer_engine")
    if (
        context.transformer_engine
        and context.attention.core == "unfused"
        and not (context.attention.fused_softmax or context.padding)
    ):
        step.hold("causal_mask", Category.OTHER, context.sequence**2, 0, module="softmax")  # `_get_default_causal_mask`
    if share.device is not None:
        _hold_library_workspaces(step, share, share.device, first.product)


def _hold_library_workspaces(step: Step, share: RankShare, device: Device, first_product: int) -> None:
    """Hold the workspaces of Transformer Engine and cuBLAS on this GPU."""
    context = share.context
    size, experts = transformer_engine_workspace_bytes(device), context.experts if share.has_experts else None
    routes = experts is not None and bool(share.convention.get("moe_router_uses_transformer_engine", True))
    if context.transformer_engine or routes:
        step.hold("transformer_engine_workspace", Category.WORKSPACES, size, 0)
    if context.transformer_engine and context.groups.tensor_parallel_size > 1 and share.convention.get("tp_comm_overlap"):
        streams = int(share.convention.get("overlap_workspaces", 0))
        step.hold("userbuffers_workspace", Category.WORKSPACES, streams * size, 0, module="transformer_engine")
    legacy = bool(share.convention.get("moe_use_legacy_grouped_gemm"))
    if context.transformer_engine and experts is not None and experts.grouped and not legacy:
        for _ in range(GROUPED_PRODUCT_STREAMS):
            step.hold("grouped_product_workspace", Category.WORKSPACES, size, 0, module="transformer_engine")
    if _uses_torch_products(share):
        config = str(share.convention.get("cublas_workspace_config") or "") or None
        size = cublas_workspace_bytes(device, share.job.versions, config)
        step.hold("cublas_workspace", Category.WORKSPACES, size, 0, module="forward thread")
        step.hold("cublas_workspace", Category.WORKSPACES, size, first_product, module="autograd thread")


def hold_fp8_weights(step: Step, share: RankShare, first: FirstRuns) -> None:
    """Hold the FP8 copies of projections' weights, by rows and by columns, which Transformer Engine makes in a step's first
    micro-batch and keeps. Blackwell can multiply either layout of a tensor with a single scale. With delayed scaling, also
    scales and histories of maxima, forward and backward, of every projection. Copies by columns are for the backward: in a
    first step, those of a checkpointed layer or feed-forward are made when it is first recomputed.

    Source: Transformer Engine 2.8 `pytorch/module/base.py` `get_weight_workspace`, `pytorch/csrc/quantizer.cpp`
    `Float8Quantizer::create_tensor`, `pytorch/tensor/mxfp8_tensor.py` `make_empty`.
    """
    recipe = share.context.fp8_recipe
    if not recipe:
        return
    at_once = _copied_by_columns_in_first_forward(share)
    either = reads_either_layout(share)
    for chunk in share.chunks:
        for layer in chunk.layers:
            for p in layer_parameters(share.layer_context(layer)):
                if is_fp8_parameter(share, p) and shares_gradient_buffer(share):
                    continue  # which has both layouts itself
                if p.is_projection_weight:
                    module = f"layers.{layer}"
                    again = 0 if p.projection in at_once and not p.adapter else first.recomputed.get(layer, 0)
                    # by rows and by columns, or in a layout that serves both
                    copies: tuple[int, ...] = (0,) if either else (0, again)
                    narrow = is_fp8_parameter(share, p)
                    dies = end_of_columns(share, p, step.now) if narrow else FOREVER
                    if narrow:
                        copies = () if is_fully_sharded(share) else copies[1:]
                    for born in copies:
                        step.hold(f"{p.name}.fp8", Category.OTHER, p.numel, born, dies, module)
                        if recipe == "mxfp8":
                            step.hold(f"{p.name}.scales", Category.OTHER, p.numel // MXFP8_BLOCK, born, module=module)
                    for _ in range(FP8_STATE_TENSORS if recipe == "delayed" else 0):
                        step.hold(f"{p.name}.fp8_state", Category.OTHER, FP32, 0, module=module)


def _copied_by_columns_in_first_forward(share: RankShare) -> tuple[Projection, ...]:
    """The projections whose weights the first forward copies by columns even under checkpointing. `Linear` does so
    if FP8 is on around the checkpoint (Transformer Engine 2.8 `pytorch/module/linear.py`, `columnwise_usage`): it is on
    around a feed-forward's checkpoint; around a layer's only with delayed scaling (megatron-core 0.16.1
    `transformer_block.py`, `use_outer_quantization_context`)."""
    plain = (Projection.OUTPUT, Projection.FC2)
    if share.job.activation_checkpointing.mode != "full":
        return (*plain, Projection.QKV)
    return plain if share.context.fp8_recipe == "delayed" else ()


def _uses_torch_products(share: RankShare) -> bool:
    """Whether torch's own matrix products run: for the output layer and unfused attention. Transformer Engine's projections
    have a workspace of their own."""
    unfused = share.context.attention.core in ("unfused", "local")
    return not share.context.transformer_engine or unfused or share.has_head


def memory_buffer_bytes(share: RankShare) -> int:
    """Bytes of `GlobalMemoryBuffer`'s "mpu" tensor, which is as large as its largest user: gathered inputs of
    megatron-core's own projections under sequence parallelism, or the local attention's scores."""
    context = share.context
    gathers = context.groups.sequence_parallel and not context.frozen and (not context.transformer_engine or share.has_head)
    own = context.attention.core == "local"  # it writes its scores there
    scores = context.score_elements * context.element_bytes if own else 0
    experts = context.experts
    dispatched = 0
    if experts is not None and experts.dispatcher == "allgather" and experts.group_size > 1 and share.has_experts:
        dispatched = context.stream_bytes * experts.group_size
    last = context if share.target is None or not context.transformer_engine else share.target  # T5's head is its decoder's
    return max(last.gathered_bytes if gathers else 0, scores, dispatched)


@lru_cache(maxsize=512)
def placeholder_shapes(share: RankShare) -> dict[tuple[int, int], set[str]]:
    """Shapes of the placeholder gradients that Transformer Engine caches under gradient-accumulation fusion
    (`get_dummy_wgrad`, which megatron-core's own projections call too): one for each shape of a projection on this rank,
    with the labels of the projections of that shape. The first of them to run backward makes it."""
    context = share.context
    shapes: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    if not context.weight_gradients.fused:
        return shapes
    cached = (
        context.weight_gradients.cached_placeholders
        if context.transformer_engine
        else context.weight_gradients.cached_output_placeholder
    )
    if cached and any(chunk.layers for chunk in share.chunks):
        parameters = (p for layer in share.layer_contexts for p in layer_parameters(layer))
        anew = context.experts is not None and context.experts.placeholders_anew
        for p in parameters:
            trains = p.adapter or not context.frozen
            if trains and p.is_projection_weight and not (anew and p.routed):
                shapes[p.shape[-2], p.shape[-1]].update(p.multiplied_by)
        if share.has_head and share.job.architecture.num_nextn_predict_layers and not context.frozen:
            shapes[context.hidden // context.groups.tensor_parallel_size, 2 * context.hidden].add("mtp.eh_proj")
    if context.weight_gradients.cached_output_placeholder and share.has_head and not context.frozen:
        shapes[context.ends.vocabulary, context.hidden].add("output_layer")
    return shapes


def transformer_engine_workspace_bytes(device: Device) -> int:
    """Bytes of Transformer Engine's cuBLAS workspace: 32 MiB and 1 KiB from Hopper on, else 4 MiB.

    Source: Transformer Engine 2.8 `pytorch/module/base.py`, `get_cublas_workspace_size_bytes`.
    """
    return 32 * MIB + KIB if device.compute_capability[0] >= 9 else 4 * MIB
