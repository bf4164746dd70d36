"""Clocks of ranks: planted ones are found again, and bounds are those of a plain linear program."""

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planted import MS, START, US, Job, align, operation

from chakra_capture.merge.across.outcome import Clock

SECOND = 1_000_000_000


def error_ns(clock: Clock, job: Job, at_ns: int) -> float:
    """How far the clock found is from the planted one, when the true time is this long after the start."""
    drift = job.drifts_ppm.get(clock.rank, 0.0) * 1e-6 * at_ns
    found = clock.offset_ns + (clock.drift_ppm or 0.0) * 1e-6 * (START + at_ns - clock.t0_ns)
    return abs(found - job.offsets_ns.get(clock.rank, 0) - drift)


@pytest.mark.parametrize("seed", range(3))
def test_planted_offsets_and_drifts_are_found_within_the_smallest_collective(tmp_path: Path, seed: int) -> None:
    job = Job(
        ranks=4,
        steps=100,
        work_ns=lambda rank, step, number: (20 + 3 * rank + (step * 7 + number * 5 + rank * 3 + seed) % 11) * MS,
        jitter_ns=15 * US,
        offsets_ns={1: 50 * MS, 2: -50 * MS, 3: 12_345},
        drifts_ppm={1: 50.0, 2: -50.0, 3: 20.0},
        seed=seed,
    )
    alignment, table = align(tmp_path, job.rows())
    length = max(end for *_, end in job.true_rows()[0])
    for rank in (1, 2, 3):
        clock = alignment.clocks[rank]
        assert clock.evidence == "operations"
        assert max(error_ns(clock, job, 0), error_ns(clock, job, length)) < min(job.transfer_ns)
        assert clock.drift_ppm == pytest.approx(job.drifts_ppm[rank], abs=3)
        assert clock.low_ns <= clock.offset_ns <= clock.high_ns
    true = {(rank, node): row[2] for rank, rows in job.true_rows().items() for node, row in enumerate(rows)}
    last = [max(true[rank, node] for rank in range(4)) for node in range(300)]
    for rank, node, wait in table.select("rank", "node_id", "wait_ns").iter_rows():
        assert abs(wait - (last[node] - true[rank, node])) < 2 * min(job.transfer_ns)


def test_a_drift_that_the_data_does_not_show_is_not_stated(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, Job(ranks=8, steps=30, offsets_ns={1: 5 * MS}).rows())
    assert [clock.drift_ppm for clock in alignment.clocks.values()] == [None] * 8


def test_ranks_of_one_machine_share_a_clock(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, Job(ranks=3).rows(), hosts={0: "a", 1: "a", 2: "b"})
    assert (alignment.clocks[1].offset_ns, alignment.clocks[1].evidence) == (0, "same machine")
    assert alignment.clocks[2].evidence == "operations"


def test_a_machine_name_is_not_believed_against_causality(tmp_path: Path) -> None:
    job = Job(ranks=2, offsets_ns={1: 40 * MS})
    alignment, _ = align(tmp_path, job.rows(), hosts={0: "localhost", 1: "localhost"})
    assert alignment.clocks[1].evidence == "operations"
    assert alignment.clocks[1].offset_ns == pytest.approx(40 * MS, abs=40 * US)


def test_times_that_no_clock_explains_give_no_statement(tmp_path: Path) -> None:
    rows = Job(ranks=2).rows()
    for row in rows[1][30:]:
        row["ts_ns"] += 5 * MS
    alignment, table = align(tmp_path, rows)
    assert not alignment.clocks[1].comparable
    assert "the clock was set meanwhile" in (alignment.clocks[1].reason or "")
    assert table["wait_ns"].null_count() == table["skew_ns"].null_count() == table.height


def test_of_many_ranks_only_the_one_whose_clock_was_set_is_left_out(tmp_path: Path) -> None:
    for wrong in (0, 2):
        rows = Job(ranks=4).rows()
        for row in rows[wrong][30:]:
            row["ts_ns"] += 5 * MS
        alignment, _ = align(tmp_path / str(wrong), rows)
        assert [rank for rank, clock in alignment.clocks.items() if not clock.comparable] == [wrong]
        assert {c.reference for c in alignment.clocks.values() if c.comparable} == {1 if wrong == 0 else 0}


def pair(rows: dict[int, list[dict[str, Any]]], ranks: list[int], name: str) -> dict[int, list[dict[str, Any]]]:
    changed = {"process_group": name, "group_ranks": ranks}
    return {rank: [row | changed for row in rows[rank]] for rank in ranks}


def test_clocks_are_carried_on_through_groups_that_share_a_rank(tmp_path: Path) -> None:
    rows = Job(ranks=3, offsets_ns={1: 7 * MS, 2: -9 * MS}).rows()
    left, right = pair(rows, [0, 1], "a"), pair(rows, [1, 2], "b")
    alignment, _ = align(tmp_path, {0: left[0], 1: left[1] + right[1], 2: right[2]})
    assert {clock.reference for clock in alignment.clocks.values()} == {0}
    assert alignment.clocks[2].offset_ns == pytest.approx(-9 * MS, abs=40 * US)


