"""LitGPT's logits: Lightning's Fabric, which wraps the network, widens what it returns."""

from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Finetuning, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase, Timeline

CHUNKS = 4
LORA = Finetuning(method="lora", rank=8, targets=("q_proj", "v_proj"), adapter_dtype="bfloat16")


@pytest.fixture
def asked(job):
    """A step of adapters whose logits are much larger than anything else in it."""
    made = job(ranks=1, layout="ddp", versions=FrozenMapping({"litgpt": "0.5.13"}), framework_options=_options())
    network = replace(made.architecture, vocab_size=2**16)
    return made.replace(architecture=network, micro_batch_size=2, finetuning=LORA)


def _options(**more: str | bool) -> FrozenMapping:
    return FrozenMapping({"logits_chunks": CHUNKS, **more})


def _logits(job: TrainingJob) -> int:
    """Number of logits."""
    return job.micro_batch_size * job.sequence_length * job.architecture.vocab_size


def _peak(timeline: Timeline, phase: Phase) -> int:
    return timeline.peak(phase).num_bytes


def test_where_fp32_logits_live(asked):
    """Forward ends with the bfloat16 logits, their fp32 copies and those of the step before, to which the loop's variable
    still refers; narrow ones would be the first and a narrow third. The loss, which the loop computes, finds that gone,
    keeps fp32 log-softmax beside the fp32 logits, and copies the last chunk, which is cut."""
    as_made = ledger(asked.replace(framework_options=_options(logits_upcast="none")))
    widened, size = ledger(asked), _logits(asked)
    assert _peak(widened, Phase.FORWARD) - _peak(as_made, Phase.FORWARD) == size * ((2 + 4 + 4) - (2 + 2))
    assert _peak(widened, Phase.LOSS) - _peak(as_made, Phase.LOSS) == size * (4 + 4) + size * 4 // CHUNKS - size * (2 + 2)


def test_logits_of_one_sequence_are_cut_without_a_copy(asked):
    one = ledger(asked.replace(micro_batch_size=1))
    as_made = ledger(asked.replace(micro_batch_size=1, framework_options=_options(logits_upcast="none")))
    assert _peak(one, Phase.LOSS) - _peak(as_made, Phase.LOSS) == _logits(asked) // 2 * 4


def test_full_training_copies_all_that_is_cut(asked):
    full = asked.replace(finetuning=Finetuning())
    as_made = ledger(full.replace(framework_options=_options(logits_upcast="none")))
    size = _logits(full)
    assert _peak(ledger(full), Phase.LOSS) - _peak(as_made, Phase.LOSS) == size * (4 + 4 + 4) - size * (2 + 2)


def test_autocast_narrows_a_frozen_lm_head_for_each_chunk_anew(asked):
    """Autocast keeps no copy of a weight that gets no gradient (ATen/autocast_mode.cpp `cached_cast`), and each product
    saves its own (litgpt 0.5.13 finetune/lora.py, `lm_head_chunk_size`)."""
    wide = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
    mixed = asked.replace(precision=wide, framework_options=_options(autocast=True))
    whole = mixed.replace(framework_options=FrozenMapping({**mixed.framework_options, "logits_chunks": 1}))
    copy = mixed.architecture.vocab_size * mixed.architecture.hidden_size * 2
    assert _peak(ledger(mixed), Phase.FORWARD) - _peak(ledger(whole), Phase.FORWARD) == (CHUNKS - 1) * copy
    full = mixed.replace(finetuning=Finetuning())
    assert _copies_of_the_head(ledger(full)) == [copy]
    assert _copies_of_the_head(ledger(mixed)) == [CHUNKS * copy]


def _copies_of_the_head(timeline: Timeline) -> list[int]:
    names = ("lm_head.weight_cast", "lm_head.weight_copy")
    return [int(size) for name, size in zip(timeline.names, timeline.num_bytes, strict=True) if name in names]
