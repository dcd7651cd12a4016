"""The tape's rules of life, counted by hand."""

from contextlib import nullcontext
from dataclasses import replace

from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Step
from peakcast.models.ledger.tape.tape import Saved, Tape, WeightGradient
from peakcast.timelines.timeline import Category, Phase

KIB = 1024


def _life(template, name):
    rows = [i for i, n in enumerate(template.names) if n == name]
    assert len(rows) == 1, f"{name}: {rows}"
    i = rows[0]
    return (
        (int(template.born[i]), bool(template.born_backward[i])),
        (int(template.dies[i]), bool(template.dies_backward[i])),
    )


def test_a_tensor_that_nobody_keeps_dies_after_its_last_reader():
    tape = Tape()
    x = tape.input(KIB)
    y = tape.operation("a", [x], KIB)
    z = tape.operation("b", [y], KIB)
    tape.finish(tape.operation("c", [z], KIB))
    template = _finished(["a", "b", "c"])
    assert _life(template, "a") == ((0, False), (2, False))


def _finished(names):
    tape = Tape()
    x = tape.input(KIB)
    for name in names:
        x = tape.operation(name, [x], KIB)
    return tape.finish(x)


def test_a_kept_tensor_lives_until_the_backward_of_the_earliest_operation_that_keeps_it():
    tape = Tape()
    x = tape.input(KIB)
    y = tape.operation("y", [x], KIB)
    first = tape.operation("first", [y], KIB, saves=[y])
    second = tape.operation("second", [first, y], KIB, saves=[y])
    template = tape.finish(second)
    # backward order: second (0), first (1), y (2); y is kept by `first` and so is released after instant 1
    assert _life(template, "y") == ((0, False), (2, True))


def test_a_second_gradient_is_added_in_place_and_its_own_storage_is_freed_at_once():
    tape = Tape()
    x = tape.input(4 * KIB)
    a = tape.operation("a", [x], KIB)
    b = tape.operation("b", [x], KIB)
    template = tape.finish(ops.add(tape, a, b, "sum"))
    gradients = [(n, int(template.born[i]), int(template.dies[i])) for i, n in enumerate(template.names) if "gradient" in n]
    # sum passes its gradient on to both: one storage, alive over sum, b and a; x's first gradient comes from b
    assert ("gradient", 0, 3) in gradients
    assert ("b.gradient", 1, 3) in gradients
    assert ("a.gradient", 2, 3) in gradients


def test_a_template_says_until_when_the_gradient_of_its_output_is_used():
    """x + g(f(x)): the sum passes its gradient on, and f's is added to it. A chain adds nothing: it is read once."""
    tape = Tape()
    x = tape.input(KIB)
    y = tape.operation("g", [tape.operation("f", [x], KIB)], KIB)
    added = tape.finish(ops.add(tape, x, y, "add"))
    assert added.backward_labels[added.output_gradient_used_until] == "f"
    assert _finished(["a", "b"]).output_gradient_used_until == 1


def test_a_recomputation_stops_before_what_keeps_its_inputs_and_after_what_keeps_its_result():
    """Inputs are kept before an operation runs."""
    for saves, runs in ((Saved(output=True), 2), (Saved(extra_bytes=[KIB]), 2), (None, 1)):
        tape = Tape()
        x = tape.operation("a", [tape.input(KIB)], KIB)
        template = tape.finish(tape.operation("c", [tape.operation("b", [x], KIB, saves=saves or [x])], KIB))
        assert template.num_recomputed == runs


def test_linear_keeps_its_input_only_when_its_weight_trains():
    layer = ops.LinearLayer(name="linear", in_features=256, out_features=128, element_bytes=2)
    for trainable in (True, False):
        tape = Tape()
        x = tape.operation("x", [tape.input(KIB)], KIB)
        y = ops.linear(tape, x, 2, replace(layer, trains=trainable))
        template = tape.finish(y)
        (_, dies) = _life(template, "x")
        assert dies[1] is trainable
        assert ("linear.weight.grad" in template.names) is trainable


def test_views_share_their_storage_and_their_gradients_are_concatenated():
    tape = Tape()
    fused = tape.operation("fused", [tape.input(KIB)], 3 * KIB)
    q, k, v = tape.split(fused, [KIB, KIB, KIB])
    y = tape.operation("attend", [q, k, v], KIB, saves=[q])
    template = tape.finish(y)
    # q alone is kept, but it pins the whole storage until `attend` has run backward (instant 0)
    assert _life(template, "fused") == ((0, False), (1, True))
    split = [int(template.num_bytes[i]) for i, n in enumerate(template.names) if n == "split.gradient"]
    assert split == [3 * KIB]


