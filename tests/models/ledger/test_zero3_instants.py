"""What ZeRO-3 allocates within one operation, and which modules have a turn: orders read in DeepSpeed and its traces."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Loss, Offload
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero import Buckets
from peakcast.models.ledger.layouts.zero3_fetching import Coordinator
from peakcast.models.ledger.layouts.zero3_hooks import (
    BlockOperations,
    Function,
    Module,
    ModuleTurn,
    PassDirection,
    TurnPart,
)
from peakcast.models.ledger.layouts.zero3_instants import GatheredBefore, Instants, Reduction
from peakcast.models.ledger.layouts.zero3_turns import module_turns, with_recomputation_inside
from peakcast.models.ledger.layouts.zero3_weights import Zero3Engine
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Phase


def matrix(name, *shape):
    return StoredTensor(f"{name}.weight", "layers.0", shape or (512, 512), 2, 2, trains=True)


def names(turns):
    return [turn.name.removeprefix("layers.0 ") for turn in turns if turn.enters and "within" not in turn.name]


def test_what_is_fetched_in_passing_is_there_before_the_operation_allocates():
    fetched = GatheredBefore(3)
    fetched.allocate(100)  # a flat output,
    fetched.allocate(100)  # the tensors that are copied out of it
    fetched.free(100)
    assert [fetched.more_than(made) for made in (0, 60, 100, 300)] == [100, 40, 0, 0]
    fetched.free_older(50)  # one that came with an earlier turn, alive all the while
    assert fetched.more_than(60) == 90


def test_a_reduction_takes_the_place_of_what_the_operation_has_let_go_of():
    assert Reduction(100, 40, 0).num_bytes() == (100, 40)
    assert Reduction(100, 40, 70).num_bytes() == (30, 40)
    assert Reduction(100, 40, 120).num_bytes() == (0, 20)


@pytest.mark.parametrize(("from_host", "made", "extra"), [(False, 0, 0), (True, 0, 2), (True, 512, 1), (True, 2048, 0)])
def test_parts_on_the_host_are_copied_to_the_gpu_to_be_sent(from_host, made, extra):
    """A tensor of 2,048 bytes on two ranks: this one's part is there beside it, until the operation runs."""
    weight, step = matrix("a", 1024), Step()
    sizes = Buckets(reduce=100, num_reduce=1, prefetch=0, persistence=0, reuse=0, live=0, sub_group=1)
    coordinator = Coordinator(step, Zero3Engine(ranks=2, sizes=sizes, packs=True, from_host=from_host))
    coordinator.play([ModuleTurn(Module("a", (weight,)), 0, 1)], Instants([made]))
    step.moment("", Phase.FORWARD)
    assert int(step.timeline().totals[0]) // 512 == 4 + extra


def test_modules_without_weights_have_turns_where_they_are_modules():
    weights = [matrix("self_attn.c_attn"), matrix("self_attn.c_proj")]
    labels = ["self_attn.c_attn", "qkv_split", "self_attn.c_proj", "self_attn.dropout", "residual_add"]
    forward = BlockOperations("layers.0", labels, 0)
    asked = {family: names(module_turns(forward, weights, family=family)) for family in ("gpt2", "starcoder2")}
    assert asked["starcoder2"] == ["self_attn", "self_attn.c_attn", "self_attn.c_proj"]
    assert asked["gpt2"] == [*asked["starcoder2"], "resid_dropout"]
    backward = module_turns(BlockOperations("layers.0", labels[::-1], 0, PassDirection.BACKWARD), weights, family="gpt2")
    assert names(backward) == ["self_attn", "resid_dropout", "self_attn.c_proj", "self_attn.c_attn"]


def test_an_adapter_has_one_dropout_and_the_loss_is_no_module():
    tensors = [matrix("q_proj"), matrix("q_proj.lora_A"), matrix("q_proj.lora_B")]
    labels = ["q_proj", "q_proj.lora_A", "q_proj.lora_B", "q_proj.lora.add"]
    turns = module_turns(BlockOperations("layers.0", labels, 0), tensors)
    assert [name for name in names(turns) if name.endswith("dropout")] == ["q_proj.dropout"]
    head = module_turns(BlockOperations("head", ["lm_head", "logits.to_float32", "nll_loss"], 0), [matrix("lm_head")])
    assert [turn.name for turn in head if turn.enters] == ["head lm_head"]


