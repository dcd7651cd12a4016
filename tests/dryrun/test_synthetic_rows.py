"""Rows that stand in for data that cannot be downloaded: their columns, splits and lengths."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest


class Table:
    """As much of `datasets.Dataset` as rows that stand in need."""

    info = SimpleNamespace(description="rows of peakcast")

    def __init__(self, rows):
        self.rows = rows
        self.column_names = list(rows[0]) if rows else []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __getitems__(self, indices):
        return [self.rows[index] for index in indices]

    def __iter__(self):
        return iter(self.rows)

    def map(self, function, **keywords):
        return type(self)([{**row, **function(row)} for row in self.rows])

    def filter(self, function, **keywords):
        return type(self)([row for row in self.rows if function(row)])

    def remove_columns(self, names):
        return type(self)([{name: row[name] for name in row if name not in names} for row in self.rows])

    rename_column = rename_columns = select_columns = shuffle = remove_columns


@pytest.mark.parametrize(
    ("keeps", "length"),
    [
        (lambda row: len(row["ids"]) < 1024, 1023),
        (lambda row: len(row["ids"]) <= 4000 and len(row["text"]) <= 3000, 3000),
        (lambda row: len(row["ids"]) >= 4096, 4096),
        (lambda row: False, None),
        (lambda row, index: index > 5, None),
    ],
)
def test_rows_that_a_filter_drops_are_cut_to_the_longest_that_it_keeps(keeps, length):
    from peakcast.collectors.dryrun.synthetic_rows import Rows

    class Own(Table):
        """Changed by this test alone."""

    said = []
    Rows(4096, 4096, said.append)._change(Own)
    rows = Own([{"ids": list(range(4096)), "text": "x" * 4096, "label": 0}] * 3)
    if keeps.__code__.co_argcount > 1:
        with pytest.raises(TypeError):
            rows.filter(keeps)
        return
    left = rows.filter(keeps)
    assert [len(row["ids"]) for row in left.rows] == ([length] * 3 if length else [])
    assert bool(said) is (length not in (None, 4096))


def test_rows_say_of_which_kind_a_column_is_and_then_have_it():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    rows = Rows(4, 4, print).made(datasets)
    assert rows.features["label"].names == ["0", "1"]
    mapped = rows.map(
        lambda some: {"pairs": [f"{one} {other}" for one, other in zip(some["a"], some["b"], strict=True)]}, batched=True
    )
    assert mapped[0]["label"] == 0
    assert mapped[0]["pairs"] == " ".join(["word"] * 8)
    assert rows[1]["answer"] == " ".join(["word"] * 4)


def test_a_column_of_which_classes_are_asked_holds_their_numbers_whatever_its_name():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    rows = Rows(4, 4, print).made(datasets)
    names = rows.features["Suggestion Type"].names
    assert rows.features["Tweet text"].dtype == "string"
    mapped = rows.map(lambda some: {"named": [names[one] for one in some["Suggestion Type"]]}, batched=True)
    assert (mapped[0]["named"], mapped[0]["Tweet text"]) == ("0", " ".join(["word"] * 4))


def test_any_split_has_rows_with_conversations_answers_and_the_form_of_a_stream():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import NUM_ROWS, Rows

    found = Rows(4, 4, print).splits(datasets, ("train", "test"))
    mapped = found.map(lambda row: {"words": sum(len(turn["content"].split()) for turn in row["messages"])})
    assert len(mapped["train_sft"]) == NUM_ROWS
    assert mapped["test_gen"][0]["words"] == 4
    assert found["train"].shuffle(seed=1, buffer_size=10)[0]["answers"]["answer_start"] == [5]
    with pytest.raises(KeyError):
        datasets.DatasetDict(mine=found["train"])["train"]  # the script's own


def test_words_tags_translations_and_images_are_of_their_kind():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    said = []
    found = Rows(4, 4, said.append).splits(datasets, ("train",))
    rows = found["train"]
    assert {name for name in ("tokens", "ner_tags", "labels") if name in rows.column_names} == {"tokens", "ner_tags"}
    assert isinstance(rows.features["ner_tags"].feature, datasets.ClassLabel)
    tagged = rows.map(lambda some: {"labels": some["ner_tags"]}, batched=True, remove_columns=rows.column_names)
    assert tagged[0]["labels"] == [0] * 4
    assert rows[0]["tokens"] == ["word"] * 4

    def pairs(some):
        return {"pairs": [(one["de"], one["en"]) for one in some["translation"]]}

    assert len(rows.map(pairs, batched=True)[0]["pairs"]) == 2
    asked = found["test"]
    assert "question" in asked.column_names
    assert asked.map(lambda row: {"texts": [row["question"], row["context"], row["answers"]["text"][0]]})
    assert rows.map(lambda row: {"side": row["image"].size[0]})[0]["side"] == 256
    assert [row["prompt"] for row in rows.__getitems__([0, 1])] == ["word word word word"] * 2
    found["validation_matched"]
    assert [sentence.rpartition(" ")[2] for sentence in said] == ["'test'.", "'validation_matched'."]


def test_a_script_that_takes_more_rows_than_stand_in_gets_those():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import NUM_ROWS, Rows

    rows = Rows(4, 4, print).made(datasets)
    assert len(rows.select(range(100_000))) == NUM_ROWS
    assert len(rows.select(range(NUM_ROWS, NUM_ROWS + 10))) == 10
    assert len(rows.skip(100_000)) == NUM_ROWS
    parts = rows.train_test_split(test_size=2000, shuffle=True, seed=42)
    assert [len(parts[name]) for name in ("train", "test")] == [NUM_ROWS - NUM_ROWS // 4, NUM_ROWS // 4]
    assert len(rows.train_test_split(0.1)["train"]) == pytest.approx(0.9 * NUM_ROWS, abs=1)
    own = datasets.Dataset.from_dict({"text": ["word"] * 8})
    with pytest.raises(ValueError, match="test_size"):
        own.train_test_split(test_size=2000)


def test_the_second_of_the_columns_is_there_for_a_script_that_takes_it():
    """As summarization takes the summary (transformers, `run_summarization.py`)."""
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    rows = Rows(4, 4, print).made(datasets)
    names = rows.column_names
    text, summary = names[0], names[1]

    def pairs(some):
        return {"both": [*zip(some[text], some[summary], strict=True)]}

    mapped = rows.map(pairs, batched=True, remove_columns=names)
    assert mapped.column_names == ["both"]
    assert mapped[0]["both"] == [" ".join(["word"] * 4)] * 2


def test_a_script_that_removes_all_columns_removes_those_that_it_reads():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    made = Rows(4, 4, print)
    rows = made.made(datasets)

    def joined(some):
        return {"content": [" ".join(turn["content"] for turn in turns) for turns in some["messages"]]}

    mapped = rows.map(joined, batched=True, remove_columns=rows.column_names)
    assert list(mapped.column_names) == ["content"]
    assert made._asked == []  # nobody has asked for translations


def test_the_own_rows_of_a_script_get_no_columns():
    pytest.importorskip("datasets.arrow_dataset")
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    Rows(4, 4, print).made(datasets)
    own = datasets.Dataset.from_dict({"text": ["mine"]})
    mapped = functools.partial(own.map, lambda row: {"length": len(row["prompt"])})
    for read in (mapped, lambda: own[0]["prompt"], lambda: own["prompt"][0]):
        with pytest.raises((KeyError, ValueError)):
            read()
