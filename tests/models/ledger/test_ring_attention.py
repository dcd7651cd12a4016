"""Ring attention by hand: what one turn and two turns of the ring hold at once, and what more ranks change."""

import pytest

from peakcast.models.ledger.huggingface.blocks.ring_attention import Ring, RingTensors, backward_bytes, forward_bytes

TENSORS = RingTensors(query=1000, key=100, element=2, statistics=10)
"""bf16 queries of 1,000 bytes; keys of 100 and as many values; fp32 statistics of 10."""


def test_the_last_of_two_ranks_merges_whole_queries():
    # gathered 2 * 200; the first result in fp32 2000 with its statistics 10; the second in bf16 1000, its statistics 10 and
    # in fp32 2000; their distance 2000, the weight 10, and the product 2000
    assert forward_bytes(Ring(ranks=2, position=1), TENSORS) == 400 + 2010 + 1010 + 2000 + 2000 + 10 + 2000


def test_the_first_of_two_ranks_merges_the_tail_and_joins_it_to_the_head():
    # gathered; the first result in fp32, joined anew while it is there, its statistics already; the tail's bf16 result 500
    # and statistics 5, in fp32 1000, merged 1000 and 5
    assert forward_bytes(Ring(ranks=2), TENSORS) == 400 + 2000 + 2000 + 10 + 505 + 1000 + 1005


def test_the_first_of_two_ranks_backward():
    # gathered and sent; the tail's statistics 5, its gradients of q, k, v 500 + 200; gradients of keys and values in fp32:
    # what came in 400, what was sent 400, what arrives 400; of all queries in fp32, twice
    assert backward_bytes(Ring(ranks=2), TENSORS) == 400 + 200 + 5 + 700 + 3 * 400 + 2 * 2000


@pytest.mark.parametrize("position", range(8))
def test_passing_on_needs_less_than_gathering_once_many_share(position):
    rings = [Ring(ranks=8, position=position, gathers=gathers) for gathers in (False, True)]
    passed, gathered = (forward_bytes(ring, TENSORS) for ring in rings)
    assert passed < gathered
    assert gathered - passed <= 8 * 200


def test_only_the_last_rank_leaves_its_output_as_the_kernel_lays_it_out():
    assert [Ring(ranks=4, position=place).copies_output for place in range(4)] == [True, True, True, False]
