"""Numbers and names as the page writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.report import words
from chakra_capture.report.escape import shown, without_places


@pytest.mark.parametrize(
    ("ns", "text"),
    [(222_442_191, "222.4 ms"), (9_999_000_000, "9,999 ms"), (12_340_000_000, "12.3 s"), (12_200, "12.2 µs"),
     (None, "not recorded"), (0, "0.0 ms"), (-2_000_000, "−2.0 ms")],
)  # fmt: skip
def test_a_time_in_a_sentence(ns: float | None, text: str) -> None:
    assert words.span(ns) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.776, "78 %"), (0.046, "4.6 %"), (0.0996, "10 %"), (0.0004, "< 0.1 %"), (0.0, "0 %"), (1.0, "100 %"),
     (0.9991, "> 99 %"), (None, "not recorded")],
)  # fmt: skip
def test_a_share(part: float | None, text: str) -> None:
    assert words.share(part) == text


def test_a_table_has_one_unit() -> None:
    assert words.unit_for([5e6, 2e3, 3e6]).name == "ms"
    assert words.unit_for([5e3, 2e3, 3e6]).name == "µs"
    assert words.unit_for([5e6, 11e9]).name == "s"
    assert words.unit_for([]).cell(None) == ""
    assert words.unit_for([5e6]).cell(900) == "< 0.01"


@given(st.floats(min_value=1, max_value=1e15))
def test_no_time_has_more_than_four_digits_unless_they_stand_before_the_point(ns: float) -> None:
    text = words.span(ns).split(" ")[0].replace(",", "")
    whole, _, rest = text.partition(".")
    assert len(whole.lstrip("0")) + len(rest) <= max(4, len(whole))


@pytest.mark.parametrize(
    ("name", "display"),
    [("void at::native::k<float, (Op)1>(int, float*)", "at::native::k<float, (Op)1>"), ("gemm", "gemm"),
     ("void (anonymous namespace)::k(int)", "(anonymous namespace)::k"),
     ("at::(anonymous namespace)::k<2>(int)", "at::(anonymous namespace)::k<2>")],
)  # fmt: skip
def test_a_kernel_s_name_loses_its_arguments(name: str, display: str) -> None:
    assert words.display_name(name) == display


def test_a_sentence_keeps_names_apart_from_its_own_words() -> None:
    parts = words.prose("Set `a=1`, not {}.", "`b` {}")
    assert [(part.text, part.is_code) for part in parts] == [
        ("Set ", False), ("a=1", True), (", not ", False), ("`b` {}", True), (".", False)
    ]  # fmt: skip


@given(st.text(max_size=600))
def test_what_is_shown_is_one_short_printable_line(text: str) -> None:
    found = shown(text)
    assert not [c for c in found if c in "\n\r\t\u202a\u202b\u202d\u202e\u2066\u2067\u2028\u2029\x00\x1b"]
    found.encode()


def test_folders_are_cut_off_paths_and_rates_are_not() -> None:
    assert without_places("cannot read /home/someone/runs/rank-0.json (gone)") == "cannot read …/rank-0.json (gone)"
    assert without_places("12 GB/s and/or 3/4 of a::b<x/y>") == "12 GB/s and/or 3/4 of a::b<x/y>"


def test_ranges() -> None:
    assert words.ranges([4, 5, 6, 9]) == "4–6, 9"
