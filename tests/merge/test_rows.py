"""Going up the parents of rows, against a plain walk."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.merge.rows import climb


def walk(row: int, parent: list[int], accepted: list[bool]) -> int:
    while row >= 0 and not accepted[row]:
        row = parent[row]
    return row


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[bool], list[int]]:
    """Parents, who is accepted, and where to begin; often one deep stack."""
    size = draw(st.integers(1, 300))
    is_stack = draw(st.booleans())
    parent = [row - 1 if is_stack else draw(st.integers(-1, row - 1)) for row in range(size)]
    few = draw(st.sets(st.integers(0, size - 1), max_size=4))
    return parent, [row in few for row in range(size)], draw(st.lists(st.integers(-1, size - 1), max_size=20))


@given(forests())
def test_first_accepted_row_upwards(forest: tuple[list[int], list[bool], list[int]]) -> None:
    parent, accepted, begin = forest
    at = np.array(begin, dtype=np.int32)
    found = climb(at, np.array(parent, dtype=np.int32), np.array(accepted))
    assert found.tolist() == [walk(row, parent, accepted) for row in begin]
    assert at.tolist() == begin