def test_sizes_are_rounded_to_the_allocators_unit():
    tape = Tape()
    template = tape.finish(tape.operation("tiny", [tape.input(1)], 1))
    assert set(template.num_bytes.tolist()) == {512}


def test_a_step_places_blocks_and_adds_up():
    tape = Tape()
    x = tape.input(KIB)
    y = tape.operation("y", [x], 2 * KIB, saves=[x], weight_gradients=[WeightGradient("w.grad", 4 * KIB)])
    template = tape.finish(y)
    step = Step()
    step.hold("w", Category.PARAMETERS, 4 * KIB, 0)
    runs = [step.run_forward(template, f"layers.{i}") for i in range(3)]
    for run in reversed(runs):
        step.run_backward(run)
    step.gradients_die = step.moment("zero_grad", Phase.OPTIMIZER_STEP)
    timeline = step.timeline()
    # forward: the weight, the inputs of the layers so far (1 KiB each), the newest output (2 KiB)
    assert timeline.totals[:3].tolist() == [4 * KIB + n * KIB + 2 * KIB for n in (1, 2, 3)]
    # backward of layer 2: inputs 0..2, the gradient handed in (2) and out (1), its weight's gradient (4)
    assert timeline.totals[3] == (4 + 3 + 2 + 1 + 4) * KIB
    assert timeline.totals[-1] == 4 * KIB
    for instant in range(len(timeline.phases)):
        assert sum(timeline.composition(instant).values()) == timeline.totals[instant]


def test_without_a_graph_only_what_is_held_outlives_the_block():
    template = _finished(["a", "b"])
    step = Step()
    step.run_without_graph(template, "layers.0")
    step.moment("after", Phase.FORWARD)
    assert step.timeline().totals[-1] == 0


def test_a_kernel_makes_its_temporaries_and_what_it_keeps_before_its_result():
    """ATen's dropout: the mask, then the result; a projection that contains a norm: the normed input, then its product."""
    tape = Tape()
    output = tape.operation(
        "dropout", [tape.input(4096)], 4096, saves=Saved(extra_bytes=[2048]), forward_temporary_bytes=1024
    )
    template = tape.finish(output)
    made = [name for name, born, later in zip(template.names, template.born, template.born_backward, strict=True)
            if name != "hidden_states" and born == 0 and not later]  # fmt: skip
    assert made == ["dropout.temporary", "dropout.saved", "dropout"]


def test_a_gradient_that_is_added_at_once_passes_through_a_view_unless_a_norm_makes_it():
    """Two operations read x; the second to run backward adds to the gradient of the first, and its own ends there."""
    for in_norm in (True, False):
        tape = Tape()
        x = tape.operation("x", [tape.input(KIB)], KIB)
        with tape.marked(Mark.NORM) if in_norm else nullcontext():
            first = tape.operation("first", [x], KIB)
        template = tape.finish(ops.multiply(tape, first, tape.operation("second", [x], KIB), "product"))
        made = [template.names[index] for index in template.through_view]
        assert ("first.gradient" in made) is not in_norm


def test_marked_operations_are_found_in_both_passes():
    tape = Tape()
    x = tape.operation("a", [tape.input(KIB)], KIB)
    with tape.marked(Mark.LM_HEAD):
        x = tape.operation("c", [tape.operation("b", [x], KIB)], KIB)
        tape.operation("index", [], KIB)
    template = tape.finish(x)
    assert template.forward_marks == {Mark.LM_HEAD: [1, 2, 3]}
    assert template.backward_marks == {Mark.LM_HEAD: [0, 1]}  # "index" has no backward


def test_what_only_a_first_step_or_only_later_ones_hold_is_computed_once_when_a_fork_needs_it():
    asked = []

    def held(apart, first_step):
        asked.append((apart.now, first_step))
        apart.hold("learned" if first_step else "known", Category.OTHER, KIB, 0, apart.now)

    step = Step()
    step.moment("a", Phase.FORWARD)
    step.hold("before", Category.OTHER, KIB, 0)
    step.differs(held)
    step.hold("after", Category.OTHER, KIB, 0)
    step.moment("b", Phase.FORWARD)
    assert not asked
    later = [step.fork().timeline() for _ in range(2)]
    assert asked == [(1, False)]  # with the instants of when it was said
    first = step.fork(first_step=True).timeline()
    assert asked == [(1, False), (1, True)]
    assert [list(one.names) for one in (*later, first)] == [
        ["before", "known", "after"],
        ["before", "known", "after"],
        ["before", "learned", "after"],
    ]
    assert later[0].totals.tolist() == [3 * KIB, 2 * KIB]
