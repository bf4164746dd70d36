"""Which operations of several ranks are one; expectations by hand, or from a matcher of plain dictionaries."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import MS, US, align, operation

Rows = list[dict[str, Any]]


def series(*sizes: int, at: int = 0, **columns: Any) -> Rows:
    """All_reduces of these sizes, one each millisecond."""
    return [
        operation((at + n) * MS, 100 * US, comm_bytes=size, group_ranks=[0, 1], **columns)
        for n, size in enumerate(sizes)
    ]


def later(rows: Rows, by: int = 10 * US) -> Rows:
    """The same operations on a rank that arrives later; equal times would be those of a copy."""
    return [row | {"ts_ns": row["ts_ns"] + by} for row in rows]


def found(table: pl.DataFrame) -> list[list[tuple[int, int]]]:
    """Rank and node of every operation."""
    grouped = table.group_by("collective_id", maintain_order=True).agg("rank", "node_id")
    return [list(zip(ranks, nodes, strict=True)) for _, ranks, nodes in grouped.iter_rows()]


def mismatches(table: pl.DataFrame) -> list[str | None]:
    return table.unique("collective_id", maintain_order=True)["mismatch"].to_list()


def test_operations_of_a_group_are_matched_in_order_of_issue(tmp_path: Path) -> None:
    alignment, table = align(tmp_path, {0: series(4, 8), 1: series(4, 8)})
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert table["num_ranks"].to_list() == table["num_found"].to_list() == [2] * 4
    assert mismatches(table) == [None, None]
    assert alignment.groups[0]["matched_by"] == "order"


def test_sequence_numbers_match_a_rank_that_starts_recording_later(tmp_path: Path) -> None:
    first = [row | {"seq": 7 + n} for n, row in enumerate(series(4, 4, 4))]
    alignment, table = align(tmp_path, {0: first, 1: first[1:]})
    assert found(table) == [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1)]]
    assert mismatches(table) == ["not recorded on rank 1", None, None]
    assert alignment.groups[0] == {
        "process_group": "0",
        "mesh_dim": None,
        "ranks": [0, 1],
        "missing_ranks": [],
        "matched_by": "seq",
        "num_operations": 3,
        "num_matched": 2,
        "num_incomplete": 1,
        "num_mismatches": 0,
        "first_mismatch": None,
    }


def test_an_operation_that_one_rank_lacks_between_others_is_a_mismatch(tmp_path: Path) -> None:
    first = [row | {"seq": n} for n, row in enumerate(series(4, 4, 4))]
    alignment, table = align(tmp_path, {0: first, 1: [first[0], first[2]]})
    assert mismatches(table) == [None, "lacking on rank 1", None]
    assert alignment.groups[0]["first_mismatch"] == "process group 0: operation with seq 1 is lacking on rank 1"


LARGE = 1 << 31


@pytest.mark.parametrize("column", ["comm_bytes", "seq", "step", "window", "node_id", "host_node_id"])
def test_numbers_beyond_32_bits_are_matched_and_written_as_they_are(tmp_path: Path, column: str) -> None:
    large = LARGE - 1 if column == "window" else LARGE  # a window is a number of 32 bits
    first = [operation(n * MS, 100 * US, **{"seq": n, column: n}, group_ranks=[0, 1]) for n in (1, large - 1, large)]
    # Only one of the ranks has the large one.
    alignment, table = align(tmp_path, {0: first, 1: later(first[:2])})
    assert table.filter(rank=0).sort("arrival_ns")[column].to_list() == [1, large - 1, large]
    assert table.filter(rank=1).sort("arrival_ns")[column].to_list() == [1, large - 1]
    assert alignment.num_matched == 2


def test_sizes_that_differ_by_4_gib_are_a_mismatch(tmp_path: Path) -> None:
    _, table = align(tmp_path, {0: series(4), 1: later(series(4 + (1 << 32)))})
    assert mismatches(table) == ["all_reduce of 4 B on rank 0, all_reduce of 4294967300 B on rank 1"]


def test_coalesced_operations_that_share_a_sequence_number_keep_their_order(tmp_path: Path) -> None:
    rows = [row | {"seq": 3} for row in series(4, 8)]
    _, table = align(tmp_path, {0: rows, 1: rows})
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert mismatches(table) == [None, None]


def test_sequence_numbers_that_begin_anew_in_a_later_window_are_told_apart(tmp_path: Path) -> None:
    rows = [row | {"seq": n % 2, "window": n // 2} for n, row in enumerate(series(4, 4, 8, 8))]
    _, table = align(tmp_path, {0: rows, 1: rows})
    assert found(table) == [[(0, n), (1, n)] for n in range(4)]


def test_windows_that_begin_at_different_steps_are_matched_from_the_first_common_step(tmp_path: Path) -> None:
    first = [row | {"step": 5 + n // 2} for n, row in enumerate(series(4, 4, 4, 4, 4, 4))]
    _, table = align(tmp_path, {0: first, 1: first[2:]})
    assert found(table)[:3] == [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)]]
    assert table.filter(pl.col("num_found") == 2)["collective_id"].n_unique() == 4


def test_windows_are_one_where_their_steps_overlap_whatever_their_numbers(tmp_path: Path) -> None:
    early = [row | {"step": 1} for row in series(4, 4)]
    late = [row | {"step": 9, "window": 1} for row in series(8, 8, at=50)]
    alone = [row | {"window": 0} for row in late]
    _, table = align(tmp_path, {0: early + late, 1: alone})
    assert found(table) == [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)], [(0, 3), (1, 1)]]
    assert mismatches(table) == ["not recorded on rank 1"] * 2 + [None] * 2


def test_windows_without_steps_are_matched_by_their_number(tmp_path: Path) -> None:
    rows = [row | {"window": n} for n, row in enumerate(series(4, 8))]
    _, table = align(tmp_path, {0: rows, 1: rows})
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_the_first_difference_of_a_group_is_named(tmp_path: Path) -> None:
    first = series(4096, 4096, 4096, mesh_dim="tp", process_group="1")
    other = [dict(row) for row in first]
    other[1] |= {"collective": "all_gather", "comm_bytes": 8192, "in_bytes": 8192, "out_bytes": 8192}
    alignment, table = align(tmp_path, {0: first, 1: later(other)})
    said = "all_reduce of 4096 B on rank 0, all_gather of 8192 B on rank 1"
    assert mismatches(table) == [None, said, None]
    assert alignment.groups[0]["first_mismatch"] == f"process group 1 (tp): operation 1 is {said}"
    # Nothing says which of them was lost: no wait of any of them is stated.
    assert table["wait_ns"].null_count() == 6
    assert alignment.groups[0]["num_matched"] == 0


def test_a_difference_is_confined_to_the_steps_it_may_reach(tmp_path: Path) -> None:
    steps = [row | {"step": n // 2} for n, row in enumerate(series(4, 4, 4, 4, 4, 4))]
    other = [dict(row) for row in steps]
    other[2]["comm_bytes"] = 8
    _, table = align(tmp_path, {0: steps, 1: later(other)})
    assert mismatches(table)[2] == "all_reduce of 4 B on rank 0, all_reduce of 8 B on rank 1"
    assert table["wait_ns"].is_null().to_list() == [False] * 4 + [True] * 4 + [False] * 4


def test_an_operation_lost_among_equal_ones_shows_by_its_step_and_no_wait_is_stated(tmp_path: Path) -> None:
    steps = [row | {"step": n // 2} for n, row in enumerate(series(4, 4, 4, 4, 4, 4))]
    alignment, table = align(tmp_path, {0: steps, 1: later([*steps[:3], *steps[4:]])})
    assert mismatches(table)[3] == "all_reduce of 4 B in step 1 on rank 0, all_reduce of 4 B in step 2 on rank 1"
    assert table["wait_ns"].is_null().to_list() == [False] * 4 + [True] * 7
    assert alignment.groups[0]["num_matched"] == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "int64"}, "all_reduce of 4 B of float32 on rank 0, all_reduce of 4 B of int64 on rank 1"),
        ({"root": 1}, None),
        ({"dtype": None, "comm_bytes": None}, None),
    ],
)
def test_what_only_one_rank_states_is_no_difference(tmp_path: Path, changed: Rows, said: str | None) -> None:
    _, table = align(tmp_path, {0: series(4), 1: [series(4)[0] | changed]})
    assert mismatches(table) == [said]


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter", "gather", "barrier"])
def test_sizes_that_may_differ_by_rank_are_no_difference(tmp_path: Path, collective: str) -> None:
    mine = {"collective": collective, "comm_bytes": 4, "in_bytes": 4, "out_bytes": 12}
    other = {"collective": collective, "comm_bytes": 8, "in_bytes": 8, "out_bytes": 12}
    if collective in ("gather", "reduce_scatter"):
        other |= {"comm_bytes": 4, "in_bytes": 4, "out_bytes": 0}
    _, table = align(tmp_path, {0: [series(4)[0] | mine], 1: [series(4)[0] | other]})
    assert mismatches(table) == [None]


def test_different_roots_are_named(tmp_path: Path) -> None:
    rows = [series(4)[0] | {"collective": "broadcast", "root": root} for root in (0, 1)]
    _, table = align(tmp_path, {0: rows[:1], 1: rows[1:]})
    assert mismatches(table) == ["broadcast of 4 B with root 0 on rank 0, broadcast of 4 B with root 1 on rank 1"]


UNSURE = "which operation of the other ranks it is cannot be told"


def test_without_steps_a_rank_with_fewer_operations_is_put_where_alone_they_fit(tmp_path: Path) -> None:
    first = series(4, 8, 16, 4, 8)
    _, table = align(tmp_path, {0: first, 1: later(first[2:4])})
    assert found(table) == [[(0, 0)], [(0, 1)], [(0, 2), (1, 0)], [(0, 3), (1, 1)], [(0, 4)]]
    assert mismatches(table) == ["not recorded on rank 1"] * 2 + [None] * 2 + ["not recorded on rank 1"]


def test_without_steps_operations_that_fit_in_several_places_are_matched_with_none(tmp_path: Path) -> None:
    first = series(4, 8, 4, 8)
    alignment, table = align(tmp_path, {0: first, 1: later(first[:2])})
    assert sorted(found(table)) == [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 3)], [(1, 0)], [(1, 1)]]
    assert mismatches(table) == [UNSURE] * 6
    assert alignment.num_matched == 0
    assert not alignment.clocks[1].comparable


def test_without_steps_the_first_difference_is_named_where_no_place_fits(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, {0: series(4, 8, 16, 32), 1: later(series(4, 16, 32))})
    assert alignment.groups[0]["first_mismatch"] == (
        "process group 0: operation 1 is all_reduce of 8 B on rank 0, all_reduce of 16 B on rank 1"
    )


def test_a_rank_whose_window_marks_no_steps_is_not_put_at_its_end(tmp_path: Path) -> None:
    first = [row | {"step": 5 + n} for n, row in enumerate(series(4, 8, 16))]
    late = [row | {"step": 6 + n} for n, row in enumerate(later(series(8, 16), by=MS))]
    members = {"group_ranks": [0, 1, 2]}
    rows = {0: first, 1: late, 2: later(series(4, 8, 16), by=20 * US)}
    _, table = align(tmp_path, {rank: [row | members for row in each] for rank, each in rows.items()})
    assert found(table) == [[(0, 0), (2, 0)], [(0, 1), (1, 0), (2, 1)], [(0, 2), (1, 1), (2, 2)]]


def test_operations_whose_time_is_lost_are_matched_with_none_and_do_not_shift_the_others(tmp_path: Path) -> None:
    first = [row | {"issued_ns": row["ts_ns"], "step": n} for n, row in enumerate(series(4, 8, 16, 32))]
    lost = first[3] | {"issued_ns": None, "ts_ns": None, "dur_ns": None, "step": None}
    not_linked = later(first[2:3])[0] | {"issued_ns": None, "step": None}
    _, table = align(tmp_path, {0: first, 1: [lost, not_linked, *later(first[:2])]})
    assert found(table) == [[(0, 0), (1, 2)], [(0, 1), (1, 3)], [(0, 2), (1, 1)], [(0, 3)], [(1, 0)]]
    assert mismatches(table) == [None, None, None, "not recorded on rank 1", UNSURE]
    assert table["order"].to_list() == [0, 0, 1, 1, 2, 2, 3, None]


def test_where_no_operation_has_a_time_their_order_stands(tmp_path: Path) -> None:
    rows = [row | {"ts_ns": None, "dur_ns": None} for row in series(4, 8)]
    _, table = align(tmp_path, {0: series(4, 8), 1: rows})
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def message(kind: str, at: int, peer: int | None, **columns: Any) -> dict[str, Any]:
    return operation(at * MS, 50 * US, collective=kind, peer=peer, **columns)


def test_sends_and_receives_are_matched_by_source_destination_and_tag(tmp_path: Path) -> None:
    world = {"group_ranks": [0, 1, 2]}
    zero = [
        message("send", 0, 1, tag=5, **world),
        message("send", 1, 1, tag=6, **world),
        message("recv", 2, 2, **world),
    ]
    one = [message("recv", 0, 0, tag=6, **world), message("recv", 1, 0, tag=5, **world)]
    two = [message("send", 2, 0, **world)]
    _, table = align(tmp_path, {0: zero, 1: one, 2: two})
    assert sorted(found(table)) == [[(0, 0), (1, 1)], [(0, 1), (1, 0)], [(0, 2), (2, 0)]]
    assert mismatches(table) == [None] * 3
    assert table["num_ranks"].to_list() == [2] * 6


def test_a_peer_that_is_not_stated_is_the_only_other_member_or_nobody(tmp_path: Path) -> None:
    two, three = {"group_ranks": [0, 1]}, {"group_ranks": [0, 1, 2], "process_group": "1"}
    zero = [message("send", 0, None, **two), message("send", 1, None, **three)]
    one = [message("recv", 0, None, **two), message("recv", 1, None, **three)]
    _, table = align(tmp_path, {0: zero, 1: one, 2: []})
    assert sorted(found(table)) == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)]]
    assert table.filter(pl.col("num_found") == 1)["wait_ns"].null_count() == 2


def test_members_that_a_rank_does_not_state_are_those_of_the_only_group_of_this_name(tmp_path: Path) -> None:
    unknown = [row | {"group_ranks": None} for row in series(4)]
    alignment, table = align(tmp_path, {0: series(4), 1: unknown})
    assert found(table) == [[(0, 0), (1, 0)]]
    assert [group["ranks"] for group in alignment.groups] == [[0, 1]]


def test_groups_of_one_name_with_other_members_are_not_mixed(tmp_path: Path) -> None:
    rows = {rank: [row | {"group_ranks": [rank // 2 * 2, rank // 2 * 2 + 1]} for row in series(4)] for rank in range(4)}
    _, table = align(tmp_path, rows)
    assert sorted(found(table)) == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]


def test_operations_of_no_named_group_are_matched_among_those_that_have_them_and_it_is_said(tmp_path: Path) -> None:
    rows = [row | {"group_ranks": None, "process_group": None} for row in series(4, 4)]
    alignment, table = align(tmp_path, {0: rows, 3: rows}, world_size=4)
    assert found(table) == [[(0, 0), (3, 0)], [(0, 1), (3, 1)]]
    assert table["num_ranks"].null_count() == 4
    assert any("matched as those of one group" in note for note in alignment.notes)
    assert alignment.missing_ranks == (1, 2)


def test_a_list_of_members_without_the_rank_itself_is_not_believed(tmp_path: Path) -> None:
    alignment, _ = align(tmp_path, {0: [row | {"group_ranks": [1, -5]} for row in series(4)], 1: series(4)})
    assert [group["ranks"] for group in alignment.groups] == [[0, 1]]


# A matcher of plain dictionaries and lists, for one window without steps.
def plain_matches(ranks: dict[int, Rows]) -> set[frozenset[tuple[int, int]]]:
    sets = set()
    for group in {row["process_group"] for rows in ranks.values() for row in rows}:
        mine = {
            rank: [
                (node, row["seq"], row["comm_bytes"]) for node, row in enumerate(rows) if row["process_group"] == group
            ]
            for rank, rows in ranks.items()
        }
        mine = {rank: entries for rank, entries in mine.items() if entries}
        operations = defaultdict(set)
        if all(seq is not None for entries in mine.values() for _, seq, _ in entries):
            for rank, entries in mine.items():
                for at, (node, seq, _) in enumerate(entries):
                    operations[seq, [s for _, s, _ in entries[:at]].count(seq)].add((rank, node))
        else:
            sizes = {rank: [size for *_, size in entries] for rank, entries in mine.items()}
            longest = max(sizes.values(), key=len)
            places = {
                rank: [at for at in range(len(longest)) if longest[at : at + len(mine)] == mine]
                for rank, mine in sizes.items()
            }
            uneven = len({len(each) for each in sizes.values()}) > 1
            differ = any(len(each) == len(longest) and each != longest for each in sizes.values())
            unsure = uneven and (differ or any(len(found) > 1 for found in places.values()))
            for rank, entries in mine.items():
                first = (places[rank] or [0])[0] if uneven else 0
                for at, (node, *_) in enumerate(entries):
                    operations[(rank, at) if unsure else first + at].add((rank, node))
        sets |= {frozenset(members) for members in operations.values()}
    return sets


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, 1, 2, 3]),
        st.sampled_from([4, 8]),
        st.integers(-(10**18), 10**18),
    ),
    max_size=6,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, 3), ROWS, max_size=4))
def test_any_small_run_is_matched_as_plain_dictionaries_match_it(
    tmp_path: Path, runs: dict[int, list[tuple[str, int | None, int, int]]]
) -> None:
    ranks = {
        rank: [
            operation(ts, 100, process_group=group, seq=seq, comm_bytes=size, group_ranks=[0, 1, 2, 3])
            for group, seq, size, ts in rows
        ]
        for rank, rows in runs.items()
    }
    alignment, table = align(tmp_path, ranks)
    assert {frozenset(members) for members in found(table)} == plain_matches(ranks)
    assert table.height == sum(map(len, ranks.values()))
    sizes = {(rank, node): row["comm_bytes"] for rank, rows in ranks.items() for node, row in enumerate(rows)}
    for (_, mismatch), members in zip(
        table.unique("collective_id", maintain_order=True).select("collective_id", "mismatch").iter_rows(),
        found(table),
        strict=True,
    ):
        assert ("of 8 B" in (mismatch or "")) == (len({sizes[member] for member in members}) > 1)
    assert alignment.num_operations == len(found(table))
    assert (table["wait_ns"].drop_nulls() >= 0).all()
    assert (table["transfer_ns"].drop_nulls() >= 0).all()


def numbered(*sizes: int, **columns: Any) -> Rows:
    return [row | {"seq": 5 + n} for n, row in enumerate(series(*sizes, **columns))]


def barrier(at: int, group: str | None) -> dict[str, Any]:
    """A monitored barrier, which torch does not number."""
    return operation(
        at * MS, 100 * US, collective="barrier", comm_bytes=0, process_group=group, group_ranks=group and [0, 1]
    )


def test_a_barrier_without_a_number_among_numbered_operations_costs_nothing_but_itself(tmp_path: Path) -> None:
    first = [*numbered(4, 8), barrier(2, "0"), *numbered(16, at=3)]
    first[3]["seq"] = 7
    other = [*first[:2], barrier(2, None), first[3]]
    alignment, table = align(tmp_path, {0: first, 1: later(other)})
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)], [(1, 2)], [(0, 3), (1, 3)]]
    told = "which operation of the other ranks it is cannot be told"
    assert mismatches(table) == [None, None, told, told, None]
    assert [(g["matched_by"], g["num_matched"], g["first_mismatch"]) for g in alignment.groups] == [
        ("seq", 3, None),
        ("order", 0, None),
    ]
    assert alignment.num_matched == 3
    assert alignment.notes == ("process groups of 1 operations are not told, and of others are: matched with none",)


def test_an_operation_without_a_group_may_be_the_one_that_its_rank_seems_to_lack(tmp_path: Path) -> None:
    first = numbered(4, 8, 16)
    nameless = first[1] | {"process_group": None, "group_ranks": None, "seq": None}
    alignment, table = align(tmp_path, {0: first, 1: later([first[0], nameless, first[2]])})
    assert [group["num_mismatches"] for group in alignment.groups] == [0, 0]
    assert found(table) == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)], [(0, 2), (1, 2)]]


def test_order_of_issue_matches_nothing_on_a_rank_with_operations_whose_group_nothing_tells(tmp_path: Path) -> None:
    first = [row | {"step": 1} for row in series(4, 4, 4)]
    nameless = first[1] | {"process_group": None, "group_ranks": None}
    alignment, table = align(tmp_path, {0: first, 1: later([first[0], nameless, first[2]])})
    assert alignment.num_matched == 0
    assert [group["num_mismatches"] for group in alignment.groups] == [0, 0]
    assert (table["num_found"] == 1).all()
    assert table["wait_ns"].null_count() == table.height


def test_an_operation_of_one_rank_whose_members_nothing_tells_is_not_found_on_all_of_them(tmp_path: Path) -> None:
    alone = [row | {"process_group": None, "group_ranks": None} for row in series(4)]
    alignment, _ = align(tmp_path, {0: alone, 1: []})
    assert (alignment.num_operations, alignment.num_matched) == (1, 0)
    assert alignment.groups[0]["num_incomplete"] == 1


def test_a_rank_that_lost_the_time_of_an_operation_is_not_said_to_differ_from_the_others_after_it(
    tmp_path: Path,
) -> None:
    first = [row | {"step": 1} for row in series(4, 8, 16, 32)]
    # The file of rank 1 was cut: of its second operation the host trace alone is there.
    lost = first[1] | {"ts_ns": None, "dur_ns": None, "issued_ns": None, "step": None}
    alignment, table = align(tmp_path, {0: first, 1: [*later([first[0], first[2]]), lost]})
    assert [(group["num_mismatches"], group["first_mismatch"]) for group in alignment.groups] == [(0, None)]
    assert table["wait_ns"].null_count() == table.height
    told = "which operation of the other ranks it is cannot be told"
    assert table.filter(rank=1, node_id=1)["mismatch"].to_list() == [told]


def test_numbers_that_begin_anew_in_a_later_window_are_matched_within_it(tmp_path: Path) -> None:
    def row(window: int, seq: int) -> dict[str, Any]:
        return operation((100 * window + seq) * MS, 100 * US, window=window, seq=seq, group_ranks=[0, 1])

    zero = [row(0, 1), row(0, 2), row(1, 1), row(1, 2)]
    one = [row(0, 2), row(1, 1), row(1, 2)]  # its first window begins later
    alignment, table = align(tmp_path, {0: zero, 1: one}, hosts={0: "one", 1: "one"})
    found = table.group_by("collective_id", maintain_order=True).agg("rank", "window", "seq")
    assert found.select("rank", "window", "seq").rows() == [
        ([0], [0], [1]),
        ([0, 1], [0, 0], [2, 2]),
        ([0, 1], [1, 1], [1, 1]),
        ([0, 1], [1, 1], [2, 2]),
    ]
    assert alignment.groups[0]["matched_by"] == "seq"
