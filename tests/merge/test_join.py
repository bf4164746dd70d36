"""Joining texts in C and by polars, against plain Python."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.merge import join as join_module
from chakra_capture.merge.join import NumberPiece, Piece, TextPiece, join
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.compiled import load
from chakra_capture.trace.packed import Texts

ROWS = 7
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=4)
numbers = st.integers(-(2**63) + 1, 2**63 - 1)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Piece, list[str]]:
    """A piece, and what it adds to each row."""
    if draw(st.booleans()):
        values = draw(texts)
        codes = draw(st.lists(st.integers(-1, len(values) - 1), min_size=ROWS, max_size=ROWS))
        piece: Piece = TextPiece(np.array(codes, dtype=np.int32), Texts.of(values))
        return piece, [values[code] if code >= 0 else "" for code in codes]
    before = draw(st.text("ab\u00e9", min_size=1))
    given = draw(st.lists(st.none() | numbers, min_size=ROWS, max_size=ROWS))
    raw = np.array([MISSING if number is None else number for number in given], dtype=np.int64)
    return NumberPiece(Texts.of([before]), raw), ["" if n is None else f"{before}{n}" for n in given]


@pytest.mark.parametrize("compiled", [True, False])
@given(pieces=st.lists(columns(), min_size=1, max_size=5))
def test_each_row_is_its_pieces_in_order(*, compiled: bool, pieces: list[tuple[Piece, list[str]]]) -> None:
    joined = join([piece for piece, _ in pieces], ROWS, compiled=compiled)
    assert joined.dtype == pl.String
    assert joined.to_list() == ["".join(parts) for parts in zip(*(added for _, added in pieces), strict=True)]


def test_the_compiled_loop_is_the_one_tested() -> None:
    assert load(join_module._LIBRARY, join_module._INTERFACE) is not None


def test_no_rows() -> None:
    assert join([TextPiece(np.zeros(0, dtype=np.int32), Texts.of(["a"]))], 0).to_list() == []


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("size", "dtype"), [(127, np.int8), (128, np.int8), (32767, np.int16), (32768, np.int16)])
def test_narrow_codes_of_a_full_dictionary_leave_nothing_out_and_add_nothing(
    *, compiled: bool, size: int, dtype: type[np.signedinteger]
) -> None:
    piece = TextPiece(np.array([0, size - 1, -1], dtype=dtype), Texts.of(map(str, range(size))))
    assert join([piece], 3, compiled=compiled).to_list() == ["0", str(size - 1), ""]
