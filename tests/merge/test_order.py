"""Linking by call order, where the traces have no record-function ids in common."""

from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.errors import PairingError

NONE = {"Record function id": 0}


def without_ids(names: str, *, start: int = 0, builder: TraceBuilder | None = None, sequence: int = -1) -> TraceBuilder:
    """One op per letter, 10 us each, on both sides; the device side has no record-function ids."""
    built = builder or TraceBuilder()
    for at, letter in enumerate(names):
        more = {"Sequence number": sequence + at} if sequence >= 0 else {}
        number = 1 + len(built.events)
        built.op(letter, start + 10 * at, 8, **NONE, **{"External id": number}, **more)
    return built


def repeated(names: str, times: int, *, host_iteration: int, sequence: bool) -> TraceBuilder:
    """The same ops several times on the device side, one of these iterations on the host side."""
    built = TraceBuilder()
    for turn in range(times):
        before = len(built.nodes)
        number = len(names) * turn if sequence else -1
        without_ids(names, start=1000 * turn, builder=built, sequence=number)
        if turn != host_iteration:
            del built.nodes[before:]
    return built


def linked(trace: TraceBuilder, folder: Path) -> list[int]:
    """Starts, us, of the device rows that host nodes are linked to."""
    rows = trace.merged(folder).nodes.drop_nulls(["host_id", "ts_ns"]).sort("host_id")
    return [ts // 1000 for ts in rows["ts_ns"]]


def test_ops_are_linked_in_their_order(tmp_path: Path) -> None:
    assert linked(without_ids("abcab"), tmp_path) == [0, 10, 20, 30, 40]


def test_sequence_numbers_tell_which_iteration_the_host_trace_is(tmp_path: Path) -> None:
    trace = repeated("abc", 5, host_iteration=3, sequence=True)
    assert linked(trace, tmp_path) == [3000, 3010, 3020]
    order = trace.merged(tmp_path / "again").link["windows"][0]["pairing"]["call_order"]
    assert (order["num_occurrences"], order["num_sequence_equal"], order["num_sequence_compared"]) == (5, 3, 3)


def test_without_sequence_numbers_the_first_iteration_is_taken_and_their_number_said(tmp_path: Path) -> None:
    trace = repeated("abc", 4, host_iteration=2, sequence=False)
    assert linked(trace, tmp_path) == [0, 10, 20]
    assert trace.merged(tmp_path / "again").link["windows"][0]["pairing"]["call_order"]["num_occurrences"] == 4


def test_other_ops_are_another_program(tmp_path: Path) -> None:
    trace = without_ids("abcab")
    for node in trace.nodes:
        node["name"] = "x" + node["name"]
    with pytest.raises(PairingError, match="by call order only 0 of 5 host ops have a counterpart"):
        trace.merged(tmp_path)


def test_equal_times_are_ordered_by_external_id(tmp_path: Path) -> None:
    trace = TraceBuilder()
    # A short op, then a longer one that begins in the same microsecond: not the order of (start, -duration).
    trace.op("short", 0, 0, **NONE, **{"External id": 1}).op("long", 0, 9, **NONE, **{"External id": 2})
    nodes = trace.merged(tmp_path).nodes.drop_nulls(["host_id", "ts_ns"]).sort("host_id")
    assert nodes["name"].to_list() == ["short", "long"]


def test_op_that_only_the_host_side_records_breaks_no_run(tmp_path: Path) -> None:
    trace = without_ids("ab")
    trace.op("## process_group:init ##", 1, 1, **NONE)
    del trace.events[-1]
    trace.nodes.insert(1, trace.nodes.pop())
    # 2 of 3 are below the rate that makes a pair, so it takes force; what matches is linked all the same.
    with pytest.raises(PairingError, match="only 2 of 3 host ops"):
        trace.merged(tmp_path)
    trace = without_ids("abcdefghijklmnop")
    trace.op("## process_group:init ##", 1, 1, **NONE)
    del trace.events[-1]
    trace.nodes.insert(1, trace.nodes.pop())
    assert linked(trace, tmp_path / "long") == [10 * at for at in range(16)]
