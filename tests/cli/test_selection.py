"""Numbers as users write them: the same that is printed can be given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.cli.output import UsageError, number_ranges
from chakra_capture.cli.selection import chosen, first_missing, parse_ranges

NUMBERS = st.integers(0, 60)
PARTS = st.lists(st.tuples(NUMBERS, st.integers(0, 9)), min_size=1, max_size=6)


@given(st.sets(NUMBERS, min_size=1))
def test_what_is_printed_can_be_given(numbers):
    text = number_ranges(sorted(numbers))
    assert {number for each in parse_ranges([text], "--steps") for number in each} == numbers


@given(PARTS, st.lists(st.sampled_from([",", " , "]), min_size=6, max_size=6), st.booleans())
def test_parts_may_stand_in_one_text_or_in_several(parts, commas, apart):
    texts = [str(low) if not more else f"{low}-{low + more}" for low, more in parts]
    given_ = texts if apart else ["".join(t + c for t, c in zip(texts, commas, strict=False)).rstrip(" ,")]
    found = {number for each in parse_ranges(given_, "--steps") for number in each}
    expected = set()
    for low, more in parts:
        number = low
        while number <= low + more:
            expected.add(number)
            number += 1
    assert found == expected


@given(PARTS, st.sets(NUMBERS))
def test_the_first_that_is_not_there_is_named_and_those_there_are_chosen(parts, there):
    ranges = [range(low, low + more + 1) for low, more in parts]
    named = [number for each in ranges for number in each]
    missing = [number for number in named if number not in there]
    assert first_missing(ranges, there) == (missing[0] if missing else None)
    assert chosen(ranges, there) == sorted(there & set(named))
    assert chosen(None, there) == sorted(there)


def test_a_range_may_be_longer_than_memory():
    ranges = parse_ranges(["3-999999999999999999"], "--steps")
    assert first_missing(ranges, [3, 4, 5]) == 6
    assert chosen(ranges, [1, 4, 5]) == [4, 5]


@pytest.mark.parametrize("text", ["", "a", "1,", ",1", "1--2", "-1", "1-", "1.5", "1;2", "٣", "1" * 19, "1 2"])
def test_what_is_no_number_is_wrong_usage(text):
    with pytest.raises(UsageError, match=r"--steps .* is no number or range\. Give such as 5, 5-8 or 1,3-5\."):
        parse_ranges([text], "--steps")


def test_a_range_that_ends_before_it_begins_is_wrong_usage():
    with pytest.raises(UsageError, match=r"^--ranks 5-3 ends before it begins\. Give 3-5\.$"):
        parse_ranges(["1,5-3"], "--ranks")
