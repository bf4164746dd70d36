from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.times import microseconds_to_ns, to_epoch


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1695835542514261", 1695835542514261000),  # torch <= 2.2: whole microseconds
        ("4458676522690.655", 4458676522690655),  # torch >= 2.4: ns, relative
        ("1712195495505582.988", 1712195495505582988),  # epoch with decimals: float64 gives ...583.0
        ("1712195495505582.25", 1712195495505582250),
        ("1712195495505582.5", 1712195495505582500),
        ("0.2", 200),
        ("0", 0),
        ("-1", -1000),
        ("-0.5", -500),
        ("-0.001", -1),
        ('"12.5"', 12500),
        ("1e3", 1000000),
        ("1.5E-3", 2),
        ("0.0005", 0),  # half to even below one ns
        ("0.0015", 2),
        ("0.00050000000000000000000000000000000001", 1),
        ("1.9999", 2000),
    ],
)
def test_microseconds_are_read_exactly_from_the_text(text: str, ns: int) -> None:
    assert microseconds_to_ns([text]).tolist() == [ns]


@pytest.mark.parametrize(
    "text",
    ["", "null", "true", '"NaN"', "NaN", "Infinity", '"-Infinity"', "[1]", '"x"', "1_000", "٣", "1e999", "1e999999999",
     "-1e300", "9" * 5000, "8999999999999999", "0x10", "1.2.3", "--1"],
)  # fmt: skip
def test_what_is_no_finite_time_in_range_is_missing(text: str) -> None:
    assert microseconds_to_ns([text, "7"]).tolist() == [MISSING, 7000]


@given(st.lists(st.decimals(min_value=-(10**12), max_value=4 * 10**15, places=4), max_size=20))
def test_every_decimal_is_rounded_once_and_half_to_even(values: list[Decimal]) -> None:
    expected = [int((value * 1000).to_integral_value(rounding=ROUND_HALF_EVEN)) for value in values]
    assert microseconds_to_ns([f"{value:f}" for value in values]).tolist() == expected


BASE = 1_790_857_026_000_000_000


def test_base_time_is_added_to_relative_times() -> None:
    times = np.array([5_129_619_867_609_487, MISSING, -1000], dtype=np.int64)
    assert to_epoch(times, BASE).tolist() == [1795986645867609487, MISSING, BASE - 1000]


def test_times_on_the_epoch_already_stay_although_a_base_is_given() -> None:
    times = np.array([1_790_857_027_000_000_000, MISSING], dtype=np.int64)
    assert to_epoch(times, BASE).tolist() == times.tolist()


def test_one_absurd_time_does_not_take_the_base_from_the_others() -> None:
    times = np.array([1000, 2000, 4_000_000_000_000_000_000], dtype=np.int64)
    assert to_epoch(times, BASE).tolist() == [BASE + 1000, BASE + 2000, MISSING]


@pytest.mark.parametrize("base", [0, -5, 10**30])
def test_a_base_that_is_no_time_is_not_added(base: int) -> None:
    assert to_epoch(np.array([1000], dtype=np.int64), base).tolist() == [1000]


def test_no_rows_give_no_times() -> None:
    assert microseconds_to_ns([]).tolist() == []
    assert to_epoch(np.zeros(0, dtype=np.int64), BASE).tolist() == []
