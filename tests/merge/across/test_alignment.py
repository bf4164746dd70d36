"""The tables of a run across its ranks; times by hand, in nanoseconds."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from planted import MS, START, US, Job, align, operation, write_ranks

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.across.alignment import align_run
from chakra_capture.merge.across.outcome import RunFacts
from chakra_capture.trace.schema import COLLECTIVES

WORLD = {"group_ranks": [0, 1, 2]}
HERE = dict.fromkeys(range(4), "one")


def times(table: pl.DataFrame) -> list[tuple[Any, ...]]:
    return table.select("rank", "wait_ns", "transfer_ns", "skew_ns", "last_rank").rows()


def test_all_wait_for_the_last_one_in_a_synchronising_operation(tmp_path: Path) -> None:
    rows = {rank: [operation(at, 1000 - at, **WORLD)] for rank, at in enumerate((100, 700, 300))}
    _, table = align(tmp_path, rows, hosts=HERE)
    assert times(table) == [(0, 600, 300, 600, 1), (1, 0, 300, 600, 1), (2, 400, 300, 600, 1)]
    assert table["arrival_ns"].to_list() == [START + 100, START + 700, START + 300]
    assert table.schema == COLLECTIVES.schema


def test_a_receiver_of_a_broadcast_waits_for_the_root_alone_and_the_root_while_it_is_there(tmp_path: Path) -> None:
    both = WORLD | {"collective": "broadcast", "root": 0}
    rows = {0: [operation(300, 200, **both)], 1: [operation(100, 450, **both)], 2: [operation(900, 50, **both)]}
    _, table = align(tmp_path, rows, hosts=HERE)
    assert times(table) == [(0, 200, 0, 800, 2), (1, 200, 250, 800, 2), (2, 0, 50, 800, 2)]


def test_the_root_of_a_reduce_waits_for_all(tmp_path: Path) -> None:
    both = WORLD | {"collective": "reduce", "root": 0}
    rows = {0: [operation(100, 900, **both)], 1: [operation(700, 50, **both)], 2: [operation(0, 60, **both)]}
    _, table = align(tmp_path, rows, hosts=HERE)
    assert times(table) == [(0, 600, 300, 700, 1), (1, 0, 50, 700, 1), (2, 60, 0, 700, 1)]


def test_a_receiver_waits_for_its_sender_and_a_sender_while_it_is_sending(tmp_path: Path) -> None:
    pairs = [(0, 400, 300, 900), (1000, 50, 1500, 30)]
    zero = [operation(at, dur, collective="send", peer=1, **WORLD) for at, dur, _, _ in pairs]
    one = [operation(at, dur, collective="recv", peer=0, **WORLD) for _, _, at, dur in pairs]
    _, table = align(tmp_path, {0: zero, 1: one}, hosts=HERE)
    assert times(table) == [(0, 300, 100, 300, 1), (1, 0, 900, 300, 1), (0, 50, 0, 500, 1), (1, 0, 30, 500, 1)]


def test_nothing_is_said_of_waits_where_a_member_is_not_recorded(tmp_path: Path) -> None:
    rows = {rank: [operation(rank * 100, 500, **WORLD)] for rank in (0, 1)}
    alignment, table = align(tmp_path, rows, world_size=3, hosts=HERE)
    assert times(table) == [(0, None, None, None, None), (1, None, None, None, None)]
    assert alignment.missing_ranks == (2,)
    assert alignment.groups[0]["missing_ranks"] == [2]
    assert (table["num_ranks"].to_list(), table["num_found"].to_list()) == ([3, 3], [2, 2])


def test_of_members_that_no_trace_states_the_waits_are_among_those_recorded(tmp_path: Path) -> None:
    rows = {rank: [operation(rank * 100, 500 - rank * 100, group_ranks=None)] for rank in (0, 1)}
    alignment, table = align(tmp_path, rows, world_size=4, hosts=HERE)
    assert times(table) == [(0, 100, 400, 100, 1), (1, 0, 400, 100, 1)]
    assert "of a process group whose members no trace states" in alignment.notes[-1]


def test_operations_are_numbered_in_the_order_in_which_the_first_rank_arrives(tmp_path: Path) -> None:
    rows = [operation(at, 10, process_group=name, group_ranks=[0]) for at, name in ((500, "a"), (100, "b"), (900, "a"))]
    _, table = align(tmp_path, {0: rows})
    assert table["node_id"].to_list() == [1, 0, 2]
    assert table["collective_id"].to_list() == [0, 1, 2]
    assert table["wait_ns"].to_list() == [0, 0, 0]


def test_what_stands_in_alignment_json_is_what_was_found(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, Job(ranks=2, offsets_ns={1: MS}).rows(), world_size=1)
    written = json.loads((tmp_path / layout.ALIGNMENT_FILE).read_text())
    assert written == json.loads(json.dumps(alignment.as_json()))
    assert written["extra_ranks"] == [1]
    assert written["clocks"]["1"]["comparable"] is True


def test_ranks_whose_tables_are_missing_or_damaged_are_named_and_the_others_used(tmp_path: Path) -> None:
    folders = write_ranks(tmp_path, Job(ranks=5).rows())
    file = folders[3] / layout.COMMUNICATION_FILE
    file.write_bytes(file.read_bytes()[:-200])
    pl.DataFrame({"window": ["none"]}).write_parquet(folders[4] / layout.COMMUNICATION_FILE)
    folders[7] = tmp_path / "rank=7"
    alignment = align_run(tmp_path, folders, RunFacts())
    assert alignment.ranks == (0, 1, 2)
    assert list(alignment.unreadable) == [3, 4, 7]
    assert all(why.startswith("communication.parquet cannot be used: ") for why in alignment.unreadable.values())
    table = pl.read_parquet(tmp_path / layout.COLLECTIVES_FILE)
    assert table["num_found"].unique().to_list() == [3]


@pytest.mark.parametrize("ranks", [{}, {0: []}, {0: [], 5: []}])
def test_a_run_without_communication_has_an_empty_table(tmp_path: Path, ranks: dict[int, list[Any]]) -> None:
    alignment, table = align(tmp_path, ranks)
    assert (table.height, table.schema) == (0, COLLECTIVES.schema)
    assert alignment.notes == tuple(f"rank {rank} recorded no communication" for rank in ranks)


def test_a_copy_of_another_rank_is_named_and_not_compared(tmp_path: Path) -> None:
    rows = Job(ranks=3).rows()
    alignment, table = align(tmp_path, rows | {2: rows[1]})
    reason = alignment.clocks[2].reason
    assert reason == "its times are those of rank 1, to the ns: one of them is a copy"
    assert [rank for rank, clock in alignment.clocks.items() if clock.comparable] == []
    assert table["wait_ns"].null_count() == table.height


def test_hostile_numbers_end_in_nulls_not_in_errors(tmp_path: Path) -> None:
    most, least = (1 << 63) - 1, -(1 << 63)
    rows = [
        operation(0, 5, ts_ns=value, dur_ns=other, peer=value, tag=other, root=value, seq=other, step=value, window=0)
        | {"collective": name, "comm_bytes": value, "in_bytes": other, "group_ranks": members}
        for value in (most, least, 0)
        for other in (least, most, 7)
        for name in ("send", "recv", "all_reduce", "broadcast", "", None)
        for members in ([0, 1], [], [0, most], [least], None)
    ]
    _, table = align(tmp_path, {0: rows, 1: rows[::-1]})
    assert table.height == 2 * len(rows)
    for name in ("wait_ns", "transfer_ns", "skew_ns"):
        assert (table[name].drop_nulls() >= 0).all()


def test_many_process_groups_are_told_apart(tmp_path: Path) -> None:
    rows = {
        r: [operation(n * MS + r * US, US, process_group=str(n), group_ranks=[0, 1]) for n in range(300)]
        for r in (0, 1)
    }
    alignment, table = align(tmp_path, rows, hosts=HERE)
    assert len(alignment.groups) == 300
    assert table["num_found"].unique().to_list() == [2]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    folders = write_ranks(tmp_path, Job(ranks=2, steps=1).rows())
    with pytest.raises(TraceFileError, match="cannot be written: No such file or directory"):
        align_run(tmp_path / "none", folders, RunFacts())


def test_no_wait_is_stated_of_ranks_whose_clocks_fit_no_line(tmp_path: Path) -> None:
    # The first operation says that clock 1 is some 10 ms ahead, the others that it is not.
    starts = [0, *(20 * MS * number for number in range(1, 6))]
    zero = [operation(at, 100 * US, seq=n, group_ranks=[0, 1]) for n, at in enumerate(starts)]
    one = [
        operation(at + (10 * MS if not n else 0), 100 * US, seq=n, group_ranks=[0, 1]) for n, at in enumerate(starts)
    ]
    alignment, table = align(tmp_path, {0: zero, 1: one})
    assert alignment.clocks[1].reason is not None
    assert table["num_found"].to_list() == [2] * 12
    for column in ("wait_ns", "transfer_ns", "skew_ns", "last_rank"):
        assert table[column].null_count() == 12


def test_nobody_need_wait_for_everybody_in_an_uneven_all_to_all(tmp_path: Path) -> None:
    # Rank 0 leaves before rank 1 arrives, as it may if it gets nothing from it; if all give alike it cannot.
    def exchange(ts: int, size: int) -> dict[str, Any]:
        sizes = {"in_bytes": size, "out_bytes": size, "comm_bytes": size}
        return operation(ts, 100, collective="all_to_all", group_ranks=[0, 1], **sizes)

    later = operation(10_000, 100, group_ranks=[0, 1])
    for size, offset in ((50, 0), (100, None)):
        rows = {0: [exchange(0, 100), later], 1: [exchange(1000, size), later]}
        alignment, _ = align(tmp_path / str(size), rows, hosts=HERE)
        assert alignment.clocks[1].offset_ns == offset
