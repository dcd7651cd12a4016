"""Columns of texts held as numbers."""

import pickle
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from peakcast.core.texts import Texts, number_of


@given(st.lists(st.text(max_size=3)))
def test_a_column_is_the_texts_it_was_made_of_and_equal_numbers_are_equal_texts(texts: list[str]) -> None:
    column = Texts.of(texts)
    assert list(column) == texts
    assert [column[i] for i in range(len(texts))] == texts
    assert list(column[1:3]) == texts[1:3]
    assert list(pickle.loads(pickle.dumps(column))) == texts
    numbers = column.numbers.tolist()
    pairs = list(zip(texts, numbers, strict=True))
    assert all((a == b) == (x == y) for a, x in pairs for b, y in pairs)


def test_threads_that_meet_new_texts_at_once_agree_on_their_numbers() -> None:
    texts = [f"met by many {i}" for i in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [number_of(text) for text in texts], range(8)))
    assert all(numbers == found[0] for numbers in found)
    assert list(Texts.of(texts)) == texts
