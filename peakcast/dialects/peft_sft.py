"""Commands of peft's example of supervised fine-tuning, `examples/sft/train.py`: trl's SFTTrainer, with adapters and
quantization by switches of its own. Workshops and blog posts of Hugging Face have the same program.

Source: huggingface/peft examples/sft/train.py (ModelArguments, DataTrainingArguments), utils.py
(create_and_prepare_model), at 0c248e9b and 01065723.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, words
from peakcast.dialects.huggingface.trainer import from_trl

SWITCHES = {
    "use_peft_lora": "use_peft", "use_4bit_quantization": "load_in_4bit", "use_8bit_quantization": "load_in_8bit",
    "use_nested_quant": "use_bnb_nested_quant",
}  # fmt: skip
"""The program's switch -> trl's."""
DEFAULTS = {
    "lora_r": 64, "lora_alpha": 16, "lora_dropout": 0.1,
    "lora_target_modules": "q_proj,k_proj,v_proj,o_proj,down_proj,up_proj,gate_proj",
}  # fmt: skip
IGNORED = words("chat_template_format splits add_special_tokens append_concat_token")


def from_peft_sft(pasted: Pasted) -> Translation:
    """The job of such a command. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "peft's examples/sft")
    read = {name: settings.switch(key) for key, name in SWITCHES.items()}
    training: dict[str, Any] = {key: value for key, value in pasted.values.items() if key not in (*SWITCHES, *IGNORED)}
    training |= read
    if read["use_peft"]:
        training = {**DEFAULTS, **training}
    if settings.switch("use_unsloth"):
        sentence = "Unsloth (use_unsloth) is not read from this program; transformers is assumed."
        notes.unsupported.append(sentence, "use_unsloth")
    training.pop("use_unsloth", None)
    storage = str(training.pop("bnb_4bit_quant_storage_dtype", "uint8"))
    training.setdefault("bnb_4bit_compute_dtype", "float16")
    training["bnb_4bit_quant_storage"] = storage
    training["torch_dtype"] = storage if read["load_in_4bit"] and "float" in storage else "float32"
    notes.assumptions.append(f"train.py of peft's examples loads weights in {training['torch_dtype']}.")
    training["attn_implementation"] = "flash_attention_2" if settings.switch("use_flash_attn") else "eager"
    training.pop("use_flash_attn", None)
    training["gradient_checkpointing_kwargs"] = {"use_reentrant": settings.switch("use_reentrant")}
    training.pop("use_reentrant", None)
    translation = from_trl(replace(pasted, values=training))
    notes.ignored += [key for key in pasted.values if key in IGNORED]
    return notes.finish(notes.include(translation))
