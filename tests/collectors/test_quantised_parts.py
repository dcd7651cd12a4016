"""What bitsandbytes quantizes of a network of experts: the nn.Linear that transformers builds it from, and no more."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Finetuning, TrainingJob
from peakcast.models.ledger.huggingface.stored_parameters import quantised_roles
from peakcast.models.ledger.parameters.inventory import layer_parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NETWORKS = ["mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "gpt-oss-20b"]


def job(name: str, **more: object) -> TrainingJob:
    tuned = Finetuning(method="qlora", rank=8, quantization="nf4")
    return TrainingJob(architecture=catalog.architecture(name), finetuning=tuned, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_quantised_roles_are_the_linear_layers_of_transformers(name):
    """As `replace_with_bnb_linear` picks them (`type(module) is nn.Linear`, lm_head left out)."""
    from peakcast.networks.reverse import hf_config_of

    one = job(name)
    last = one.architecture.num_hidden_layers - 1
    config = transformers.AutoConfig.for_model(**hf_config_of(one.architecture))
    with torch.device("meta"):
        layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[last]
    linear = sum(module.weight.numel() for module in layer.modules() if type(module) is torch.nn.Linear)
    counted = [t for t in layer_parameters(one.architecture, last) if t.role in quantised_roles(one) and len(t.shape) > 1]
    gate = one.architecture.hidden_size if one.architecture.moe.shared_expert_gate else 0  # a Linear of one row
    assert sum(t.numel for t in counted) == pytest.approx(linear, abs=gate)


def test_where_experts_are_linear_layers_they_are_quantised():
    assert "expert" in quantised_roles(job("mixtral-8x7b", versions=FrozenMapping({"transformers": "4.51"})))
    assert "expert" in quantised_roles(job("mixtral-8x7b", framework="torch", versions=FrozenMapping({"litgpt": "0.5"})))
    assert "expert" not in quantised_roles(job("mixtral-8x7b"))
    assert quantised_roles(job("mixtral-8x7b").replace(finetuning=Finetuning())) == ()
