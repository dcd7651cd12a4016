"""What a Megatron-LM checkpoint's first run leaves behind: dropout masks, copies of weights in FP8. Counted by hand."""

from dataclasses import replace

import pytest

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import ActivationCheckpointing, FrozenMapping, Precision, TrainingJob
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

H, LAYERS, TOKENS = 256, 4, 128
DENSE = Architecture(
    name="dense", model_type="megatron_gpt", hidden_size=H, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, intermediate_size=4 * H, vocab_size=1024, max_position_embeddings=TOKENS,
    position_embedding="learned", normalization="layernorm", hidden_act="gelu", gated_mlp=False, fused_qkv=True,
    attention_bias=True, attention_output_bias=True, mlp_bias=True, hidden_dropout=0.1,
)  # fmt: skip
UNBIASED = replace(DENSE, attention_bias=False, attention_output_bias=False, mlp_bias=False)
FULL, FEED_FORWARD = (
    ActivationCheckpointing(mode="full", method="uniform", num_layers=2),
    ActivationCheckpointing(mode="selective", modules=("mlp",)),
)


def job(architecture, checkpointing, recipe="delayed", compute="float8"):
    return TrainingJob(
        architecture=architecture,
        framework="megatron",
        sequence_length=TOKENS,
        attention="sdpa",
        precision=Precision(compute=compute),
        activation_checkpointing=checkpointing,
        framework_options=FrozenMapping({"attention_backend": "fused", "fp8_recipe": recipe}),
    )


def copies_there_in_first_forward(job):
    """Elements per layer and h² whose copies, a byte each, are there when the first forward ends."""
    timeline = megatron_ledger(job, step="first")
    end = max(instant for instant, phase in enumerate(timeline.phases) if phase == Phase.FORWARD)
    alive = timeline.alive_at(end)
    copies = [i for i, name in enumerate(timeline.names) if alive[i] and name.endswith(".fp8")]
    return sum(int(timeline.num_bytes[i]) for i in copies) / (LAYERS * H * H)


@pytest.mark.parametrize(
    ("checkpointing", "recipe", "expected"),
    [
        (ActivationCheckpointing(), "delayed", 2 * 12),
        (FULL, "blockwise", 12),  # by rows only
        (FULL, "delayed", 12 + 1 + 4),  # linear_proj and linear_fc2 by columns too
        (FEED_FORWARD, "delayed", 2 * 12 - 4),  # all but linear_fc1, which is of the feed-forward's norm
        (FEED_FORWARD, "blockwise", 2 * 12 - 4),
    ],
)
def test_copies_by_columns_of_what_runs_again(checkpointing, recipe, expected):
    assert copies_there_in_first_forward(job(UNBIASED, checkpointing, recipe)) == expected


def test_all_copies_are_there_in_a_later_step():
    first, steady = (megatron_ledger(job(UNBIASED, FULL), step=step) for step in ("first", "steady"))
    last = [timeline.composition(len(timeline.phases) - 1) for timeline in (first, steady)]
    assert last[0] == last[1]


@pytest.mark.parametrize(("architecture", "masks"), [(DENSE, 4), (UNBIASED, 0)])
def test_a_bias_keeps_the_masks_of_a_checkpointed_group(architecture, masks):
    """Two per layer and two layers a group, each a bool per element; the last is made by the group's last operation.
    Without a bias there is no graph, and each is inside its kernel."""
    timeline = megatron_ledger(job(architecture, FULL, compute="bfloat16"))
    end = min(instant for instant, label in enumerate(timeline.labels) if label == "output_layer") - 1
    last = max(instant for instant in range(end) if timeline.labels[instant] == "mlp_bda")
    size = TOKENS * H
    alive = [i for i in range(len(timeline.names)) if timeline.alive_at(last)[i] and timeline.num_bytes[i] == size]
    made = [timeline.names[i] for i in alive if timeline.names[i] in ("dropout_mask", "mlp_bda.saved")]
    assert len(made) == masks


def test_recomputations_that_fail_are_named():
    assert "tensorwise" in out_of_scope(job(DENSE, FULL, "tensorwise"))
    assert "biases" in out_of_scope(job(DENSE, FEED_FORWARD, compute="bfloat16"))
    assert not out_of_scope(job(UNBIASED, FEED_FORWARD))
