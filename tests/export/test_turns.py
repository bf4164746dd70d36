"""The order of all communication of a run agrees with what every rank saw, whatever ran side by side."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.export.making.turns import find_turns

RANKS = range(4)


@st.composite
def recorded(draw):
    """Rows of ranks that issue up to three collectives at once, each as soon as an earlier one of its own is done."""
    groups = draw(st.lists(st.sets(st.sampled_from(RANKS), min_size=2), min_size=1, max_size=4))
    calls = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=25))
    free = {rank: [0] * 3 for rank in RANKS}
    rows = []
    last_of_group = dict.fromkeys(range(len(groups)), 0)
    for op, group in enumerate(calls):
        begun = {}
        for rank in sorted(groups[group]):
            place = draw(st.integers(0, 2))
            begun[rank] = (free[rank][place] + draw(st.integers(0, 5)), place)
        done = max(last_of_group[group], *(start for start, _ in begun.values())) + 1
        for rank, (start, place) in begun.items():
            end = done + draw(st.integers(0, 3))
            free[rank][place] = end
            rows.append({"rank": rank, "op": op, "group": group, "start": start, "end": end, "is_recv": False})
        last_of_group[group] = done
    return pl.DataFrame(rows)


@given(recorded())
def test_turns_are_one_order_that_every_rank_can_keep(rows):
    found = rows.with_columns(find_turns(rows))
    assert found["turn"].null_count() == 0
    assert found.group_by("op").agg(pl.col("turn").n_unique())["turn"].unique().to_list() == [1]
    assert found["turn"].n_unique() == rows["op"].n_unique()
    for (_,), part in found.group_by("rank"):
        listed = part.to_dicts()
        for one in listed:
            assert all(one["turn"] < later["turn"] for later in listed if later["start"] >= one["end"] and later != one)
            assert all(
                one["turn"] < later["turn"]
                for later in listed
                if later["group"] == one["group"] and later["op"] > one["op"]
            )


def rows(*listed):
    names = ("rank", "op", "group", "start", "end", "is_recv")
    return pl.DataFrame([dict(zip(names, one, strict=True)) for one in listed])


def test_what_ran_side_by_side_is_ordered_as_the_first_rank_issued_it():
    table = rows((0, 7, 1, 10, 30, False), (0, 8, 2, 12, 25, False), (1, 8, 2, 11, 26, False), (1, 7, 1, 13, 31, False))
    assert find_turns(table).to_list() == [0, 1, 1, 0]


def test_collective_that_one_rank_begins_after_a_receive_comes_behind_that_send_on_the_other():
    table = rows(
        (0, 1, 1, 0, 50, False),  # issued first, and not waited for
        (0, 2, -1, 10, 12, False),
        (1, 2, -1, 5, 20, True),
        (1, 1, 1, 21, 50, False),
    )
    assert find_turns(table).to_list() == [1, 0, None, 1]


def test_operations_that_ranks_have_in_opposite_orders_get_no_turn_where_it_could_not_be_kept():
    table = rows((0, 1, 1, 0, 10, False), (0, 2, 2, 10, 20, False), (1, 2, 2, 0, 10, False), (1, 1, 1, 10, 20, False))
    first, second, third, fourth = find_turns(table).to_list()
    assert (first, second) == (0, 1)
    assert (third, fourth) == (1, None)


def test_times_that_are_not_known_order_nothing():
    table = rows((0, 1, 1, -(1 << 62), 1 << 62, False), (0, 2, 2, -(1 << 62), 1 << 62, False))
    assert find_turns(table).to_list() == [0, 1]