def test_a_recomputation_begins_with_dropout_or_within_the_first_matrix():
    """Dropout asks for its mask before the matrix above it has had its turn."""
    again = [ModuleTurn(Module("again"), 10, 11, direction=PassDirection.RECOMPUTATION)]
    turns = [ModuleTurn(Module("mlp"), 20, 21), ModuleTurn(Module("fc2", (matrix("fc2"),)), 21, 22)]
    assert [turn.name for turn in with_recomputation_inside(turns, again, asks=20)] == ["mlp", "again", "fc2"]
    first = with_recomputation_inside(turns, again, asks=21)
    assert [(turn.name, turn.enters) for turn in first] == [("mlp", 1), ("fc2", 1), ("again", 1), ("fc2", 0)]
    assert first[1].part is TurnPart.BEGINS  # its weight stays until the recomputation is over
    turns.insert(1, ModuleTurn(Function("dropout"), 20, 21))  # a module that ends before the matrix begins
    asked = [(turn.name, turn.enters) for turn in with_recomputation_inside(turns, again, asks=20)]
    assert asked == [("mlp", 1), ("dropout", 1), ("again", 1), ("dropout", 0), ("fc2", 1)]


def test_a_module_that_reads_anothers_weight_holds_it_to_its_end():
    """T5's feed-forward asks for the dtype of its last projection: an external parameter, there from its begin on."""
    tensors = [matrix("mlp.layer_norm"), matrix("mlp.wi"), matrix("mlp.wo")]
    labels = ["mlp.layer_norm.pow", "mlp.wi", "mlp.relu", "mlp.wo", "mlp.residual_add"]
    turns = module_turns(BlockOperations("layers.0", labels, 0), tensors, family="t5")
    holding = [(turn.name, turn.begins, turn.part) for turn in turns if tensors[2] in turn.tensors]
    inner, projection = "layers.0 mlp.inner", "layers.0 mlp.wo"
    assert holding == [(inner, 1, TurnPart.BEGINS), (projection, 3, TurnPart.UNRELEASED), (inner, 3, TurnPart.ENDS)]


def test_ligers_loss_fetches_the_head_as_the_network_begins(job):
    """No module runs: the weight is an external parameter of the network, in later steps there through all of forward."""
    options = FrozenMapping({"stage3_param_persistence_threshold": 256, "stage3_prefetch_bucket_size": 0})
    whole, fused = (
        ledger(job("zero3", framework_options=options, loss=Loss(fused_linear_cross_entropy=on))) for on in (False, True)
    )
    head = "gathered", "head", 1024 * 256 * 2
    found = [zip(t.names, t.modules, t.num_bytes, t.born, strict=True) for t in (whole, fused)]
    first, external = (min(at for *what, at in rows if tuple(what) == head) for rows in found)
    assert whole.labels[first] == "lm_head"
    assert external == 0


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_gradient_larger_than_the_bucket_is_cloned_for_an_optimizer_on_the_host(job, stage):
    options = FrozenMapping({"reduce_bucket_size": 256 * 512})
    steady = ledger(job(stage, framework_options=options, offload=Offload(optimizer=True)))
    clones = [int(size) for name, size in zip(steady.names, steady.num_bytes, strict=True) if name == "gradient.clone"]
    assert len(clones) == 2  # the table's and the head's
    assert max(clones) <= 1024 * 256 * 2


def test_what_is_freed_before_anything_is_fetched_adds_nothing():
    fetched = GatheredBefore(3)
    fetched.free_older(50)
    assert fetched.more_than(0) == 0


def test_of_two_reductions_in_an_operation_the_one_with_more_left_beside_it_counts():
    """A leaf's second finds the gradients gone that the first has sent."""
    assert Reduction(100, 0, 10).beyond > Reduction(120, 0, 80).beyond
