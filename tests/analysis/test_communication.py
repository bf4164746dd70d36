"""Communication by group, kind and size, against numbers worked out by hand."""

import json
from collections import defaultdict

import polars as pl
import pytest
from builder import TraceBuilder
from commands import run
from handed import DATA, load_json, require

from chakra_capture.analysis.communication import SUMMARY, communication_statistics, communication_summary
from chakra_capture.trace.schema import COLLECTIVES


def rows(*ops: tuple[str, int, int, list[tuple[int | None, int | None]]]) -> pl.DataFrame:
    """Operations ``(collective, bytes, ranks, [(wait, transfer) of each rank])``, one after another."""
    found = []
    for number, (collective, num_bytes, num_ranks, times) in enumerate(ops):
        for rank, (wait, transfer) in enumerate(times):
            start = 1_000_000 * number
            length = None if transfer is None else (wait or 0) + transfer
            found.append({
                "collective_id": number, "rank": rank, "node_id": number, "process_group": "0", "mesh_dim": None,
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


def kernels_of(table: pl.DataFrame) -> pl.DataFrame:
    return pl.DataFrame(schema=dict.fromkeys(("rank", "node_id", "kernel_ns", "exposed_ns"), pl.Int64))


def test_groups_of_one_mesh_dimension_are_summed_up_together() -> None:
    # Two groups of tp with two ranks each, and one of dp; each operation takes 10 (dp: 30) ns on each rank.
    table = rows(
        ("all_reduce", 1000, 2, [(0, 10), (0, 10)]),
        ("all_gather", 500, 2, [(0, 10), (0, 10)]),
        ("all_reduce", 1000, 2, [(10, 20), (0, 30)]),
    ).with_columns(
        mesh_dim=pl.Series(["tp", "tp", "tp", "tp", "dp", "dp"]),
        process_group=pl.Series(["1", "1", "2", "2", "0", "0"]),
        rank=pl.Series([0, 1, 2, 3, 0, 2], dtype=pl.Int64),
    )
    by_dimension = communication_statistics(table, kernels_of(table), by=["dimension"])
    columns = ("process_group", "mesh_dim", "collective", "num_ranks", "min_bytes", "max_bytes", "count", "total_ns")
    assert by_dimension.select(columns).rows() == [
        ("0", "dp", "all_reduce", 2, 1000, 1000, 1, 30), (None, "tp", None, 2, 500, 1000, 2, 10),
    ]  # fmt: skip
    by_both = communication_statistics(table, kernels_of(table), by=["dimension", "operation"])
    assert by_both.select("mesh_dim", "collective", "count", "total_ns").rows() == [
        ("dp", "all_reduce", 1, 30), ("tp", "all_reduce", 1, 10), ("tp", "all_gather", 1, 10),
    ]  # fmt: skip
    (whole,) = communication_statistics(table, kernels_of(table), by=[]).to_dicts()
    assert (whole["count"], whole["mesh_dim"], whole["num_ranks"]) == (3, None, 2)


def test_of_a_rank_alone_the_shortest_operation_bounds_time_and_bandwidth() -> None:
    # 4 ranks, of which one is recorded: it takes 200, 100 and 400 ns, and 50 for half of the bytes.
    table = rows(
        *[("all_reduce", 1000, 4, [(None, ns)]) for ns in (200, 100, 400)], ("all_reduce", 600, 4, [(None, 50)])
    )
    table = table.with_columns(wait_ns=pl.lit(None, dtype=pl.Int64), transfer_ns=pl.lit(None, dtype=pl.Int64))
    columns = ("min_bytes", "max_bytes", "bus_bytes_per_s", "least_ns", "bound_bus_bytes_per_s")
    found = communication_statistics(table, kernels_of(table)).select(columns).rows()
    # 1000 and 600 bytes are one class: 600 bytes in 50 ns are 12 bytes/ns, times 2 * 3/4.
    assert found == [(600, 1000, None, 50, pytest.approx(18e9))]
    alone = communication_statistics(table.head(3), kernels_of(table)).select(columns).rows()
    assert alone == [(1000, 1000, None, 100, pytest.approx(15e9))]


def test_bandwidth_of_the_only_rank_of_the_twin_is_that_of_its_shortest_kernels(merged) -> None:
    trace = require(DATA / "pairs" / "resnet50_ddp_twin" / "device" / "rank-0.json.gz")
    best: dict[tuple[str, int], float] = defaultdict(float)
    for event in load_json(trace)["traceEvents"]:
        if event.get("cat") == "kernel" and "Collective name" in event["args"]:
            args = event["args"]
            size = args["In msg nelems"] * {"Float": 4, "Long": 8}[args["dtype"]]
            # Of two ranks bus and algorithm bandwidth are one: 2 * 1/2 for all_reduce, 1 for broadcast.
            key = args["Collective name"].replace("allreduce", "all_reduce"), size.bit_length()
            best[key] = max(best[key], size * 1e6 / float(event["dur"]))
    rows = json.loads(run("analyze", "communication", merged("pairs/resnet50_ddp_twin"), "--json").out)["rows"]
    found = {(row["collective"], row["max_bytes"].bit_length()): row["bound_bus_bytes_per_s"] for row in rows}
    assert found == {key: pytest.approx(rate, rel=1e-6) for key, rate in best.items()}
    assert {row["bus_bytes_per_s"] for row in rows} == {None}
    # As the study of this trace gives them: 31.5, 9.7 and 8.2 MB, and broadcasts of 0.2 MB.
    assert sorted(round(rate / 1e9, 1) for rate in found.values())[1:] == [3.3, 5.8, 7.3, 13.0]
    shown = run("analyze", "communication", merged("pairs/resnet50_ddp_twin")).out
    assert "bus from" in shown
    assert "13.0 GB/s" in shown


def test_the_command_sums_up_dimensions_of_the_mesh(tmp_path) -> None:
    trace = TraceBuilder(rank=0, world_size=4).step(1, 0, 200)
    for number, (ts, dur, group, dim) in enumerate([(10, 20, "1", "tp"), (40, 30, "1", "tp"), (80, 40, "2", "dp")]):
        said = {
            "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
            "Group size": 2, "Process Group Name": group, "Process Group Description": f"mesh_{dim}",
            "Process Group Ranks": "[0, 1]",
        }  # fmt: skip
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
        trace.launched(name, ts, dur, number + 1, at=ts - 5, **said)
    folder = trace.write(tmp_path)
    shown = json.loads(run("analyze", "communication", folder, "--by", "dimension", "--json").out)
    columns = ("mesh_dim", "process_group", "count", "total_ns", "bound_bus_bytes_per_s")
    assert [tuple(row[name] for name in columns) for row in shown["rows"]] == [
        ("tp", "1", 2, 50_000, pytest.approx(4000 / 20e-6)), ("dp", "2", 1, 40_000, pytest.approx(4000 / 40e-6)),
    ]  # fmt: skip
    assert " tp " in run("analyze", "communication", folder, "--by", "dimension", "operation").out
