"""Networks with state-space layers: their parameters are those of transformers' own networks, and the answer says what is
not modelled."""

import pytest

from peakcast.core.errors import SpecError
from peakcast.jobs.spec import ActivationCheckpointing, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.parameters.inventory import num_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.networks.config import architecture_from_hf_config
from peakcast.networks.reverse import hf_config_of
from peakcast.timelines.timeline import Category, Phase

ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 300}
CONFIGS = {
    "mamba": {"hidden_size": 96, "num_hidden_layers": 3},
    "mamba_with_biases": {
        "model_type": "mamba", "hidden_size": 96, "num_hidden_layers": 2, "use_bias": True, "use_conv_bias": False,
        "time_step_rank": 20, "tie_word_embeddings": False,
    },
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 2, "expand": 4},
    "mamba2": {"hidden_size": 128, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 64, "n_groups": 2, "state_size": 32},
    "bamba": {"hidden_size": 128, "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 4, **ATTENTION},
    "falcon_h1": {"hidden_size": 128, "num_hidden_layers": 2, "mamba_d_ssm": 192, "mamba_n_heads": 6, **ATTENTION},
    "falcon_h1_with_norm": {
        "model_type": "falcon_h1", "hidden_size": 128, "num_hidden_layers": 2, "mamba_d_ssm": 192, "mamba_n_heads": 6,
        "mamba_rms_norm": True, "head_dim": 32, **ATTENTION,
    },
    "nemotron_h": {"hidden_size": 128, "hybrid_override_pattern": "M-M*-", "mamba_num_heads": 4, "head_dim": 16,
                   **ATTENTION},
    "nemotron_h_with_experts": {
        "model_type": "nemotron_h", "hidden_size": 128, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 4, "head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56, **ATTENTION,
    },
    "jamba": {"hidden_size": 128, "num_hidden_layers": 8, "num_experts": 4, **ATTENTION},
}  # fmt: skip


def config_of(name):
    return {"model_type": name, "vocab_size": 512, **CONFIGS[name]}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_network(name):
    transformers = pytest.importorskip("transformers")
    import torch

    config = config_of(name)
    architecture = architecture_from_hf_config(config)
    for each in (config, hf_config_of(architecture)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**each))
        assert num_parameters(architecture) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_parameter_has_its_gradient_and_states(name, mode):
    architecture = architecture_from_hf_config(config_of(name))
    checkpointing = ActivationCheckpointing(mode=mode)
    job = TrainingJob(architecture=architecture, sequence_length=64, activation_checkpointing=checkpointing)
    timeline = ledger(job)
    between = timeline.composition(len(timeline.labels) - 1)
    whole = 2 * num_parameters(architecture)
    slack = 1024 * 30 * architecture.num_hidden_layers  # every tensor is rounded up
    assert whole <= between[Category.PARAMETERS] <= whole + slack
    assert 2 * whole <= between[Category.OPTIMIZER_STATES] <= 2 * (whole + slack)
    stepping = timeline.composition(timeline.peak(Phase.GRADIENT_CLIPPING).instant)[Category.GRADIENTS]
    assert whole <= stepping <= whole + slack


def test_the_answer_says_what_is_not_modelled_and_where_to_see_it():
    reason = out_of_scope(TrainingJob(architecture=architecture_from_hf_config(config_of("mamba2"))))
    assert "parameters, gradients and optimizer states are exact" in reason
    assert "peakcast explain --trace" in reason


def test_a_layer_of_an_unknown_kind_is_refused_by_name():
    with pytest.raises(SpecError, match="layers_block_type='MX' must be"):
        architecture_from_hf_config({**config_of("nemotron_h"), "hybrid_override_pattern": "MX"})
