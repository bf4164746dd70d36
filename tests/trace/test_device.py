import json
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder, write_json

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.device import DeviceTrace, read_device_trace
from chakra_capture.trace.scanners import ScannerKind


def read(path: Path, content: Any) -> DeviceTrace:
    return read_device_trace(write_json(path / "d.json", content))


def event(**changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 10, "dur": 5, "args": {}, **changes}


def test_slices_and_instants_are_rows_and_all_else_is_counted(tmp_path: Path) -> None:
    others = [{"ph": p, "cat": "ac2g", "name": "f", "pid": 1, "tid": 1, "ts": 1, "id": 3} for p in "sfMC"]
    trace = read(tmp_path, {"traceEvents": [event(), *others, event(ph="i", dur=None, name="mark")]})
    assert (trace.num_rows, trace.num_events) == (2, 6)
    assert trace.categories == {"cpu_op": 2, "ac2g": 4}
    assert trace.dur_ns.tolist() == [5000, 0]


def test_args_with_a_column_are_taken_out_and_the_rest_kept(tmp_path: Path) -> None:
    args = {
        "External id": 5, "Record function id": 0, "correlation": 9, "Sequence number": 3, "device": 0, "stream": "0x0",
        "Input Dims": [[2, 3]], "Input type": ["float"], "grid": [1, 1, 1], "busy": 1.50,
    }  # fmt: skip
    trace = read(tmp_path, {"traceEvents": [event(args=args)]})
    assert {key: values[:].tolist() for key, values in trace.ids.items()} == {
        "external_id": [5], "record_function_id": [MISSING], "correlation_id": [9], "sequence_number": [3],
        "device": [0], "stream": [MISSING],
    }  # fmt: skip
    assert json.loads(trace.input_shapes[0] or "") == [[2, 3]]
    assert json.loads(trace.input_types[0] or "") == ["float"]
    assert json.loads(trace.args[0] or "") == {"stream": "0x0", "grid": [1, 1, 1], "busy": 1.5}


@pytest.mark.parametrize("key", ["External id", "external id", "External Id"])
def test_every_spelling_of_the_external_id_is_read(key: str, tmp_path: Path) -> None:
    assert read(tmp_path, {"traceEvents": [event(args={key: 7})]}).ids["external_id"][:].tolist() == [7]


@pytest.mark.parametrize(
    ("changes", "ts", "dur", "bad", "negative"),
    [
        ({"ts": "12.5", "dur": "3"}, 12500, 3000, 0, 0),
        ({"dur": -1}, 10000, MISSING, 0, 1),
        ({"dur": None}, 10000, MISSING, 1, 0),
        ({"dur": 0}, 10000, 0, 0, 0),
        ({"ts": None}, MISSING, 5000, 1, 0),
        ({"ts": "NaN"}, MISSING, 5000, 1, 0),
        ({"ts": [1, 2]}, MISSING, 5000, 1, 0),
        ({"dur": 9e15}, 10000, MISSING, 1, 0),
        ({"dur": 2**53 / 1000}, 10000, 2**53, 0, 0),  # 104 days
        ({"dur": (2**53 + 1000) / 1000}, 10000, MISSING, 1, 0),
    ],
)
def test_times_that_cannot_be_are_missing_and_counted(
    changes: dict[str, Any], ts: int, dur: int, bad: int, negative: int, tmp_path: Path
) -> None:
    trace = read(tmp_path, {"traceEvents": [event(**changes), event()]})
    assert trace.ts_ns.tolist() == [ts, 10000]
    assert trace.dur_ns.tolist() == [dur, 5000]
    assert (trace.num_bad_times, trace.num_negative_durations) == (bad, negative)


