"""Numbers of groups against a plain dictionary."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis import grouping
from chakra_capture.analysis.grouping import group_of_rows

LETTERS = pl.Enum(["a", "b", "c"])
ROWS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "b", ""]),
        st.none() | st.integers(-(2**62), 2**62),
        st.none() | st.integers(-2, 2),
        st.none() | st.sampled_from(["a", "b", "c"]),
        st.none() | st.booleans(),
    )
)
SCHEMA = {"text": pl.String, "large": pl.Int64, "small": pl.Int32, "letter": LETTERS, "truth": pl.Boolean}


@given(ROWS, st.sets(st.sampled_from([*SCHEMA])), st.sampled_from([0, 4, 1 << 24]))
def test_rows_are_in_one_group_when_they_are_alike_in_all_keys(rows, keys, most):
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    before, grouping._MOST_LOOKED_UP = grouping._MOST_LOOKED_UP, most
    try:
        found = group_of_rows(table, sorted(keys)).tolist()
    finally:
        grouping._MOST_LOOKED_UP = before
    kinds = [tuple(row) for row in table.select(sorted(keys)).iter_rows()] if keys else [()] * table.height
    assert len(set(zip(kinds, found, strict=True))) == len(set(kinds)) == len(set(found))
    assert set(found) == set(range(len(set(found))))
