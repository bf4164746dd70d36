"""Packed columns and texts give back what was put in; keys are found as a dictionary would find them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.trace.columns import LARGEST, MISSING
from chakra_capture.trace.keys import match_keys, num_distinct
from chakra_capture.trace.packed import Texts, pack

near = [sign * 2**bits + step for bits in (7, 15, 31, 61) for sign in (-1, 1) for step in (-1, 0, 1)]
numbers = st.integers(-5, 5) | st.sampled_from(near) | st.integers(-LARGEST, LARGEST) | st.just(MISSING)
columns = st.lists(numbers, max_size=12)


@given(columns, st.data())
def test_packed_values_come_out_as_they_went_in(values: list[int], data: st.DataObject) -> None:
    packed = pack(np.array(values, dtype=np.int64))
    rows = data.draw(st.lists(st.integers(-1, len(values) - 1), max_size=9)) if values else [-1, -1]
    assert packed[:].tolist() == values
    assert packed[:].dtype == np.int64
    assert packed.pick(np.array(rows, dtype=np.int32)).tolist() == [MISSING if r < 0 else values[r] for r in rows]


@given(columns, columns)
def test_keys_are_found_where_they_stand_first(left: list[int], right: list[int]) -> None:
    first = {key: row for row, key in reversed(list(enumerate(right))) if key != MISSING}
    found = match_keys(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64))
    assert found.tolist() == [first.get(key, -1) for key in left]
    assert num_distinct(np.array(right, dtype=np.int64)) == len(first)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_texts_read_as_a_sequence(values: list[str]) -> None:
    column = Texts.of(values)
    assert (len(column), list(column), column[:]) == (len(values), values, values)
    assert [column[-i] for i in range(1, len(values) + 1)] == values[::-1]
    with pytest.raises(IndexError):
        column[len(values)]