def test_bare_infinity_and_nan_do_not_cost_the_event(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    first = json.dumps(event(args={"v": 1})).replace('"v": 1', '"v": NaN, "w": -Infinity')
    path.write_text(f'{{"traceEvents": [{first}, {json.dumps(event(ts=0)).replace(": 0", ": Infinity")}]}}')
    trace = read_device_trace(path)
    assert trace.ts_ns.tolist() == [10000, MISSING]
    assert json.loads(trace.args[0] or "") == {"v": "NaN", "w": "-Infinity"}
    assert trace.salvage


@pytest.mark.parametrize(
    ("pid", "tid"), [("Spans", "PyTorch Profiler"), (2**63, -(2**70)), ("²", ""), (None, 1.5), (float(2**80), [1])]
)
def test_pid_and_tid_that_are_no_numbers_are_missing(pid: Any, tid: Any, tmp_path: Path) -> None:
    events = [event(), event(pid=pid, tid=None if isinstance(tid, list) else tid)]
    trace = read(tmp_path, {"traceEvents": events})
    assert (trace.pid[:].tolist(), trace.tid[:].tolist()) == ([1, MISSING], [2, MISSING])


def test_events_of_wrong_shape_are_skipped_and_counted(tmp_path: Path) -> None:
    wrong = [event(cat=3), event(args=[1]), event(ph=7), event(name={"a": 1})]
    trace = read(tmp_path, {"traceEvents": [*wrong, event(name="good")]})
    assert [trace.name[row] for row in range(trace.num_rows)] == ["good"]
    assert trace.salvage.elements_lost == 4
    assert trace.salvage.causes["event with a field of a wrong type skipped"].count == 4


def test_bare_array_of_events_is_a_trace(tmp_path: Path) -> None:
    assert read(tmp_path, [event()]).num_rows == 1


def test_base_time_and_rank_stand_in_a_cut_file_too(tmp_path: Path) -> None:
    whole = TraceBuilder(rank=3, world_size=8, base_ns=1_790_857_026_000_000_000).op("a", 5, 1).op("b", 7, 1)
    path = whole.write_device(tmp_path / "d.json")
    path.write_bytes(path.read_bytes()[:-150])
    trace = read_device_trace(path)
    assert trace.ts_ns.tolist() == [1_790_857_026_000_005_000]
    assert trace.rank == 3
    assert any("truncated at byte" in note for note in trace.salvage.notes)


@pytest.mark.parametrize("rank", [-3, 2**70])
def test_rank_out_of_range_is_none(rank: int, tmp_path: Path) -> None:
    assert read(tmp_path, {"distributedInfo": {"rank": rank}, "traceEvents": [event()]}).rank is None


@pytest.mark.parametrize(
    "text", ["3", '"x"', "null", "{}", '{"traceEvents": 3}', '{"nodes": []}', "[1, 2]", "\x00\x01", "<html>"]
)
def test_what_is_no_device_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(TraceFileError, match="is no device trace"):
        read_device_trace(path)


METADATA = {"ph": "M", "name": "process_name", "pid": 1, "args": {}}
MARK = {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "pid": "Traces", "tid": "Trace", "ts": 1, "s": "g"}
OWN_SPAN = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1, "dur": 9}


@pytest.mark.parametrize("events", [[], [METADATA], [METADATA, MARK], [METADATA, MARK, OWN_SPAN]])
def test_trace_without_work_events_is_refused(events: list[Any], tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=f"holds no work events: none of its {len(events)} events is an op"):
        read(tmp_path, {"traceEvents": events})


def test_deep_args_cost_only_their_event(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    deep = json.dumps(event(args={"v": 0})).replace(": 0", ": " + "[" * 100_000 + "]" * 100_000)
    path.write_text(f'{{"traceEvents": [\n{deep},\n{json.dumps(event(name="good"))}]}}')
    for scanner in ScannerKind:
        trace = read_device_trace(path, scanner=scanner)
        assert [trace.name[row] for row in range(trace.num_rows)] == ["good"]
        assert trace.salvage.notes == ["event nested deeper than 1000 skipped (at byte 18)"]
