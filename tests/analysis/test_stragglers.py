"""Stragglers: by hand on small tables, and on simulated trainings whose slow ranks are known."""

import random
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from planted import MS, START, US, Job, align, operation

from chakra_capture.analysis.own_times import PARTS, OwnTimes
from chakra_capture.analysis.stragglers import FOUND, find_stragglers
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
    assert found.table.schema == pl.Schema({column.name: column.dtype for column in FOUND})


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


def with_ends(steps: int, *operations: dict[int, tuple[int, int, int]], kind: str = "broadcast") -> pl.DataFrame:
    """Operations of each step of 100 ms, of ``kind``, the last an all_reduce: arrival, wait, transfer of each rank."""
    rows = []
    for step in range(-1, steps):
        for number, ranks in enumerate(operations):
            is_last = number == len(operations) - 1
            for rank, (arrival, wait, transfer) in ranks.items():
                rows.append({
                    "collective_id": (step + 1) * len(operations) + number, "rank": rank, "window": 0,
                    "step": max(step, 0), "order": (step + 1) * len(operations) + number,
                    "collective": "all_reduce" if is_last else kind,
                    "num_found": len(ranks), "arrival_ns": START + (100 * step + arrival) * MS, "wait_ns": wait * MS,
                    "transfer_ns": transfer * MS, "process_group": "0",
                    "end_ns": START + (100 * step + arrival + wait + transfer) * MS,
                })  # fmt: skip
    return pl.DataFrame(rows, schema=COLLECTIVES.schema)


def test_a_rank_that_is_late_in_a_broadcast_whose_root_stays_for_it_is_late() -> None:
    # Rank 1 comes 30 ms after the root, which stays (gloo): nobody is late afterwards.
    table = with_ends(10, {0: (0, 0, 31), 1: (30, 0, 1)}, {0: (60, 0, 1), 1: (60, 0, 1)})
    found = find_stragglers(table, {})
    assert found.table["delay_ns"].to_list() == [-30.0 * MS, 30.0 * MS]
    waits = with_ends(10, {0: (0, 30, 1), 1: (30, 0, 1)}, {0: (60, 0, 1), 1: (60, 0, 1)})
    assert find_stragglers(waits, {}).ranks == (1,)


def test_a_rank_that_is_late_in_a_broadcast_is_not_late_twice_where_the_root_does_not_stay() -> None:
    # NCCL's root leaves at once; what it lost shows in the all_reduce.
    table = with_ends(10, {0: (0, 0, 1), 1: (30, 0, 1)}, {0: (20, 30, 1), 1: (50, 0, 1)})
    found = find_stragglers(table, {})
    assert found.table["delay_ns"].to_list() == [-30.0 * MS, 31.0 * MS]  # 1 ms in which the root was there still


def test_a_rank_that_hands_a_broadcast_on_to_a_late_one_is_not_late_itself() -> None:
    # 1 stays in the broadcast for 3, whom it sends to; 0 and 2 leave, and wait for both of them later.
    first = {0: (0, 0, 1), 1: (0, 0, 31), 2: (0, 0, 1), 3: (30, 0, 1)}
    found = find_stragglers(with_ends(10, first, {0: (20, 30, 1), 1: (50, 0, 1), 2: (20, 30, 1), 3: (50, 0, 1)}), {})
    assert found.ranks == (3,)
    assert found.table.filter(rank=1)["delay_ns"].to_list() == [0.0]


def test_a_rank_whose_transfers_take_longer_is_not_late_for_that() -> None:
    # A slow link: all wait from 0 to 40 in the transfer, 1 to 60. It is 20 ms late the next time.
    table = with_ends(10, {0: (0, 0, 40), 1: (0, 0, 60)}, {0: (70, 20, 1), 1: (90, 0, 1)}, kind="all_reduce")
    found = find_stragglers(table, {})
    assert (found.ranks, found.table["delay_ns"].to_list()) == ((), [-20.0 * MS, 0.0])
    (group,) = found.transfers.groups
    assert (group.process_group, group.ranks, group.transfer_ns) == ("0", (0, 1), 41.0 * MS)


def test_a_rank_that_comes_last_for_ever_other_reasons_is_not_named_once_its_own_work_is_known() -> None:
    found = find_stragglers(collectives(*[(n, {0: 100 * n, 1: 100 * n + 30}) for n in range(12)]), {})
    own = np.zeros((12, len(PARTS)))
    own[:, PARTS.index("forward")], usual = 40 * MS, own.copy()
    busy = usual.copy()
    busy[:, PARTS.index("backward")] = [30 * MS * (step % 2) for step in range(12)]
    ranks = {rank: OwnTimes(dict(enumerate(times))) for rank, times in enumerate((usual, busy))}
    excused = found.located(ranks, {})
    assert (found.ranks, excused.ranks, excused.late_in) == ((1,), (), {})
    assert not excused.table["is_straggler"].any()
    assert str(excused.reason).startswith("rank 1 comes last, but its own work")
    # Without steps that all have, nothing is known of its work.
    assert found.located({0: OwnTimes(), 1: OwnTimes()}, {}).ranks == (1,)


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
        ({"collective": "send"}, "no operation of a group is recorded on several ranks"),
        ({"num_found": 1}, "no operation of a group is recorded on several ranks"),
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
