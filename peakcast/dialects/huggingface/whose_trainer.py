"""Decides which program Hugging Face training arguments are for: TRL's, which checkpoints activations by default, or
transformers'.

Sources: trl 0.13-1.16 ScriptArguments, ModelConfig, SFTConfig, DPOConfig, KTOConfig, GRPOConfig; transformers 4.57 and 5.17
examples/pytorch/language-modeling/run_clm.py, run_mlm.py, run_fim.py (ModelArguments, DataTrainingArguments).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

OF_TRL = re.compile(
    r"use_peft|packing(_strategy)?|eval_packing|max_length|padding_free|dataset_(mixture|text_field|num_proc)"
    r"|num_generations|use_vllm|(un)?desirable_weight|beta|loss_type|assistant_only_loss|completion_only_loss|use_bnb_nested_quant"
)
"""Keys that neither TrainingArguments nor transformers' example scripts have."""
OF_EXAMPLES = re.compile(
    r"block_size|do_train|dataset_config_name|train_file|validation_(file|split_percentage)|max_(train|eval)_samples"
    r"|config_(name|overrides)|tokenizer_name|use_fast_tokenizer|keep_linebreaks|preprocessing_num_workers|mlm_probability"
    r"|line_by_line|pad_to_max_length|low_cpu_mem_usage|overwrite_cache|task_name|(text|label)_column_names?|label_all_tokens"
    r"|(source|target)_(lang|prefix)|forced_bos_token|num_beams|val_max_target_length|ignore_pad_token_for_loss|\w+_column"
    r"|lang|predict_with_generate|generation_(max_length|num_beams|config)|resize_position_embeddings"
    r"|(train|eval)_split_name|(min|max)_duration_in_seconds|forced_decoder_ids|suppress_tokens"
    r"|doc_stride|version_2_with_negative|n_best_size|max_answer_length|null_score_diff_threshold|return_entity_level_metrics"
)
"""Keys of transformers' example scripts that TRL does not have. `do_train` is in TrainingArguments, but TRL's scripts train
whether it is given or not."""
OF_EITHER = re.compile(r"dataset_(name|config)|max_seq_length|lora_(r|alpha|dropout|target_modules)")
"""Keys of TRL that scripts with transformers' Trainer often have too."""
EXAMPLE_SCRIPT = re.compile(r"run_\w+\.py")
SCORING_SCRIPTS = {
    "glue": ("AutoModelForSequenceClassification", 128), "xnli": ("AutoModelForSequenceClassification", 128),
    "classification": ("AutoModelForSequenceClassification", 128), "qa": ("AutoModelForQuestionAnswering", 384),
    "ner": ("AutoModelForTokenClassification", None), "swag": ("AutoModelForMultipleChoice", None),
}  # fmt: skip
"""Of transformers 5's example scripts `run_<name>.py` whose networks make no logits of the vocabulary: the network's class,
and the default of max_seq_length (None: as long as the longest sample)."""
SEQ2SEQ_SCRIPTS = {
    "summarization": ("max_source_length", 1024, "max_target_length", 128),
    "translation": ("max_source_length", 1024, "max_target_length", 128),
    "seq2seq_qa": ("max_seq_length", 384, "max_answer_length", 30),
}
"""Of its example scripts `run_<name>.py` with encoder-decoders: the keys of the lengths of inputs and targets, with their
defaults."""
TRL_SCRIPT = re.compile(
    r"trl( .*)?|(reward_modeling|(run_)?(sft|dpo|kto|bco|grpo|orpo|cpo|tpo|rloo|gmpo|reward|prm)"
    r"(_vlm\w*|_video_llm|_gemma3|_gpt_oss|_agent)?)\.py"
)


class Whose(NamedTuple):
    """Which program the arguments are for."""

    trl: bool
    sure: bool
    """Whether something decides it; otherwise the other program is equally likely."""
    rests_on: str
    """What decides, in words; "" if nothing does."""


def whose_trainer(program: str, keys: Iterable[str]) -> Whose:
    """Which program the argument names `keys` are for, if `program` is run ("" if that is not known)."""
    name = program.rsplit("/", 1)[-1]
    found = sorted(keys)
    if TRL_SCRIPT.fullmatch(name):
        return Whose(True, True, f"TRL's by the program {name}")
    if EXAMPLE_SCRIPT.fullmatch(name):
        return Whose(False, True, f"transformers' own by the program {name}")
    trl, examples, either = (
        [key for key in found if pattern.fullmatch(key)] for pattern in (OF_TRL, OF_EXAMPLES, OF_EITHER)
    )
    if trl:
        return Whose(True, True, f"TRL's by {_some(trl)}")
    if examples:
        return Whose(False, True, f"transformers' own by {_some(examples)}")
    return Whose(False, not either, "")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
