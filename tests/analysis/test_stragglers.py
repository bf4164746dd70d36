"""Stragglers: by hand on small tables, and on simulated trainings whose slow ranks are known."""

import random
from math import comb
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from planted import MS, START, US, Job, align, operation

from chakra_capture.analysis.stragglers import SCHEMA, find_stragglers
from chakra_capture.trace.schema import COLLECTIVES


def collectives(*operations: tuple[int, dict[int, int]], **columns: Any) -> pl.DataFrame:
    """All_reduces of (step, arrival of each rank in ms); the first operation of the window is one more, before them."""
    rows = []
    for number, (step, arrivals) in enumerate([(0, dict.fromkeys(operations[0][1], -1000)), *operations]):
        last = max(arrivals.values())
        for rank, arrival in sorted(arrivals.items()):
            rows.append(
                {
                    "collective_id": number,
                    "rank": rank,
                    "window": 0,
                    "order": number,
                    "collective": "all_reduce",
                    "num_found": len(arrivals),
                    "step": step,
                    "arrival_ns": START + arrival * MS,
                    "wait_ns": (last - arrival) * MS,
                }
                | columns
            )
    return pl.DataFrame(rows, schema=COLLECTIVES.schema)


def test_a_rank_is_late_by_how_long_half_of_the_others_were_there_less_its_own_waiting() -> None:
    steps = [(n, {0: 100 * n, 1: 100 * n + 4, 2: 100 * n + 30, 3: 100 * n + 2}) for n in range(10)]
    found = find_stragglers(collectives(*steps), {})
    assert found.table.drop("is_straggler").rows() == [
        # rank, steps, latest, delay (late - waiting), waiting, of a step of 100 ms
        (0, 10, 0, -30.0 * MS, 30.0 * MS, -0.30),
        (1, 10, 0, (4 - 2 - 26.0) * MS, 26.0 * MS, -0.24),
        (2, 10, 10, (30 - 2) * MS, 0.0, 0.28),
        (3, 10, 0, -28.0 * MS, 28.0 * MS, -0.28),
    ]
    assert (found.ranks, found.reason, found.num_steps, found.step_ns) == ((2,), None, 10, 100.0 * MS)
    assert found.table.schema == pl.Schema({column.name: column.dtype for column in SCHEMA})


def test_a_stretch_of_time_counts_once_however_many_operations_are_due_in_it() -> None:
    steps = [(n, {0: 100 * n + k, 1: 100 * n + 40 + k}) for n in range(10) for k in range(3)]
    found = find_stragglers(collectives(*steps), {})
    assert found.table["delay_ns"].to_list() == [-42.0 * MS, 42.0 * MS]


def test_a_rank_that_was_made_to_wait_is_not_late() -> None:
    # 1 is late among 0 and 1; 0, whom it holds up, is late among 0 and 2, but waited as long before.
    operations = []
    for n in range(12):
        operations += [(n, {0: 100 * n, 1: 100 * n + 30}), (n, {0: 100 * n + 31, 2: 100 * n + 1})]
    found = find_stragglers(collectives(*operations), {})
    assert found.ranks == (1,)
    assert found.table["delay_ns"].to_list() == [0.0, 30.0 * MS, -30.0 * MS]


def test_the_first_operation_of_a_window_does_not_count() -> None:
    table = collectives(*[(n, {0: 100 * n, 1: 100 * n + 30}) for n in range(10)])
    late = table.with_columns(order=pl.when(pl.col("collective_id") == 4).then(0).otherwise("order"))
    assert find_stragglers(late, {}).num_steps == find_stragglers(table, {}).num_steps - 1


@pytest.mark.parametrize("num_steps", [7, 8])
def test_a_rank_is_not_named_where_chance_may_have_made_it_the_latest(num_steps: int) -> None:
    # Of two equal ranks one is the latest in all of 7 steps with 2 / 2^7 = 1.6 %, of 8 with 0.8 %.
    found = find_stragglers(collectives(*[(n, {0: 100 * n, 1: 100 * n + 30}) for n in range(num_steps)]), {})
    assert (2 / 2**num_steps <= 0.01) == (found.ranks == (1,))
    if not found.ranks:
        assert found.reason == "too few steps (7) to tell a slow rank from chance"