def test_ranks_that_no_operation_links_have_their_own_references(tmp_path: Path) -> None:
    rows = Job(ranks=4).rows()
    alignment, _ = align(tmp_path, pair(rows, [0, 1], "a") | pair(rows, [2, 3], "b"))
    assert [clock.reference for clock in alignment.clocks.values()] == [0, 0, 2, 2]


def test_groups_that_no_trace_names_are_not_taken_for_one(tmp_path: Path) -> None:
    unknown = {"process_group": None, "group_ranks": None}
    rows = {}
    for first in (0, 2):
        job = Job(ranks=2, offsets_ns={1: 6 * MS}, seed=first, jitter_ns=US)
        rows |= {first + rank: [row | unknown for row in found] for rank, found in job.rows().items()}
    alignment, table = align(tmp_path, rows)
    assert alignment.num_matched == 60
    assert [clock.reference for clock in alignment.clocks.values()] == [0, 0, 2, 2]
    for rank in (1, 3):
        assert alignment.clocks[rank].offset_ns == pytest.approx(6 * MS, abs=40 * US)
    assert table["wait_ns"].null_count() == table.height


def test_on_one_machine_too_the_ends_must_agree_for_a_wait_in_a_group_that_no_trace_names(tmp_path: Path) -> None:
    unknown = {"process_group": None, "group_ranks": None}
    rows = {rank: [row | unknown for row in found] for rank, found in Job(ranks=2, jitter_ns=US).rows().items()}
    _, table = align(tmp_path, rows, hosts={0: "a", 1: "a"})
    assert table["wait_ns"].null_count() == 0
    rows[1] = [row | {"dur_ns": row["dur_ns"] + 30 * US} for row in rows[1]]
    _, table = align(tmp_path, rows, hosts={0: "a", 1: "a"})
    assert table["wait_ns"].null_count() == table.height


def broadcasts(roots: list[int]) -> dict[int, list[dict[str, Any]]]:
    """Rank 1 is 3 ms ahead; the root leaves at once, the other when it has come."""
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for n, root in enumerate(roots):
        for rank in (0, 1):
            at = n * 10 * MS + rank * 3 * MS + (0 if rank == root else 20 * US)
            found[rank].append(
                operation(at, 90 * US, collective="broadcast", root=root, comm_bytes=8, group_ranks=[0, 1])
            )
    return found


def test_broadcasts_of_one_root_bound_a_clock_on_one_side_only(tmp_path: Path) -> None:
    alignment, table = align(tmp_path, broadcasts([0, 0, 0]))
    assert "do not bound how far apart" in (alignment.clocks[1].reason or "")
    assert table["wait_ns"].null_count() == table.height


def test_on_one_machine_a_bound_on_one_side_is_enough_unless_it_excludes_that_the_clock_is_one(tmp_path: Path) -> None:
    ahead, _ = align(tmp_path, broadcasts([0, 0, 0]), hosts={0: "a", 1: "a"})
    assert (ahead.clocks[1].offset_ns, ahead.clocks[1].low_ns) == (0, None)
    behind, table = align(tmp_path, broadcasts([1, 1, 1]), hosts={0: "a", 1: "a"})
    assert "exclude that they are one" in (behind.clocks[1].reason or "")
    assert table["skew_ns"].null_count() == table.height


def test_broadcasts_of_both_ranks_bound_a_clock(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, broadcasts([0, 1, 0]))
    clock = alignment.clocks[1]
    # Rank 1 ends 110 us after rank 0 arrives, and the other way round; times are whole microseconds.
    assert (clock.low_ns, clock.high_ns) == (3 * MS - 112 * US, 3 * MS + 112 * US)
    assert clock.offset_ns == 3 * MS


def test_messages_both_ways_bound_a_clock(tmp_path: Path) -> None:
    both = {"group_ranks": [0, 1, 2]}
    ping = (
        operation(0, 50 * US, collective="send", peer=1, **both),
        operation(4 * MS, 80 * US, collective="recv", peer=0, **both),
    )
    pong = (
        operation(5 * MS, 50 * US, collective="send", peer=0, **both),
        operation(1 * MS, 90 * US, collective="recv", peer=1, **both),
    )
    alignment, _ = align(tmp_path, {0: [ping[0], pong[1]], 1: [ping[1], pong[0]]})
    # The receipt of the one ends after the send of the other began: 4.08 ms - 0, and 5 ms - 1.09 ms.
    assert (alignment.clocks[1].low_ns, alignment.clocks[1].high_ns) == (3_910 * US - 2 * US, 4_080 * US + 2 * US)


