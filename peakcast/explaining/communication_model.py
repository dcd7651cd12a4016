"""Communication inside a model replica: tensor, sequence, context, expert and pipeline parallelism, as Megatron-LM does it.

Sources: megatron-core 0.13.1 `tensor_parallel/layers.py`, `tensor_parallel/cross_entropy.py`,
`distributed/finalize_model_grads.py`, `transformer/moe/token_dispatcher.py`, `pipeline_parallel/schedules.py`;
Transformer Engine 2.8 `pytorch/attention/dot_product_attention/context_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from peakcast.answers.explanation import CollectiveName
from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.explaining.collectives import CollectiveCall, StageOfJob
from peakcast.explaining.groups import CONTEXT, EMBEDDING, EXPERT, PIPELINE, TENSOR
from peakcast.explaining.rank_parameters import parameter_rows

SHOEYBI = "Shoeybi et al. 2019, arXiv:1909.08053, section 3; megatron-core 0.13.1 tensor_parallel/layers.py"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, section 4.2; megatron-core 0.13.1 tensor_parallel/layers.py"
CROSS_ENTROPY = "megatron-core 0.13.1 tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py"
FINALIZE = "megatron-core 0.13.1 distributed/finalize_model_grads.py"
SCHEDULES = "Narayanan et al. 2021, arXiv:2104.04473; megatron-core 0.13.1 pipeline_parallel/schedules.py"
RING = "Transformer Engine 2.8 context_parallel.py, AttnFuncWithCPAndKVP2P"
GATHERED = "Transformer Engine 2.8 context_parallel.py, AttnFuncWithCPAndKVAllGather"
ULYSSES = "Jacobs et al. 2023, arXiv:2309.14509; Transformer Engine 2.8 context_parallel.py, AttnFuncWithCPAndQKVOA2A"
DISPATCHER = "megatron-core 0.13.1 transformer/moe/token_dispatcher.py"


# -- tensor and sequence parallelism ------------------------------------------------------------------------------------


def tensor_parallel(share: StageOfJob) -> Iterator[CollectiveCall]:
    """Two exchanges per layer and direction (after attention and after the feed-forward), the embedding, the output layer,
    the loss over a split vocabulary, and the gradients of parameters that every rank holds whole."""
    layout = share.job.parallelism
    n, size = layout.tensor_parallel_size, share.hidden_bytes
    # a routed feed-forward exchanges tokens instead: see `expert_parallel`
    architecture = share.job.architecture
    halves = sum(1 if architecture.is_moe_layer(layer) else 2 for layer in share.layers)
    again = 2 * share.recomputed_layers() if architecture.moe is None else share.recomputed_layers()

    def call(
        function: CollectiveName, what: str, where: str, count: int, message: int = size, source: str = SHOEYBI
    ) -> CollectiveCall:
        return CollectiveCall(
            axis=TENSOR, function=function, what=what, where=where, group_size=n, message_bytes=message, count=count,
            source=source,
        )  # fmt: skip

    first, last = int(share.is_first), int(share.is_last)
    if layout.sequence_parallel:
        for function, what, where, count in _of_sequence_parallelism(halves, again, first, last):
            yield call(function, what, where, count, source=KORTHIKANTI)
    else:
        yield call("all-reduce", "outputs of attention and feed-forward", "forward, each layer", halves)
        yield call("all-reduce", "outputs of attention and feed-forward", "backward, recomputed layers", again)
        yield call("all-reduce", "gradients of the inputs of qkv and fc1", "backward, each layer", halves)
        yield call("all-reduce", "embedding", "forward, first stage", first)
        yield call("all-reduce", "output layer's input gradient", "backward, last stage", last)
    scalars = share.rows * FP32
    yield call("all-reduce", "largest logit", "loss, last stage", last, scalars, CROSS_ENTROPY)
    if share.convention.get("cross_entropy_loss_fusion"):
        yield call("all-reduce", "target logit and sum, fused", "loss, last stage", last, 2 * scalars, CROSS_ENTROPY)
    else:
        yield call("all-reduce", "target logit; sum of exponentials", "loss, last stage", 2 * last, scalars, CROSS_ENTROPY)
    if n > 1 and layout.sequence_parallel and share.job.framework == "megatron" and architecture.moe is None:
        yield _replicated_gradients(share)


def _of_sequence_parallelism(
    halves: int, again: int, first: int, last: int
) -> Iterator[tuple[CollectiveName, str, str, int]]:
    """(function, what, where, count) of the exchanges of hidden states: `halves` of layers, `again` of recomputed ones;
    `first`, `last`: 1 on the first and on the last stage."""
    gather: CollectiveName = "all-gather"
    scatter: CollectiveName = "reduce-scatter"
    for function, what in ((gather, "inputs of qkv and fc1"), (scatter, "outputs of attention and feed-forward")):
        yield function, what, "forward, each layer", halves
        yield function, what, "backward, recomputed layers", again
    yield gather, "gradients of the outputs", "backward, each layer", halves
    yield gather, "inputs again, for weight gradients", "backward, each layer", halves
    yield scatter, "gradients of the inputs", "backward, each layer", halves
    yield scatter, "embedding", "forward, first stage", first
    yield gather, "embedding's gradient", "backward, first stage", first
    yield gather, "output layer's input", "forward, last stage", last
    yield gather, "output layer's input again", "backward, last stage", last
    yield scatter, "output layer's input gradient", "backward, last stage", last


def _replicated_gradients(share: StageOfJob) -> CollectiveCall:
    """With sequence parallelism, each rank has only partial gradients of norms (and of biases added after a
    reduce-scatter)."""
    layout = share.job.parallelism
    inner = layout.tensor_parallel_size * layout.context_parallel_size
    innermost = bool(share.convention.get("use_tp_pp_dp_mapping"))
    rank = share.stage * inner * (1 if innermost else layout.data_parallel_size)
    elements = sum(
        prod(row.shape)
        for row in parameter_rows(share.job, rank)
        if row.shape == row.rank_shape and row.module != "embedding"
    )
    return CollectiveCall(
        axis=TENSOR,
        function="all-reduce",
        what="gradients of norms and shared biases",
        where="after the last backward",
        group_size=layout.tensor_parallel_size,
        message_bytes=elements * int(DTYPE_BYTES[share.job.precision.gradients]),
        count=1,
        source=FINALIZE,
        once=True,
    )


# -- context parallelism ------------------------------------------------------------------------------------------------


def context_parallel(share: StageOfJob) -> Iterator[CollectiveCall]:
    """Keys and values are sent around a ring (`p2p`) or gathered (`all_gather`), or heads are exchanged for tokens
    (`a2a`)."""
    job = share.job
    n, tp = job.parallelism.context_parallel_size, job.parallelism.tensor_parallel_size
    layers, again = len(share.layers), share.recomputed_attention()
    width = share.rows * share.element_bytes * job.architecture.head_dim
    query = width * max(1, job.architecture.num_attention_heads // tp)
    key_value = 2 * width * max(1, job.architecture.num_key_value_heads // tp)
    kind = str(share.convention.get("cp_comm_type", "p2p"))

    def call(function: CollectiveName, what: str, where: str, count: int, message: int, source: str) -> CollectiveCall:
        return CollectiveCall(
            axis=CONTEXT, function=function, what=what, where=where, group_size=n, message_bytes=message, count=count,
            source=source,
        )  # fmt: skip

    forward, backward, recomputed = "forward, attention", "backward, attention", "backward, recomputed attention"
    if kind == "all_gather":
        yield call("all-gather", "keys and values", forward, layers, n * key_value, GATHERED)
        yield call("all-gather", "keys and values", recomputed, again, n * key_value, GATHERED)
        yield call("all-gather", "keys and values again", backward, layers, n * key_value, GATHERED)
        yield call("reduce-scatter", "their gradients", backward, layers, n * key_value, GATHERED)
    elif kind == "a2a":
        for where, count in ((forward, layers), (recomputed, again), (backward, layers)):
            yield call("all-to-all", "query, keys and values, output", where, count, 2 * query + key_value, ULYSSES)
    else:
        yield call("send/recv", "keys and values, around the ring", forward, layers * (n - 1), key_value, RING)
        yield call("send/recv", "keys and values, around the ring", recomputed, again * (n - 1), key_value, RING)
        what = "keys, values and their gradients, around the ring"
        yield call("send/recv", what, backward, 2 * layers * (n - 1), key_value, RING)


# -- expert parallelism -------------------------------------------------------------------------------------------------


def expert_parallel(share: StageOfJob) -> Iterator[CollectiveCall]:
    """Tokens are sent to their experts and back, in every routed layer and direction."""
    job, moe = share.job, share.job.architecture.moe
    if moe is None:
        return
    layout = job.parallelism
    n, routed = layout.expert_parallel_size, sum(job.architecture.is_moe_layer(layer) for layer in share.layers)
    tokens = share.hidden_bytes // (layout.tensor_parallel_size if layout.sequence_parallel else 1)
    again = routed if share.recomputed_layers() else 0
    dispatcher = str(share.convention.get("moe_token_dispatcher_type", "alltoall"))
    places = (
        ("forward, routed layers", routed),
        ("backward, recomputed routed layers", again),
        ("backward, routed layers", routed),
    )

    def call(function: CollectiveName, what: str, where: str, count: int, message: int, size: int) -> CollectiveCall:
        return CollectiveCall(
            axis=EXPERT, function=function, what=what, where=where, group_size=size, message_bytes=message, count=count,
            source=DISPATCHER,
        )  # fmt: skip

    for where, count in places if n > 1 else ():
        if dispatcher == "allgather":  # over the tensor-parallel ranks too (`tp_ep_group`)
            size = n * (layout.expert_tensor_parallel_size or layout.tensor_parallel_size)
            yield call("all-gather", "tokens to the experts", where, count, size * tokens, size)
            yield call("reduce-scatter", "results back to the tokens", where, count, size * tokens, size)
        else:
            message = tokens * moe.num_experts_per_tok
            yield call("all-to-all", "tokens to their experts and back", where, 2 * count, message, n)


# -- pipeline parallelism -----------------------------------------------------------------------------------------------


def pipeline_parallel(share: StageOfJob) -> Iterator[CollectiveCall]:
    """Hidden states go to the next stage, their gradients to the previous one; the two copies of a tied embedding are
    summed."""
    job, layout = share.job, share.job.parallelism
    n = layout.pipeline_parallel_size
    message = share.hidden_bytes // (layout.tensor_parallel_size if layout.sequence_parallel else 1)

    def call(
        function: CollectiveName, axis: str, what: str, where: str, count: int, message: int, size: int, once: bool
    ) -> CollectiveCall:
        source = FINALIZE if once else SCHEDULES
        return CollectiveCall(
            axis=axis, function=function, what=what, where=where, group_size=size, message_bytes=message, count=count,
            source=source, once=once,
        )  # fmt: skip

    forward = sum(not (chunk.is_last or chunk.to_here) for chunk in share.chunks)
    backward = sum(not (chunk.is_first or chunk.from_here) for chunk in share.chunks)
    yield call("send/recv", PIPELINE, "hidden states to the next stage", "end of a forward", forward, message, n, False)
    yield call("send/recv", PIPELINE, "gradients to the stage before", "end of a backward", backward, message, n, False)
    if job.architecture.tie_word_embeddings and n > 1 and (share.is_first or share.is_last):
        rows = -(-job.architecture.vocab_size // layout.tensor_parallel_size)
        table = rows * job.architecture.hidden_size * int(DTYPE_BYTES[job.precision.gradients])
        yield call("all-reduce", EMBEDDING, "gradient of the tied embedding", "after the last backward", 1, table, 2, True)
