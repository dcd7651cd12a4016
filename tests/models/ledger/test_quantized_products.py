"""Products with 4-bit matrices, whose dtype bitsandbytes is told, counted by hand."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import Finetuning, Precision
from peakcast.models.baseline.ledger import ledger

QLORA = Finetuning(method="qlora", rank=8, quantization="nf4")
MATRIX, ROWS, WIDE = 256 * 512, 128, 512
"""Elements of mlp.down_proj; tokens; features that it reads."""


def temporaries(job, parameters="bfloat16", **options):
    """Bytes of what each product with mlp.down_proj makes in passing."""
    asked = job(
        layout="ddp",
        ranks=1,
        framework="huggingface",
        finetuning=QLORA,
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