@pytest.mark.parametrize("num_latest", range(12, 21))
def test_how_often_a_rank_must_be_the_latest_is_the_binomial_tail(num_latest: int) -> None:
    steps = [(n, {0: 100 * n, 1: 100 * n + (30 if n < num_latest else -30)}) for n in range(20)]
    found = find_stragglers(collectives(*steps), {})
    chance = 2 * sum(comb(20, k) for k in range(num_latest, 21)) / 2**20
    assert (found.ranks == (1,)) == (chance <= 0.01 and num_latest >= 16)


def test_ranks_that_are_late_in_turn_are_not_named() -> None:
    steps = [(n, {0: 100 * n + 30 * (n % 2), 1: 100 * n + 30 * (1 - n % 2)}) for n in range(20)]
    found = find_stragglers(collectives(*steps), {})
    assert (found.ranks, found.reason) == ((), "ranks wait for each other in turn, no single rank is slow")


def test_a_delay_within_the_doubt_about_the_clocks_is_none() -> None:
    table = collectives(*[(n, {0: 100 * n, 1: 100 * n + 30}) for n in range(10)])
    assert find_stragglers(table, {1: 29 * MS}).ranks == (1,)
    found = find_stragglers(table, {0: 10 * MS, 1: 20 * MS})
    assert found.reason == "rank 1 seems 30000000 ns late, but the clocks are known only to 30000000 ns"


def test_a_delay_of_less_than_a_tenth_of_a_step_is_none() -> None:
    found = find_stragglers(collectives(*[(n, {0: 100 * n, 1: 100 * n + 9}) for n in range(20)]), {})
    assert (found.ranks, found.reason) == ((), "no rank is late by 10% of a step")


def test_without_steps_stretches_of_operations_are_looked_at() -> None:
    table = collectives(*[(0, {0: 10 * n, 1: 10 * n + 3}) for n in range(60)], step=None)
    found = find_stragglers(table, {})
    assert (found.ranks, found.has_steps, found.num_steps) == ((1,), False, 20)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"collective": "broadcast"}, "no operation in which all wait for all is recorded on several ranks"),
        ({"num_found": 1}, "no operation in which all wait for all is recorded on several ranks"),
        ({"wait_ns": None}, "the waits of no operation are known: clocks cannot be compared, or ranks are missing"),
        ({"order": 0}, "too few operations: the first of a window is left out"),
        ({"step": 3}, "one step is too few"),
    ],
)
def test_why_nothing_can_be_said_is_said(changed: dict[str, Any], reason: str) -> None:
    table = collectives(*[(n, {0: 100 * n, 1: 100 * n + 30}) for n in range(10)], **changed)
    found = find_stragglers(table, {})
    assert (found.ranks, found.reason) == ((), reason)


def test_an_empty_table_has_no_straggler() -> None:
    found = find_stragglers(pl.DataFrame(schema=COLLECTIVES.schema), {})
    assert (found.table.height, found.ranks, found.num_steps) == (0, (), 0)
    assert found.reason


@pytest.mark.parametrize("slow", [(), (2,), (1, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_slow_ranks_of_a_training_are_named_and_no_others(tmp_path: Path, slow: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    job = Job(
        ranks=6,
        steps=12,
        work_ns=lambda rank, step, number: (15 if rank in slow else 10) * MS + chance.randrange(2 * MS),
        offsets_ns={rank: chance.randrange(-50 * MS, 50 * MS) for rank in range(1, 6)},
        drifts_ppm={rank: chance.uniform(-50, 50) for rank in range(1, 6)},
        seed=seed,
    )
    alignment, table = align(tmp_path, job.rows())
    assert sorted(find_stragglers(table, alignment.doubt_ns).ranks) == list(slow)


def test_a_slow_rank_is_named_beside_groups_of_fewer_ranks(tmp_path: Path) -> None:
    chance = random.Random(1)
    now, rows = [0] * 4, {rank: [] for rank in range(4)}
    for step in range(14):
        for name, groups in (("tp", [(0, 1), (2, 3)]), ("dp", [(0, 2), (1, 3)])):
            for members in groups:
                here = {
                    r: now[r] + (16 if r == 3 and name == "tp" else 10) * MS + chance.randrange(MS) for r in members
                }
                end = max(here.values()) + 100 * US
                for rank in members:
                    row = operation(here[rank], end - here[rank], step=step, group_ranks=list(members))
                    rows[rank].append(row | {"process_group": f"{name}{members[0]}"})
                    now[rank] = end + chance.randrange(5 * US)
    alignment, table = align(tmp_path, rows)
    assert find_stragglers(table, alignment.doubt_ns).ranks == (3,)
