"""Compiled graphs: Inductor's own estimates of its orders, and small graphs counted by hand."""

from dataclasses import replace

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.models.ledger.compiled import layer as layer
from peakcast.models.ledger.compiled import network as network
from peakcast.models.ledger.compiled.graphs_in_turn import GraphsInTurn
from peakcast.models.ledger.compiled.inductor_graph import InductorGraph, Life
from peakcast.models.ledger.compiled.inductor_kernels import Op
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.layers import Blocks

SMALL = {
    "name": "llama-3.1-8b", "hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
CHECKPOINTED = {"activation_checkpointing": {"mode": "full"}}
HIDDEN = 8192 * 512 * 2
"""Bytes of the stream between layers, in which the estimates below are given."""


def op(name, reads="", size=10, **more):
    return Op(name=name, reads=tuple(reads.split()), writes={name: size}, **more)


def graphs(kept, **changes):
    """The forward and backward graphs of one layer."""
    regions = {"compile": True, "framework": "torch", "framework_options": {"compiled_regions": "layers"}}
    job = expand({"include": [{**regions, **changes}]})[0]
    context = Blocks(job, block_context(job, None)).contexts[0]
    recomputed = replace(context, backward=replace(context.backward, cached_matmuls=kept or 0))
    return layer.layer_graphs(recomputed, kept is not None)


@pytest.mark.parametrize(
    ("kept", "changes", "estimates", "chosen"),
    [
        # graph order, least memory first, breadth first, depth first; what torch 2.13 logs ("Baseline peak memory", ...)
        # for the backward graph of this layer, over HIDDEN
        (None, {"architecture": SMALL}, (25.7578, 25.7578, 25.7578, 29.0391), 0),
        (0, {"architecture": SMALL}, (29.0391, 29.0391, 29.0391, 29.0391), 0),
        (1, {"architecture": SMALL}, (27.0313, 27.0313, 27.0313, 27.0313), 0),
        (2, {"architecture": SMALL}, (27.5352, 27.5352, 27.5352, 27.5352), 0),
        (None, {"architecture": "llama-3.1-8b"}, (58.0171, 57.5020, 57.0322, 57.5020), 2),
        (0, {"architecture": "llama-3.1-8b"}, (58.0171, 57.5020, 60.0010, 57.5020), 1),
        (None, {"architecture": "qwen3-0.6b"}, (27.8320, 27.8320, 27.8320, 30.0820), 0),
        (None, {"architecture": "qwen2.5-0.5b"}, (29.4453, 29.4453, 29.4453, 33.1563), 0),
        (None, {"architecture": "phi-3-mini"}, (43.5020, 44.2520, 44.2520, 39.0020), 3),
    ],
)
def test_the_orders_of_a_layers_backward_and_their_peaks_are_what_inductor_logs(kept, changes, estimates, chosen):
    tokens = {"llama-3.1-8b": (1024, 1), "qwen3-0.6b": (4096, 1), "qwen2.5-0.5b": (4096, 1), "phi-3-mini": (1024, 2)}
    name = changes["architecture"]
    length, batch = (4096, 2) if isinstance(name, dict) else tokens[name]
    _, backward = graphs(kept, **changes, sequence_length=length, micro_batch_size=batch)
    peaks = [peak / HIDDEN for peak in backward.peaks()]
    assert peaks == pytest.approx(estimates, abs=1e-4)
    assert peaks.index(min(peaks)) == chosen


def test_a_result_takes_the_place_of_what_only_it_still_reads():
    graph = InductorGraph([op("a"), op("b", "a x", replaces=("a", "x")), op("c", "b", replaces=("b",))], {"x": 10}, ["c"])
    lives, until = graph.lives()
    assert lives == [Life("a", 10, 0, 1), Life("b", 10, 1, 2), Life("c", 10, 2, 3)]
    assert until == {"x": 2}


def test_nothing_takes_the_place_of_what_is_still_read_elsewhere_or_is_of_another_size():
    graph = InductorGraph([op("a"), op("b", "a", 20, replaces=("a",)), op("c", "a b", replaces=())], {}, ["c"])
    assert graph.lives()[0] == [Life("a", 10, 0, 3), Life("b", 20, 1, 3), Life("c", 10, 2, 3)]


def test_of_one_kernel_both_results_are_allocated_where_both_read_what_they_would_replace():
    both = [op("a"), op("b", "a", replaces=("a",)), op("c", "a", replaces=("a",), fuses=("b",)), op("d", "b c")]
    graph = InductorGraph(both, {}, ["d"])
    assert graph.labels() == ["a", "b+c", "d"]
    assert [life.name for life in graph.lives()[0]] == ["a", "b", "c", "d"]


def test_operations_that_would_wait_for_each_other_are_not_one_kernel():
    graph = InductorGraph([op("a", "x"), op("product", "a"), op("b", "product", fuses=("a",))], {"x": 10}, ["b"])
    assert graph.labels() == ["a", "product", "b"]


def test_the_parts_of_a_call_are_allocated_with_it_and_released_one_by_one():
    call = Op(name="call", reads=("x",), writes={"q": 10, "k": 20}, parts=True)
    graph = InductorGraph([call, op("of_q", "q", is_result=True), op("of_k", "k", is_result=True)], {"x": 10})
    lives = {life.name: life for life in graph.lives()[0]}
    assert lives["q"].born == lives["k"].born == 0
    assert lives["q"].dies != lives["k"].dies


WIDE = {"precision": {"parameters": "float32", "compute": "bfloat16"}, "framework_options": {"autocast": True}}
TINY = {
    "name": "llama-3.1-8b", "num_hidden_layers": 3, "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


FLOAT8 = {"precision": {"compute": "float8"}}
CUT, TWO = {"num_hidden_layers": 3, "vocab_size": 4096}, {"micro_batch_size": 2}


@pytest.mark.parametrize(
    ("changes", "estimates"),
    [
        # of the backward graph, as torch 2.13 logs them: graph order, least memory first, breadth first, depth first
        ({}, (157460528, 161556528, 161556528, 184594448)),
        (CHECKPOINTED, (127961104, 190918704, 190918704, 184594448)),
        (
            {**CHECKPOINTED, "architecture": {**TINY, "name": "qwen2.5-0.5b"}, "micro_batch_size": 2},
            (201383952, 289660976, 316923952, 323051536),
        ),
        ({**WIDE, "architecture": {**TINY, "name": "qwen3-8b"}}, (276148272, 273952816, 280244272, 278294576)),
        ({**WIDE, "architecture": {**TINY, "name": "llama-3.2-1b"}}, (217231408, 215035952, 221327408, 221425712)),
        ({"finetuning": {"method": "lora", "rank": 16}}, (134828080, 134828080, 134828080, 134828080)),
        (
            {"finetuning": {"method": "lora", "rank": 16, "targets": ["all-linear"]}},
            (236671024, 236671024, 236671024, 279253008),
        ),
        ({"architecture": {**CUT, "name": "phi-3-mini"}, **TWO}, (814004240, 864335888, 866433040, 876929040)),
        ({"architecture": {**CUT, "name": "gemma-2-2b"}, **TWO}, (763135024, 800883760, 800883760, 944939024)),
        ({"framework": "torch", **FLOAT8}, (129149120, 180431048, 180431048, 148943008)),
    ],
)
def test_the_orders_of_a_whole_networks_backward_have_the_peaks_that_inductor_logs(changes, estimates):
    job = expand({"include": [{"compile": True, "architecture": TINY, "sequence_length": 1024, **changes}]})[0]
    blocks = Blocks(job, block_context(job, None))
    backward = network.network_graphs(tuple(blocks.contexts), tuple(blocks.recomputed)).backward
    assert tuple(backward.peaks()) == estimates


def test_a_loss_that_is_a_graph_of_its_own_hands_its_gradient_to_the_networks():
    """GPT-2's; the estimates are those that torch 2.13 logs of the network's backward."""
    cut = {"architecture": {**CUT, "name": "gpt2"}, "sequence_length": 1024, "micro_batch_size": 4}
    blocks = Blocks(job := expand({"include": [{"compile": True, **cut}]})[0], block_context(job, None))
    forward, backward, _ = network.network_graphs(tuple(blocks.contexts), tuple(blocks.recomputed))
    of_loss, of_network = backward.graphs
    assert of_network.peaks() == [380382256, 389820976, 396304432, 450797584]
    lives = {life.name: life for life in backward.lives()[0]}
    assert (lives["d_logits"].born, lives["d_logits"].dies) == (0, len(backward.order))  # read last: the table is shared
    assert backward.lives()[1]["logits"] == len(of_loss.order)
    assert forward.labels()[-1] == "loss"


def test_what_one_graph_gives_is_there_until_a_later_one_has_read_it():
    first = InductorGraph([op("a"), op("b", "a")], {}, ["b"])
    second = InductorGraph([op("c", "b"), op("d", "c")], {}, ["d"])
    lives, _ = GraphsInTurn([first, second]).lives()
    assert lives == [Life("a", 10, 0, 2), Life("b", 10, 1, 3), Life("c", 10, 2, 4), Life("d", 10, 3, 4)]


@pytest.mark.parametrize(("before", "waits"), [([], False), ([op("more", size=70)], True)])
def test_memory_that_nobody_needs_any_more_waits_for_who_asks_for_as_much_where_the_peak_allows_it(before, waits):
    """`wide` and `wider` together are 60, the peak, unless 70 was there before: then `b` may wait beside them for `e`."""
    ops = [*before, op("a"), op("b", "a"), op("wide", "b", 30), op("wider", "wide", 30), op("e", "wider", is_result=True)]
    lives = {life.name: life for life in InductorGraph(ops, {}).lives()[0]}
    assert (lives["b"].dies == lives["e"].born) == waits
    assert (lives["b"].dies == lives["wider"].born) != waits


def test_what_only_its_own_kernel_reads_and_what_nobody_takes_from_a_call_is_no_buffer_that_waits():
    sums = [op("mean", "x", 4), op("norm", "x mean", fuses=("mean",)), op("product", "norm", is_result=True)]
    assert [life.name for life in InductorGraph(sums, {"x": 10}).lives()[0]] == ["norm", "product"]
    call = Op(name="call", reads=("x",), writes={"q": 10, "seed": 8}, parts=True)
    graph = InductorGraph([call, op("of_q", "q", is_result=True)], {"x": 10})
    assert Life("seed", 8, 0, 1) in graph.lives()[0]
    assert graph.peaks()[0] == 20  # x and q, then q and what is made of it: nobody counts the seed
