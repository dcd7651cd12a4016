"""The batches of a Hugging Face trainer as the model gets them: their length, packed or padded, in one row or several."""

from __future__ import annotations

from collections.abc import Mapping

from peakcast.core.versions import release
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.images import reads_pixels
from peakcast.jobs.spec import Batch

IN_BLOCKS = "in_blocks"
"""Added to training arguments here: whether the program cuts its data into blocks, as run_clm.py does, judged by its
name."""
USUAL_LENGTH = 1024
"""trl's and run_clm.py's default."""
STRATEGIES = ("bfd", "bfd_split", "bfd-requeue", "ffd", "wrapped")
"""trl's packing strategies. All but `wrapped` keep sequences whole and join them without padding (trl 0.18-1.16
trainer/sft_trainer.py: `padding_free or packing and packing_strategy == "bfd"`)."""


OF_SCRIPTS = ("max_seq_len", "seq_length", "sequence_length", "seq_len", "cutoff_len", "max_len")
"""Names of the length in scripts around the trainers; argparse accepts the first as an abbreviation of max_seq_length."""
LENGTHS_CHANGE = (
    "batches are as long as their own longest sample: where lengths changed, published runs of ms-swift reserved up to "
    "2.5 times what equal lengths need (the allocated peak is that of the longest). batch.shortest_sequence of a job "
    "counts it, and packing avoids it."
)
"""The factor is from the rows of Yi and Mistral in `swift_benchmark.jsonl`."""


def sequence_length(architecture: Architecture, training: Settings, notes: Notes) -> int:
    """Tokens of the longest sequence, or of a packed one."""
    if reads_pixels(architecture):  # captions are padded to the last position, and classifiers read none
        return min(USUAL_LENGTH, architecture.most_positions or USUAL_LENGTH)
    names = ("max_length", "max_seq_length", "max_source_length", "model_max_length", "block_size", *OF_SCRIPTS)
    key = next((name for name in names if training.given(name)), None)
    padded = not (training.switch("packing") or training.switch("padding_free"))
    in_blocks = key == "block_size" or (key is None and training.switch(IN_BLOCKS))
    if padded and not in_blocks:
        notes.cached.append(LENGTHS_CHANGE, "batch.shortest_sequence", "more")
    if key is None:
        length = min(USUAL_LENGTH, architecture.most_positions or USUAL_LENGTH)
        fewer = f", and {architecture.name} has positions for {length}" if length < USUAL_LENGTH else ""
        given, whose = ("block_size", "run_clm.py's") if in_blocks else ("max_length", "trl's")
        sentence = f"{given} is not given; {whose} default 1024 is treated as the sequence length{fewer}."
        notes.assumptions.append(sentence)
        return length
    if padded:
        notes.assumptions.append(
            f"sequences are treated as padded to {training.spell(key)}; shorter batches need less. The mask of a padded "
            "batch is left out (batch.form: masked counts it)."
        )
    return training.size(key)


def target_length(architecture: Architecture, training: Settings, notes: Notes) -> int | None:
    """Tokens of the longest target of an encoder-decoder; None if nothing says it, and for other networks, where
    max_target_length is left unread."""
    if architecture.kind not in ("encoder_decoder", "undescribed"):
        return None
    if training.raw("max_target_length") is not None:
        return training.size("max_target_length")
    if architecture.kind == "encoder_decoder":
        notes.assumptions.append(
            "nothing says how long targets are (max_target_length); they are assumed to be as long as the inputs, and "
            "shorter ones need less: --set decoder_sequence_length=128."
        )
    return None


def batch_form(training: Settings, attention: str, versions: Mapping[str, object], notes: Notes) -> Batch:
    """The form of the batches. If no packing strategy is given and trl's version is not known, each sequence gets its own
    row: the number of tokens is the same and, with flash attention, the number of bytes is too."""
    packing, free = training.switch("packing"), training.switch("padding_free")
    strategy = training.one_of("packing_strategy", "", ("", *STRATEGIES))
    if training.switch("neat_packing"):
        notes.assumptions.append("neat_packing keeps packed sequences apart by a mask of each row, which is counted.")
        return Batch(form="masked")
    whole = bool(strategy) and strategy != "wrapped"
    if not strategy and (trl := release(versions.get("trl", ""))):
        whole = trl >= (0, 18)
    if not (free or (packing and whole)):
        return Batch()
    if not packing:
        notes.assumptions.append("padding_free: every sequence is assumed to have the largest length; batch.num_tokens "
            "gives fewer tokens.")
    if attention != "flash_attention_2":
        notes.warnings.append(
            f"A padding-free batch with attention={attention} needs a mask of tokens × tokens, which is counted; flash "
            "attention needs none.",
            "attn_implementation",
        )
    return Batch(form="padding_free")
