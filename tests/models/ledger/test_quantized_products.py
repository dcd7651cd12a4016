"""Products with 4-bit matrices, whose dtype bitsandbytes is told, and which matrix stays whole, counted by hand."""

from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import Finetuning, Precision
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters

QLORA = Finetuning(method="qlora", rank=8, quantization="nf4")
MATRIX, ROWS, WIDE = 256 * 512, 128, 512
"""Elements of mlp.down_proj; tokens; features that it reads."""


def temporaries(job, parameters="bfloat16", tuning=QLORA, versions=None, **options):
    """Bytes of what each product with mlp.down_proj makes in passing."""
    asked = job(
        layout="ddp",
        ranks=1,
        framework="huggingface",
        finetuning=tuning,
        versions=FrozenMapping(versions or {}),
        precision=Precision(parameters=parameters),
        framework_options=FrozenMapping(options),
    )
    step = ledger(asked)
    made = zip(step.names, step.num_bytes.tolist(), strict=True)
    return sorted({size for name, size in made if name.startswith("mlp.down_proj") and name.endswith(".temporary")})


def test_in_the_dtype_of_other_products_a_matrix_is_whole_once(job):
    assert temporaries(job, autocast=True) == [2 * MATRIX]


def test_in_float32_autocast_casts_both_factors_again(job):
    """Forward has the matrix twice, and the input in bfloat16; backward has it in the dtype of the gradient."""
    made = temporaries(job, autocast=True, quantized_compute_dtype="float32")
    assert made == [2 * MATRIX, (4 + 2) * MATRIX + 2 * ROWS * WIDE]


def test_without_autocast_backward_casts_the_matrix(job):
    assert temporaries(job, quantized_compute_dtype="float32") == [4 * MATRIX, (2 + 4) * MATRIX]


def test_weights_loaded_in_float32_are_dequantised_to_it_before_they_are_narrow(job):
    assert temporaries(job, parameters="float32", autocast=True) == [2 * MATRIX, (4 + 2) * MATRIX]


def test_scales_that_are_quantised_too_are_whole_twice_until_the_product_is_there(job):
    """bitsandbytes 0.50 backends/cuda/ops.py `_dequant_linear_fallback`: absmax_dq, and absmax with its offset; one float32
    for 64 elements. Before, forward had a function for it, whose variables ended with it."""
    twice = replace(QLORA, double_quantization=True)
    assert temporaries(job, autocast=True, tuning=twice) == [2 * MATRIX, 2 * MATRIX + 2 * 4 * MATRIX // 64]
    before = temporaries(job, autocast=True, tuning=twice, versions={"bitsandbytes": "0.49.0"})
    assert before == [2 * MATRIX]


def stored(asked):
    """Bytes of each layer's mlp.down_proj as it is stored."""
    weights = [tensor for tensor in stored_parameters(asked) if tensor.name.startswith("mlp.down_proj.weight")]
    layers = sorted({tensor.module for tensor in weights})
    return [sum(one.numel * one.element_bytes for one in weights if one.module == layer) for layer in layers]


def test_a_matrix_that_is_the_networks_last_parameter_is_not_quantised(job):
    """OLMo's norms have no weights, and OLMo-1B's head is its token table, so that the last layer's last matrix is the last
    parameter, which transformers does not let bitsandbytes quantise."""
    olmo = replace(catalog.architecture("olmo-1b"), num_hidden_layers=2)
    numel = olmo.hidden_size * olmo.intermediate_size
    packed = numel // 2 + numel // 64 * 4 + 16 * 4
    asked = job(layout="ddp", ranks=1, framework="huggingface", finetuning=QLORA, architecture=olmo)
    assert stored(asked) == [packed, 2 * numel]
    headed = asked.replace(architecture=replace(olmo, tie_word_embeddings=False))
    assert stored(headed) == [packed, packed]
    products = {name for name in ledger(asked).names if name.endswith("mlp.down_proj.temporary")}
    assert len(products) == 1  # of the first layer


def test_an_adapters_output_is_narrow_before_it_is_added_to_a_quantised_product(job):
    """So the sum's gradient is the product's own; beside a whole matrix peft adds first, and the product needs a narrow
    copy of the sum's wide gradient."""
    everywhere = {"rank": 8, "targets": ("all-linear",)}

    def copies(tuning):
        step = ledger(job(layout="ddp", ranks=1, framework="huggingface", finetuning=tuning))
        return sum(name.endswith("mlp.down_proj.lora.add.gradient") for name in step.names)

    assert copies(Finetuning(method="lora", **everywhere)) == 2
    assert copies(Finetuning(method="qlora", quantization="nf4", **everywhere)) == 0
    assert copies(Finetuning(method="qlora", quantization="gptq", **everywhere)) == 2  # peft's other class


PROGRAM = """
from trl import SFTTrainer
bits = BitsAndBytesConfig(load_in_4bit=True{compute})
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", quantization_config=bits, dtype=torch.bfloat16)
adapters = LoraConfig(r=8, target_modules=["q_proj"])
trainer = SFTTrainer(model=model, args=SFTConfig(output_dir="out", bf16=True), peft_config=adapters)
"""
YAML = "model_name_or_path: Qwen/Qwen2.5-7B\nload_in_4bit: true\nuse_peft: true\nmax_length: 64\nbf16: true\n"


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (PROGRAM.format(compute=""), "float32"),
        (PROGRAM.format(compute=", bnb_4bit_compute_dtype=torch.bfloat16"), None),
        (PROGRAM.format(compute=", bnb_4bit_compute_dtype=torch.float16"), "float16"),
        (YAML, "float32"),
        (YAML + "dtype: bfloat16\n", None),
    ],
)
def test_what_a_configuration_says_or_leaves_to_its_library(text, dtype):
    assert translation_of(text).job.framework_options.get("quantized_compute_dtype") == dtype
