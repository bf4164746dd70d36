import numpy as np
import pytest

from chakra_capture.trace.columns import MISSING, coded, concat_coded, int_column, parse_ints


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"12", 12),
        (b'"12"', 12),
        (b"-3", -3),
        (b"0", 0),
        (b"9223372036854775807", 9223372036854775807),
        (None, MISSING),
        (b"", MISSING),
        (b"1.0", MISSING),
        (b"3.7", MISSING),
        (b"1e3", MISSING),
        (b'"0x0"', MISSING),
        (b"null", MISSING),
        (b"true", MISSING),
        (b"[1]", MISSING),
        (b'"1\\"2"', MISSING),
        (b"9223372036854775808", MISSING),
        (b"\xff", MISSING),
        ('"²"'.encode(), MISSING),
        (b"[1,\n2]", MISSING),
    ],
)
def test_integer_args_are_read_and_nothing_else(text: bytes | None, value: int) -> None:
    assert parse_ints([b"5", text, b'"6"']).tolist() == [5, value, 6]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7), ("7", 7), (7.0, 7),
        (None, MISSING), ("Spans", MISSING), (7.5, MISSING), ("²", MISSING), (True, MISSING),
        ("", MISSING), ("-", MISSING), (2**63, MISSING), (-(2**70), MISSING), (float("inf"), MISSING), ([1], MISSING),
        ("9" * 30, MISSING), ("-8", -8),
    ],
)  # fmt: skip
def test_int_column_takes_integers_in_range_only(value: object, number: int) -> None:
    assert int_column([value]).tolist() == [number]


def test_coded_text_keeps_nulls_and_joins_dictionaries() -> None:
    first, second = coded(["a", None, "b"]), coded(["b", "c", None])
    both = concat_coded(first, second)
    assert [both[row] for row in range(6)] == ["a", None, "b", "b", "c", None]
    assert list(both.values) == ["a", "b", "c"]
    assert both.mask(["b"]).tolist() == [False, False, True, True, False, False]
    empty = coded([None])
    assert concat_coded(empty, empty)[1] is None
    assert empty.mask(["a"]).tolist() == [False]
    assert np.asarray(concat_coded(empty, first).codes).tolist() == [-1, 0, -1, 1]