@pytest.mark.parametrize(
    "columns",
    [
        {"comm_bytes": 0},
        {"collective": "all_to_all", "in_bytes": 4, "out_bytes": 8},
        {"collective": "other"},
        {"collective": "send_recv"},
        {"collective": None},
    ],
)
def test_an_operation_that_need_not_wait_says_nothing_of_clocks(tmp_path: Path, columns: dict[str, Any]) -> None:
    # Each has left before the other comes.
    rows = {0: [operation(0, 10, **columns)], 1: [operation(500, 10, **columns)]}
    alignment, _ = align(tmp_path, {r: [row | {"group_ranks": [0, 1]} for row in found] for r, found in rows.items()})
    assert not alignment.clocks[1].comparable
    assert "no offset" not in (alignment.clocks[1].reason or "")


@pytest.mark.parametrize("ts", [-1, 1 << 62, (1 << 63) - 1, None])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, ts: int | None) -> None:
    rows = Job(ranks=2).rows()
    rows[1][5]["ts_ns"] = ts
    alignment, table = align(tmp_path, rows)
    assert alignment.clocks[1].comparable
    at = table.filter(pl.col("rank") == 1, pl.col("node_id") == 5)
    assert at.select("arrival_ns", "end_ns", "wait_ns", "skew_ns").row(0) == (None, None, None, None)


def test_clocks_that_are_decades_apart_are_not_compared(tmp_path: Path) -> None:
    rows = Job(ranks=2).rows()
    for row in rows[0]:
        row["ts_ns"] -= START
    for row in rows[1]:
        row["ts_ns"] += (1 << 62) - START - 60 * SECOND
    alignment, _ = align(tmp_path, rows)
    assert "decades apart" in (alignment.clocks[1].reason or "")


TIMES = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 3000), st.integers(-1500, 1500), st.integers(0, 3000)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TIMES)
def test_a_clock_is_found_exactly_where_a_plain_linear_program_has_a_solution(
    tmp_path: Path, times: list[tuple[int, int, int, int]]
) -> None:
    times = sorted(times)
    zero = [(at * 1000 + 1, dur) for at, dur, _, _ in times]
    one = [(at * 1000 + shift, dur) for at, _, shift, dur in times]
    assume(any(ts % 1000 for ts, _ in one) or any((ts + dur) % 1000 for ts, dur in one))
    rows = {
        r: [operation(ts, dur, seq=n, group_ranks=[0, 1]) for n, (ts, dur) in enumerate(each)]
        for r, each in enumerate((zero, one))
    }
    alignment, _ = align(tmp_path, rows)
    clock = alignment.clocks[1]
    # offset + drift x <= high and >= low, where x is the end on rank 0; the slack is 1 ns of each clock.
    x = [Fraction(START + ts + dur - alignment.clocks[0].t0_ns) for ts, dur in zero]
    high = [Fraction(ts + dur - other + 2) for (ts, dur), (other, _) in zip(one, zero, strict=True)]
    low = [Fraction(ts - other - dur - 2) for (ts, _), (other, dur) in zip(one, zero, strict=True)]
    most = Fraction(500, 10**6)
    crossings = {
        (above - below) / (x[i] - x[j])
        for (i, above), (j, below) in itertools.product(enumerate(high + low), repeat=2)
        for i, j in [(i % len(x), j % len(x))]
        if x[i] != x[j]
    }
    drifts = [-most, most, *(drift for drift in crossings if abs(drift) < most)]

    def span(drift: Fraction) -> tuple[Fraction, Fraction]:
        return (
            max(value - drift * at for value, at in zip(low, x, strict=True)),
            min(value - drift * at for value, at in zip(high, x, strict=True)),
        )

    width = max(above - below for below, above in map(span, drifts))
    assume(abs(width) > Fraction(1, 100))
    if width < 0 or not clock.comparable:
        assert not clock.comparable
        assert width < 0
        return
    below, above = span(Fraction((clock.drift_ppm or 0.0) * 1e-6))
    assert float(below) - 2 <= clock.low_ns <= clock.offset_ns <= clock.high_ns <= float(above) + 2


def test_doubt_about_the_rank_between_adds_to_that_about_a_rank_beyond_it(tmp_path: Path) -> None:
    first = operation(0, 100, process_group="a", group_ranks=[0, 1])
    second = operation(1000, 50, process_group="b", group_ranks=[1, 2])
    alignment, _ = align(tmp_path, {0: [first], 1: [first, second], 2: [second]})
    # Nobody leaves before the last arrives: rank 1 is within 100 ns of rank 0, rank 2 within 50 of rank 1.
    bounds = {rank: (clock.low_ns, clock.high_ns) for rank, clock in alignment.clocks.items()}
    # Rounding and drift within these 2 us add some ns.
    assert bounds[1] == pytest.approx((-100, 100), abs=5)
    assert bounds[2] == pytest.approx((-150, 150), abs=5)
