"""transformers' own Trainer beside the stack that makes its calls: as traces, and really run on this machine's CPU."""

import pytest

from peakcast.collectors.measure import worker
from peakcast.collectors.measure.grid import expand
from peakcast.core.errors import CollectorError, SpecError
from peakcast.jobs.spec import job_to_mapping
from peakcast.timelines.timeline import Phase

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 4000, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_BESIDE = 16 * 1024
"""Bytes: the Trainer's labels are tensors of their own, it counts tokens and keeps the mean of the losses."""


def job(options=None, **changes):
    cell = {"architecture": TINY, "sequence_length": 128, "framework_options": options or {}, **changes}
    return expand({"include": [cell]})[0]


CELLS = {
    "plain": {},
    "in micro-batches": {"optimizer.implementation": "fused", "gradient_accumulation_steps": 2, "micro_batch_size": 2},
    "adapters, checkpointed": {"finetuning": {"method": "lora", "rank": 4}, "activation_checkpointing.mode": "full"},
    "autocast": {"precision": {"parameters": "float32"}, "options": {"autocast": True}},
    "scaled": {"precision": {"parameters": "float32", "compute": "float16"}, "options": {"autocast": True}},
}


QUICK = ("plain", "adapters, checkpointed")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.whole) for name in CELLS])
def test_each_phase_peaks_as_high_as_the_trainers(traced, name):
    changes = dict(CELLS[name])
    options = changes.pop("options", {})
    ours = traced(job(options, **changes))
    theirs = traced(job({**options, "loop": "trainer"}, **changes))
    for step in ("first", "steady"):
        peaks, of_trainer = ours[step].phase_peaks(), theirs[step].phase_peaks()
        assert peaks.keys() - {Phase.INIT} == of_trainer.keys() - {Phase.INIT} == set(Phase) - {Phase.INIT}
        for phase in peaks.keys() - {Phase.INIT}:
            assert abs(of_trainer[phase] - peaks[phase]) <= SMALL_BESIDE, (step, phase.name)


def test_a_cell_is_measured_by_the_trainer_itself(stand_in):
    asked = job({"loop": "trainer"}, gradient_accumulation_steps=2)
    ((row, _),) = worker.run({"job": job_to_mapping(asked), "gpu": None})
    assert (row.outcome, row.spoiled) == ("ok", ())
    assert row.environment["loop"].startswith("transformers.Trainer ")
    assert set(row.phase_peaks) == {"forward", "loss", "backward", "gradient_clipping", "optimizer_step"}
    assert len(row.environment["readings"]["steps"]) == worker.MIN_STEPS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallelism": {"data_parallel_size": 2}}, "parallelism='2 ranks' is not run"),
        ({"optimizer.implementation": "loop"}, "optimizer='adamw/loop' is not run"),
        ({"activation_checkpointing.mode": "selective"}, "activation_checkpointing='selective' is not run"),
        ({"batch": {"form": "masked"}}, "batch=.* is not run"),
    ],
)
def test_what_the_trainer_is_not_told_is_refused_by_name(changes, says):
    from peakcast.collectors.stacks import build

    with pytest.raises(CollectorError, match=says):
        build(job({"loop": "trainer"}, **changes), "cpu")
    with pytest.raises(SpecError, match=r"framework_options\.loop='other' must be one of 'calls', 'trainer'"):
        job({"loop": "other"})


def test_other_frameworks_have_no_such_loop():
    with pytest.raises(SpecError, match=r"framework_options\.loop is not an option of framework='torch'"):
        job({"loop": "trainer"}, framework="torch")


class Callers:
    """Stand-ins for the two ways in which releases of transformers have `loss_function`."""

    class Set:
        """As in transformers 5: it can be set on a network."""

        own = staticmethod(lambda: "own")
        loss_function = property(lambda self: self.own, lambda self, value: setattr(self, "own", value))

        def forward(self):
            return self.loss_function()

    class Fixed:
        """As in transformers 4.48: a property without a setter."""

        loss_function = property(lambda self: lambda: "own")

        def forward(self):
            return self.loss_function()


@pytest.mark.parametrize("kind", [Callers.Set, Callers.Fixed])
def test_a_loss_function_is_replaced_in_every_release(kind):
    from torch.nn import Linear

    from peakcast.collectors.stacks.huggingface_training import _calling, _calls_loss_function

    network = kind()
    with _calling(network, lambda: "announced"):
        assert network.forward() == "announced"
    assert network.forward() == "own"
    assert _calls_loss_function(network)
    assert not _calls_loss_function(Linear(1, 1))  # a network that makes its own loss, as before 4.46
