"""Communication by group, kind and size, against numbers worked out by hand."""

import polars as pl
import pytest

from chakra_capture.analysis.communication import SUMMARY, communication_summary
from chakra_capture.trace.schema import COLLECTIVES


def rows(*ops: tuple[str, int, int, list[tuple[int | None, int | None]]]) -> pl.DataFrame:
    """Operations ``(collective, bytes, ranks, [(wait, transfer) of each rank])``, one after another."""
    found = []
    for number, (collective, num_bytes, num_ranks, times) in enumerate(ops):
        for rank, (wait, transfer) in enumerate(times):
            start = 1_000_000 * number
            length = None if transfer is None else (wait or 0) + transfer
            found.append({
                "collective_id": number, "rank": rank, "process_group": "0", "mesh_dim": None,
                "collective": collective, "comm_bytes": num_bytes, "num_ranks": num_ranks, "arrival_ns": start,
                "end_ns": None if length is None else start + length, "wait_ns": wait, "transfer_ns": transfer,
            })  # fmt: skip
    return pl.DataFrame(found, schema_overrides=dict(COLLECTIVES.schema))


@pytest.mark.parametrize(
    ("collective", "algorithm", "bus"),
    [
        # 4 ranks, 1000 bytes put in, 100 ns of transfer: 10 bytes a ns.
        ("all_reduce", 10e9, 15e9),  # 2 * 3/4
        ("reduce_scatter", 10e9, 7.5e9),  # 3/4
        ("all_to_all", 10e9, 7.5e9),
        ("all_gather", 40e9, 30e9),  # of the whole 4000 bytes
        ("broadcast", 10e9, 10e9),
        ("send", 10e9, 10e9),
    ],
)
def test_bandwidth_is_of_the_transfer_alone(collective: str, algorithm: float, bus: float) -> None:
    table = communication_summary(rows((collective, 1000, 4, [(50, 100), (0, 100)])))
    row = table.row(0, named=True)
    assert row["algorithm_bytes_per_s"] == pytest.approx(algorithm)
    assert row["bus_bytes_per_s"] == pytest.approx(bus)
    assert (row["count"], row["dur_ns"], row["wait_ns"], row["transfer_ns"]) == (1, 125, 25, 100)
    assert row["total_ns"] == 125  # 150 and 100: each rank spends 125 on average


def test_sizes_between_two_powers_of_two_are_one_class_and_the_longest_comes_first() -> None:
    table = communication_summary(
        rows(
            ("all_reduce", 1024, 2, [(0, 10)]),
            ("all_reduce", 2047, 2, [(0, 10)]),
            ("all_reduce", 2048, 2, [(0, 30)]),
            ("barrier", 0, 2, [(0, 5)]),
        )
    )
    assert table.select("collective", "min_bytes", "max_bytes", "count", "total_ns").rows() == [
        ("all_reduce", 2048, 2048, 1, 30),
        ("all_reduce", 1024, 2047, 2, 20),
        ("barrier", 0, 0, 1, 5),
    ]
    assert table["bus_bytes_per_s"].is_null().to_list() == [False, False, True]


def test_what_was_not_measured_is_null() -> None:
    row = communication_summary(rows(("all_reduce", 8, 2, [(None, None)]))).row(0, named=True)
    assert [row[name] for name in ("dur_ns", "wait_ns", "transfer_ns", "total_ns", "bus_bytes_per_s")] == [None] * 5
    assert row["count"] == 1


def test_run_without_communication_has_an_empty_table() -> None:
    table = communication_summary(COLLECTIVES.schema.to_frame())
    assert (table.height, table.columns) == (0, [column.name for column in SUMMARY])
