"""What a script changes with the number of the step: its loop is led to its last steps, which count if they need more."""

from __future__ import annotations

import ast

import pytest

import peakcast
from peakcast.collectors.dryrun.counter_uses import is_plain, uses_of

STEPS = 1000


def network():
    import torch

    return torch.nn.Sequential(torch.nn.Embedding(1000, 256), torch.nn.Linear(256, 1000)).cuda()


def one_step(model, optimizer, length):
    import torch

    tokens = torch.randint(1000, (4, length), device="cuda")
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def of_length(length):
    """A loop whose steps are all alike."""
    import torch

    def train():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            one_step(model, optimizer, length)

    return peakcast.dryrun(train, "H100-80GB")


def length_at(step):
    return 128 if step < 100 else 2048


def test_a_length_that_grows_with_the_counter_of_a_for_loop_counts():
    import torch

    def train():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            one_step(model, optimizer, length_at(step))

    found, longest = peakcast.dryrun(train, "H100-80GB"), of_length(2048)
    assert found.job.sequence_length == 2048
    assert found.timelines["steady"].peak().num_bytes == longest.timelines["steady"].peak().num_bytes
    [said] = [one.sentence for one in found.answer.found if "grows from step to step" in one.sentence]
    assert "test_later_steps.py" in said
    assert "step = 997 on count" in said
    assert found.fits == "yes"


COPYING = """
import copy
import torch

class Training:
    def __init__(self, most):
        self.iteration, self.most, self.copied = 0, most, None
        self.model = torch.nn.Sequential(torch.nn.Embedding(1000, 256), torch.nn.Linear(256, 1000)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self):
        while True:
            tokens = torch.randint(1000, (4, 128), device="cuda")
            torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.iteration > self.most // 2 and self.copied is None:
                self.copied = copy.deepcopy(self.model)
            self.iteration += 1
            if self.iteration >= self.most:
                break

Training(1000).run()
"""


def test_a_copy_of_the_network_that_is_made_later_counts(tmp_path):
    (tmp_path / "train.py").write_text(COPYING)
    found, plain = peakcast.dryrun(["python", str(tmp_path / "train.py")], "H100-80GB"), of_length(128)
    weights = 4 * (1000 * 256 + 256 * 1000 + 1000)
    more = found.timelines["steady"].peak().num_bytes - plain.timelines["steady"].peak().num_bytes
    assert more == pytest.approx(weights, rel=0.01)


def test_later_steps_that_need_no_more_leave_no_trace():
    import torch

    def train():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = 0
        while step < STEPS:
            one_step(model, optimizer, max(64, 128 - step))
            step += 1

    found = peakcast.dryrun(train, "H100-80GB")
    assert found.steps == 3
    assert len(found.timelines["run"].phases) < 4 * len(found.timelines["steady"].phases)
    assert any("to which the loop was led, need no more" in one for one in found.answer.assumptions)


def test_an_error_in_later_steps_is_said_and_the_first_ones_are_answered():
    import torch

    def in_turn():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lengths = [128] * 10
        for step in range(STEPS):
            one_step(model, optimizer, lengths[step])

    found = peakcast.dryrun(in_turn, "H100-80GB")
    assert found.steps == 3
    [said] = [one for one in found.answer.found if "only the first 3 steps were followed" in one.sentence]
    assert "IndexError" in said.sentence
    assert said.direction == "more"


def test_a_condition_on_an_outer_loop_that_has_not_turned_is_said():
    def train():
        import torch

        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            if epoch == 1:
                model[0].requires_grad_(True)
            if epoch == 2:
                print("nearly there")
            for _ in range(STEPS):
                one_step(model, optimizer, 128)

    [said] = [one.sentence for one in peakcast.dryrun(train, "H100-80GB").answer.found if "asks for epoch" in one.sentence]
    assert "only the first steps were followed" in said


def test_a_condition_on_a_library_s_counter_is_said():
    def train():
        import types

        import torch

        model, state = network(), types.SimpleNamespace(global_step=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            one_step(model, optimizer, 128 if state.global_step < 100 else 2048)

    found = peakcast.dryrun(train, "H100-80GB").answer.found
    [said] = [one.sentence for one in found if "asks for global_step" in one.sentence]
    assert "only the first steps were followed" in said


def uses(name, source, line=2):
    return uses_of(name, ast.parse(source), [line])


@pytest.mark.parametrize(
    "statement",
    [
        "print(step, loss)",
        "log.info(f'{step}: {loss}')",
        "if step % 10 == 0: report()",
        "lr = get_lr(step)",
        "group['lr'] = 0.1 * step",
        "save_checkpoint(model, step)",
        "step += 1",
        "step = step + 1",
        "writer.add_scalar('loss', loss, step)",
    ],
)
def test_reports_periods_and_learning_rates_decide_no_size(statement):
    assert not uses("step", f"for step in range(9):\n    {statement}").lines


@pytest.mark.parametrize("statement", ["length = at(step)", "model(x, window=step // 9)", "if step > 5: grow()"])
def test_what_else_follows_from_a_counter_may(statement):
    assert uses("step", f"for step in range(9):\n    {statement}").lines == [2]


def test_where_a_loop_ends_is_read_from_its_range_and_its_conditions():
    ends = uses("step", "for step in tqdm(range(3, most)):\n    if step == 7: break\n    if step > 5: grow()").ends
    assert [ast.unparse(one) for one in ends] == ["most", "7"]
    assert [ast.unparse(one) for one in uses("step", "while step < args.most:\n    go()").ends] == ["args.most"]
    elsewhere = uses("step", "def rate(step):\n    if step < 5: return 1\nfor step in range(9):\n    go()", line=4)
    assert [ast.unparse(one) for one in elsewhere.ends] == ["9"]
    assert [ast.unparse(one) for one in elsewhere.thresholds] == ["5"]


def test_fields_and_variables_of_one_name_are_told_apart():
    source = "for step in range(9):\n    optimizer.step()\n    state.step += 1\n    grow(state.step)"
    assert not uses("step", source).lines
    assert uses_of("step", ast.parse(source), [2], is_field=True).lines == [4]


def test_data_that_is_cut_by_a_counter_keeps_it_where_it_is():
    assert uses("at", "while at < 9:\n    x = tokens[at : at + 4]").cuts
    assert not uses("at", "while at < 9:\n    x = rows[at]").cuts


def test_only_expressions_that_run_nothing_of_the_script_are_evaluated():
    assert is_plain(ast.parse("int(args.steps) * 2 + len(rows)", mode="eval").body)
    assert not is_plain(ast.parse("train()", mode="eval").body)
    assert not is_plain(ast.parse("[x for x in rows]", mode="eval").body)
