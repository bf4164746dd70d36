"""Reading the communication of all ranks: many small tables at a time, large ones one by one, to the same end."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from planted import operation, write_ranks

from chakra_capture.merge.across import run_operations
from chakra_capture.merge.across.run_operations import Operations, read_operations


def ranks() -> dict[int, list[dict[str, Any]]]:
    """Ranks that have windows, names and members of groups, cut files and sizes in ways of their own."""
    cut = [operation(0, 5, window=1, ts_ns=None, dur_ns=None), operation(9, 5, window=1), operation(4, 5, window=1)]
    unnamed = [operation(n, 1, process_group=None, group_ranks=members) for n, members in enumerate(([0, 2], [], None))]
    late = [operation(0, 1), operation(1, 1, group_ranks=[3, 4]), operation(2, 1, mesh_dim="tp", comm_bytes=1 << 40)]
    return {0: cut, 1: [], 2: unnamed, 3: late, 4: [operation(0, 1, group_ranks=[4, -1]), *cut]}


def plain(found: Operations) -> list[dict[str, Any]]:
    """The operations with their kinds and groups written out."""
    rows = found.rows.hstack(found.kinds[found.rows["kind"]]).drop("kind").rows(named=True)
    return [{**row, "group": found.groups[row["group"]]} for row in rows]


def test_ranks_read_together_are_as_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = write_ranks(tmp_path, ranks())
    together = read_operations(folders, 5)
    monkeypatch.setattr(run_operations, "_TOGETHER_BYTES", 0)
    alone = read_operations(folders, 5)
    assert plain(together) == plain(alone)
    assert together.groups == alone.groups
    assert together.num_rows == alone.num_rows == {0: 3, 1: 0, 2: 3, 3: 3, 4: 4}


def test_rows_are_by_rank_and_in_order_of_issue_and_have_the_groups_their_rank_states(tmp_path: Path) -> None:
    found = read_operations(write_ranks(tmp_path, ranks()), 5)
    told = [(row["rank"], row["node_id"], row["placed"], row["group"].members) for row in plain(found)]
    assert told == [
        *((0, node, placed, None) for node, placed in ((2, True), (1, True), (0, False))),
        *((2, node, True, members) for node, members in enumerate(((0, 2), (0, 1, 2, 3, 4), None))),
        *((3, node, True, (3, 4)) for node in range(3)),
        (4, 0, True, (3, 4)),  # its own list is none, another rank states it
        *((4, node, placed, (3, 4)) for node, placed in ((3, True), (2, True), (1, False))),
    ]
    assert found.rows.filter(pl.col("equal_bytes") == 1 << 40)["rank"].to_list() == [3]
