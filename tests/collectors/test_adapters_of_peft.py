"""The table of adapter methods against peft itself: every trained tensor, and every tensor that autograd keeps."""

import weakref
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peakcast.dialects.huggingface.job import from_huggingface  # noqa: E402
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import adapted_matrices, network_tensors  # noqa: E402
from peakcast.models.ledger.parameters.adapter_methods import METHODS  # noqa: E402
from peakcast.networks.config import architecture_from_hf_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BATCH, LENGTH, LAYERS = 2, 17, 2
CONFIG = {
    "model_type": "llama", "hidden_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160, "vocab_size": 200, "max_position_embeddings": 64,
}  # fmt: skip
QV = ["q_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CASES = {
    "lora": {"r": 8},
    "dora": {"peft_type": "LORA", "r": 8, "use_dora": True},
    "adalora": {"init_r": 12, "target_r": 8, "total_step": 100},
    "adaption_prompt": {"target_modules": "self_attn", "adapter_len": 10, "adapter_layers": 2},
    "beft": {"target_modules": ["v_proj"]},
    "boft": {},
    "c3a": {"block_size": 16},
    "delora": {"r": 8},
    "fourierft": {"n_frequency": 100},
    "glora": {"r": 8},
    "glora of vectors": {"peft_type": "GLORA", "config_A_B": "vector", "config_C": "vector"},
    "gralora": {"r": 8},
    "hira": {"r": 8},
    "hra": {"r": 8},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "lily": {"r": 8, "stride_A": 2, "target_modules": MLP},
    "ln_tuning": {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "loha": {"r": 8},
    "lokr": {"r": 8},
    "lokr by four": {"peft_type": "LOKR", "r": 8, "decompose_factor": 4},
    "lokr of both": {"peft_type": "LOKR", "r": 2, "decompose_both": True},
    "miss": {"r": 16},
    "miss bat": {"peft_type": "MISS", "r": 16, "init_weights": "bat"},
    "miss mini": {"peft_type": "MISS", "r": 16, "mini_r": 16, "init_weights": "mini"},
    "oft": {"r": 8, "oft_block_size": 0},
    "oft by blocks": {"peft_type": "OFT", "r": 0, "oft_block_size": 32},
    "p_tuning": {"num_virtual_tokens": 7, "encoder_hidden_size": 50},
    "prefix_tuning": {"num_virtual_tokens": 7},
    "prefix_tuning projected": {
        "peft_type": "PREFIX_TUNING", "num_virtual_tokens": 7, "prefix_projection": True, "encoder_hidden_size": 50,
    },
    "prompt_tuning": {"num_virtual_tokens": 7},
    "randlora": {"r": 8},
    "road": {"group_size": 16},
    "road 4": {"peft_type": "ROAD", "variant": "road_4", "group_size": 16},
    "shira": {"r": 8},
    "trainable_tokens": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
    "unilora": {"r": 8, "theta_d_length": 64},
    "vblora": {"r": 4, "num_vectors": 16, "vector_length": 16},
    "vera": {"r": 16},
    "waveft": {"n_frequency": 100},
}  # fmt: skip
ON_PROJECTIONS = [
    name
    for name in CASES
    if not METHODS[name.split()[0]].virtual_tokens
    and name.split()[0] not in ("lora", "adaption_prompt", "prefix_tuning", "ln_tuning", "trainable_tokens", "shira")
]
"""Methods whose forward is a projection's; LoRA's is compared in whole traces, and SHiRA keeps a sparse tensor."""


def adapted(name):
    """peft's model of a case and ours: its network and its adapters."""
    settings = dict(CASES[name])
    kind = settings.pop("peft_type", name.split()[0].upper())
    if kind not in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"):
        settings.setdefault("target_modules", QV)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
    mapping = {**settings, "peft_type": kind}
    if "target_modules" in settings and isinstance(settings["target_modules"], str):
        mapping.pop("target_modules")
    translation = from_huggingface(CONFIG, {"torch_dtype": "bfloat16"}, peft=mapping)
    assert not translation.unsupported
    task = {"task_type": "CAUSAL_LM"} if "tuning" in name or name == "adaption_prompt" else {}
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, kind)](**settings, **task)
    return peft.get_peft_model(model, config), architecture_from_hf_config(CONFIG), translation.job.finetuning


@pytest.mark.parametrize("name", CASES)
def test_every_trained_tensor_has_peft_s_shape(name):
    model, architecture, tuning = adapted(name)
    theirs = Counter(tuple(p.shape) for _, p in model.named_parameters() if p.requires_grad)
    made = [*network_tensors(architecture, tuning)]
    for matrix in adapted_matrices(architecture, tuning):
        made += METHODS[tuning.method].on_matrix(matrix)
    ours = Counter(one.shape for one in made if one.trains)
    if tuning.method == "adalora":
        theirs.subtract({(1,): len([n for n, _ in model.named_parameters() if "ranknum" in n])})  # a number, not a weight
    assert +theirs == +ours


@pytest.mark.parametrize("name", ON_PROJECTIONS)
def test_autograd_keeps_what_the_table_says_of_a_projection(name):
    model, architecture, tuning = adapted(name)
    model.train()
    stored = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    layer = model.base_model.model.model.layers[1]
    kept, inside, inputs = [], [], set()

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        held = Held(tensor)
        if inside:
            kept.append(weakref.ref(held))
        return held

    modules = [module for path, module in layer.named_modules() if path.rsplit(".", 1)[-1] in set(tuning.targets)]

    def enter(module, arguments):
        inside.append(module)
        inputs.add(arguments[0].untyped_storage().data_ptr())

    def leave(module, arguments, output):
        inside.pop()

    for module in modules:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        ids = torch.randint(0, 200, (BATCH, LENGTH))
        out = model(input_ids=ids, labels=ids)
    alive = [ref().tensor for ref in kept if ref() is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    theirs = sum(size for pointer, size in storages.items() if pointer not in stored | inputs)
    ours, rows, inputs_of = 0, BATCH * LENGTH, METHODS[tuning.method]
    for matrix in adapted_matrices(architecture, tuning):
        if matrix.layer == 1:
            made = inputs_of.keeps(matrix, rows)
            ours += 4 * sum(made.wide) + 2 * sum(made.narrow) + 2 * rows * matrix.rows_out * made.result
    assert out.loss.requires_grad
    assert ours == pytest.approx(theirs, rel=0.02, abs=4096)


def test_methods_that_are_not_built_are_refused():
    """A trace of another method than LoRA and DoRA must not be one of LoRA."""
    from peakcast.collectors.measure.grid import expand
    from peakcast.collectors.stacks.huggingface_model import with_adapters
    from peakcast.core.errors import CollectorError

    (job,) = expand({"base": {"architecture": "smollm2-135m", "finetuning": {"method": "loha", "rank": 8}}})
    with pytest.raises(CollectorError, match="method='loha' has no collector"):
        with_adapters(None, job)


@pytest.mark.whole
def test_a_trace_of_dora_is_its_ledger(ledger_equals_trace):
    from peakcast.collectors.measure.grid import expand

    network = {**CONFIG, "name": "small", "hidden_size": 768, "intermediate_size": 2048, "attention_bias": True}
    cell = {"architecture": network, "finetuning": {"method": "dora", "rank": 8, "targets": ["all-linear"]}}
    again = {"activation_checkpointing.mode": "full", "framework_options": {"autocast": True}}
    (job,) = expand({"base": {"sequence_length": 256, "micro_batch_size": 4}, "include": [cell | again]})
    ledger_equals_trace(job, rel=1e-3)
