"""Which module a tensor, an operation and a gradient belong to, read from names in one place."""

from types import SimpleNamespace

import numpy as np
import pytest

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.gradient_tensors import tensors_of_gradients
from peakcast.models.ledger.layouts.module_tree import BlockKind, ModulePath, block_of, module_of
from peakcast.models.ledger.layouts.parameter_modules import ParameterModules


def stored(name, *shape, trains=True):
    return StoredTensor(name, "layers.0", shape, 2, 2, trains=trains)


def test_a_module_contains_itself_and_its_parts_but_no_namesake():
    attention, query = ModulePath.of("self_attn"), ModulePath.of("self_attn.q_proj")
    assert query.is_inside(attention)
    assert query.is_inside(query)
    assert not attention.is_inside(query)
    assert not ModulePath.of("self_attn_norm").is_inside(attention)  # which begins with the same letters


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("self_attn.q_proj.weight", "self_attn.q_proj"),
        ("lm_head.bias", "lm_head"),
        ("mlp.up_proj.weight.weight", "mlp.up_proj"),  # packed by bitsandbytes
        ("self_attn.q_proj.lora_A", "self_attn.q_proj.lora_A"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),  # experts stacked, a parameter of its own
    ],
)
def test_the_module_of_a_tensor(tensor, module):
    assert str(module_of(tensor)) == module


def test_blocks_have_kinds():
    kinds = [block_of(name) for name in ("embedding", "layers.3", "head", "reference.head")]
    assert kinds == [BlockKind.EMBEDDING, BlockKind.LAYER, BlockKind.HEAD, BlockKind.OTHER]


def test_an_operation_runs_in_the_innermost_module_with_parameters():
    tensors = [stored("mlp.gate.weight", 8, 8), stored("mlp.up.weight", 8, 8), stored("mlp.up.lora_A", 4, 8)]
    labels = ["mlp.up", "mlp.up.lora_A", "mlp.up.lora.add", "mlp.up.clone", "mlp.act_fn", "residual_add"]
    modules = ParameterModules(tensors, labels)
    owners = [str(modules.of_operation(label).owner) for label in labels]
    assert owners == ["mlp.up", "mlp.up.lora_A", "None", "None", "None", "None"]
    assert {str(modules.of_operation(label).linear) for label in labels[:4]} == {"mlp.up"}
    assert str(ParameterModules(tensors, labels, leaf="mlp").of_operation("mlp.up").owner) == "mlp"


def test_a_norm_is_found_under_the_name_that_operations_have_for_it():
    norm = stored("post_attention_layernorm.weight", 8)
    modules = ParameterModules([norm], ["pre_feedforward_layernorm.pow"])
    assert modules.tensors(ModulePath.of("pre_feedforward_layernorm")) == (norm,)
    both = ParameterModules([norm, stored("pre_feedforward_layernorm.weight", 8)], ["pre_feedforward_layernorm.pow"])
    assert both.tensors(ModulePath.of("post_attention_layernorm")) == (norm,)  # Gemma 2 has both


def gradients(*parameters_and_elements):
    names, elements = zip(*parameters_and_elements, strict=True)
    return SimpleNamespace(
        parameters=list(names), num_bytes=np.array(elements) * 2, gradient_columns=np.arange(len(names))
    )


def test_a_gradient_belongs_to_its_modules_tensor_not_to_another_of_its_size():
    """Qwen2's norm has as many elements as the bias of its query."""
    tensors = [stored("post_attention_layernorm.weight", 512), stored("self_attn.q_proj.bias", 512)]
    made = gradients(("post_attention_layernorm.weight", 512), ("self_attn.q_proj.bias", 512))
    assert tensors_of_gradients(made, [0, 1], tensors) == {0: 0, 1: 1}


def test_an_adapters_matrices_have_no_suffix_and_a_classifiers_head_is_in_the_heads_block():
    made = gradients(("self_attn.q_proj.lora_B", 512), ("score.weight", 512))
    tensors = [stored("score.weight", 1, 512), stored("self_attn.q_proj.lora_B", 32, 16)]
    assert tensors_of_gradients(made, [0, 1], tensors) == {0: 1, 1: 0}


def test_a_gradient_of_a_tied_table_or_of_one_expert_is_none_of_the_blocks_tensors():
    made = gradients(("lm_head.weight", 4096), ("mlp.experts.gate_up_proj", 512))
    tensors = [stored("norm.weight", 512), stored("mlp.experts.gate_up_proj", 8, 512, 4)]
    assert tensors_of_gradients(made, [0, 1], tensors) == {}


def test_modules_with_numbers_in_their_names_have_the_gradients_of_their_own():
    """A layer of T5 is a list: its attention is layer.0, its feed-forward layer.1; experts are told apart."""
    names = ["layer.0.SelfAttention.q.weight", "layer.1.mlp.wi.weight", "experts.0.up.weight", "experts.1.up.weight"]
    tensors = [stored(name, 512) for name in names]
    made = gradients(*((name, 512) for name in reversed(names)))
    assert tensors_of_gradients(made, range(4), tensors) == {0: 3, 1: 2, 2: 1, 3: 0}
