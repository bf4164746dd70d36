"""What transfers tell of a slow network, from tables by hand."""

from typing import Any

import polars as pl
import pytest

from chakra_capture.analysis.slow_transfers import GroupTransfers, SlowLinks, slow_transfers
from chakra_capture.trace.schema import COLLECTIVES

MS = 1_000_000
STEP_NS = 100.0 * MS


def operations(*listed: tuple[str, dict[int, tuple[float, float, float]]], steps: int = 10) -> pl.DataFrame:
    """In each step these: name, and arrival, wait and transfer of each rank in ms."""
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        for number, (name, ranks) in enumerate(listed):
            for rank, (arrival, wait, transfer) in ranks.items():
                start = round((100 * step + arrival) * MS)
                rows.append({
                    "collective_id": step * len(listed) + number, "rank": rank, "window": 0, "step": step,
                    "order": step + 1, "collective": name, "num_found": len(ranks), "arrival_ns": start,
                    "wait_ns": round(wait * MS), "transfer_ns": round(transfer * MS),
                    "end_ns": start + round((wait + transfer) * MS), "process_group": "0",
                })  # fmt: skip
    return pl.DataFrame(rows, schema=COLLECTIVES.schema)


def message(low: int, high: int, ms: float) -> tuple[str, dict[int, tuple[float, float, float]]]:
    return "send", {low: (0, 0, ms), high: (0, 0, ms)}


def test_transfers_of_a_group_are_from_the_last_arrival_to_the_first_end_and_overlapping_ones_count_once() -> None:
    first = "all_reduce", {0: (0, 20, 10), 1: (20, 0, 14)}  # 20 to 30
    second = "broadcast", {0: (25, 0, 10), 1: (25, 0, 10)}  # 25 to 35
    (group,) = slow_transfers(operations(first, second), STEP_NS).groups
    assert group == GroupTransfers("0", (0, 1), 15.0 * MS, 0.15)


@pytest.mark.parametrize(("ms", "is_said"), [(9.9, False), (10, True)])
def test_transfers_are_worth_a_word_from_a_tenth_of_a_step(ms: float, is_said: bool) -> None:
    found = slow_transfers(operations(("all_reduce", {0: (0, 0, ms), 1: (0, 0, ms)})), STEP_NS)
    assert bool(found.groups) == is_said
    assert slow_transfers(operations(("all_reduce", {0: (0, 0, ms), 1: (0, 0, ms)})), None).groups == ()


FOUR = {(a, b): 1.0 for a in range(4) for b in range(a + 1, 4)}


@pytest.mark.parametrize(
    ("slow", "rank"),
    [
        ({(0, 2): 6, (1, 2): 5, (2, 3): 4}, 2),
        ({(0, 2): 6, (1, 2): 5}, None),  # one of its links is as the others
        ({(0, 2): 2.9, (1, 2): 2.9, (2, 3): 2.9}, None),  # not three times as long
        ({(0, 2): 6}, None),  # of two ranks either may be the slow one
        ({}, None),
        (dict.fromkeys(FOUR, 9), None),
    ],
)
def test_links_of_a_rank_are_slow_if_each_takes_longer_than_any_other_and_three_times_as_long(
    slow: dict[tuple[int, int], float], rank: int | None
) -> None:
    found = slow_transfers(operations(*(message(*pair, ms) for pair, ms in (FOUR | slow).items())), STEP_NS).links
    assert (found and found.rank) == rank
    if found is not None:
        assert found == SlowLinks(2, 5.0 * MS, 1.0 * MS)


def test_few_messages_and_two_ranks_do_not_tell_whose_link_is_slow() -> None:
    slow = FOUR | {(0, 2): 6, (1, 2): 5, (2, 3): 4}
    few = operations(*(message(*pair, ms) for pair, ms in slow.items()), steps=7)
    assert slow_transfers(few, STEP_NS).links is None
    assert slow_transfers(operations(message(0, 1, 50.0)), STEP_NS).links is None
    assert slow_transfers(pl.DataFrame(schema=COLLECTIVES.schema), STEP_NS).as_json() == {"groups": [], "links": None}
