"""Megatron-LM's buffers, counted by hand."""

from __future__ import annotations

from peakcast.models.ledger.megatron.distributed_optimizer import BufferRules, bucket_size, buffer_elements, shard_pieces
from peakcast.models.ledger.megatron.parameters import Parameter

PARAMETERS = [Parameter("a", "", (10, 10)), Parameter("b", "", (7,)), Parameter("c", "", (128,))]


def test_without_sharding_nothing_is_padded():
    rules = BufferRules(sharded=False, shards=8)
    assert buffer_elements(PARAMETERS, rules) == 100 + 7 + 128
    assert shard_pieces(PARAMETERS, rules) == [(p, p.numel) for p in PARAMETERS]


def test_parameters_start_at_64_and_the_bucket_ends_at_128():
    """c: 0-128; b: 128-135; a: from 192 to 292; padded to lcm(1, 128)."""
    assert buffer_elements(PARAMETERS, BufferRules(sharded=True, shards=1)) == 384
    assert buffer_elements(PARAMETERS, BufferRules(sharded=True, shards=3)) == 384
    assert buffer_elements(PARAMETERS, BufferRules(sharded=True, shards=8, high_bandwidth_padding=True)) == 2**16


def test_a_shared_embedding_has_its_own_bucket():
    shared = [Parameter("embedding", "", (100,), own_bucket=True), *PARAMETERS]
    assert buffer_elements(shared, BufferRules(sharded=True, shards=1)) == 384 + 128


def test_full_buckets_are_padded_each():
    """c fills a bucket of 128; b and a share one: 0-7, 64-164, padded to 256."""
    assert buffer_elements(PARAMETERS, BufferRules(sharded=True, shards=1, bucket_size=128)) == 128 + 256


def test_a_shard_is_one_part():
    rules = BufferRules(sharded=True, shards=4)
    assert sum(owned for _, owned in shard_pieces(PARAMETERS, rules)) == 384 // 4


def test_a_rank_owns_what_of_the_parameters_lies_in_its_part():
    """c: 0-128; b: 128-135; a: 192-292; padded to 384. Two parts of 192, three of 128."""
    a, b, c = PARAMETERS
    halves = BufferRules(sharded=True, shards=2)
    assert shard_pieces(PARAMETERS, halves, 0) == [(c, 128), (b, 7)]
    assert shard_pieces(PARAMETERS, halves, 1) == [(a, 100)]
    thirds = BufferRules(sharded=True, shards=3)
    assert [shard_pieces(PARAMETERS, thirds, i) for i in range(3)] == [[(c, 128)], [(b, 7), (a, 64)], [(a, 36)]]


def test_every_bucket_is_cut_for_itself():
    """Buckets 0-128 (c) and 128-384 (b 128-135, a 192-292): of each the second half."""
    a, _, c = PARAMETERS
    rules = BufferRules(sharded=True, shards=2, bucket_size=128)
    assert shard_pieces(PARAMETERS, rules, 1) == [(c, 64), (a, 36)]


def test_bucket_size():
    assert bucket_size(False, 0, 8) is None
    assert bucket_size(True, 1, 8) is None
    assert bucket_size(True, 0, 8) == 40_000_000
    assert bucket_size(True, 0, 64) == 64_000_000
