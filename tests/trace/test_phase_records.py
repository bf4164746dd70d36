"""Phase files read back: whole, cut at any byte, damaged, hostile."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.phase_records import read_phases

OPEN = {"kind": "open", "schema_version": 1, "run_id": "r", "rank": 3, "world_size": 4, "unix_ns": 5, "monotonic_ns": 6}
MEASURES = {"kind": "measures", "phases": {"forward": None, "h2d": "no device"}}
FIRST = {
    "kind": "step", "step": 0, "begin_ns": 100, "ns": 50, "phases": {"forward": [20, 1], "input_wait": [5, 2]},
    "spans": [["input_wait", 0, 5], ["forward", 6, 26]], "gap": {"ns": 7, "phases": {"callbacks": [3, 1]}},
    "flags": ["first", "profiled"], "device_ns": {"forward": 11, "(step)": 40}, "rss_bytes": 1000,
    "batch_size": 16,
}  # fmt: skip
SECOND = {"kind": "step", "step": 1, "begin_ns": 200, "ns": 60, "phases": {}, "spans": [], "device_ns": None}
DROPPED = {"kind": "dropped", "step": 2, "batches": [4, 5], "why": "zeroed"}
CLOSE = {"kind": "close", "unix_ns": 5, "monotonic_ns": 6, "gap": {"ns": 1, "phases": {}}}
ALL = (OPEN, MEASURES, FIRST, SECOND, DROPPED, CLOSE)


def text(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.jsonl"
        path.write_bytes(content)
        return read_phases(path)


def test_every_line_comes_to_its_place():
    found = read(text(*ALL))
    assert (found.rank, found.run_id, found.world_size, found.is_closed) == (3, "r", 4, True)
    assert found.measured == [(0, 0, "forward", None), (0, 0, "h2d", "no device")]
    assert found.dropped == [(2, (4, 5), 2, "zeroed")]
    assert (found.num_unreadable, found.is_cut) == (0, False)
    assert found.steps.rows() == [
        (0, 0, 100, 99, 50, 7, True, True, False, False, 1000, 40, 16),
        (0, 1, 200, 199, 60, None, False, False, False, False, None, None, None),
    ]
    assert found.phases.rows() == [
        (0, False, "forward", 20, 1, 11),
        (0, False, "input_wait", 5, 2, None),
        (0, True, "callbacks", 3, 1, None),
    ]


def test_memory_of_the_device_is_read_where_a_step_says_it():
    said = {"allocated_bytes": 5, "reserved_bytes": 9, "peak_allocated_bytes": 7, "peak_reserved_bytes": 9}
    found = read(text(OPEN, FIRST, {**SECOND, "device_bytes": said}, SECOND))
    assert found.memory.rows() == [(1, 5, 7, 9, None)]


def test_a_second_training_of_the_process_is_a_fit_of_its_own():
    found = read(text(OPEN, FIRST, CLOSE, OPEN, SECOND))
    assert found.steps["fit"].to_list() == [0, 1]
    assert not found.is_closed


def test_an_empty_file_is_a_file_without_steps():
    found = read(b"")
    assert (found.steps.height, found.phases.height, found.is_closed, found.rank) == (0, 0, False, None)


def test_cut_at_any_byte_the_lines_before_it_are_read():
    for at in range(len(text(*ALL)) + 1):
        content = text(*ALL)[:at]
        whole = [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        last = content.rpartition(b"\n")[2]
        found = read(content)
        # A last line of which only the end of line is missing is whole.
        is_last_whole = bool(last) and last == text(ALL[len(whole)])[:-1]
        kinds = [line["kind"] for line in [*whole, *([ALL[len(whole)]] if is_last_whole else [])]]
        assert (at, found.steps.height) == (at, kinds.count("step"))
        assert (at, found.is_cut) == (at, bool(last) and not is_last_whole)
        assert (at, found.num_unreadable) == (at, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"{}", b"[]", b"null", b'{"kind":"other"}', b'{"kind":"step"}', b"\xff\xfe", b"{" * 5000, b"NaN",
        text({**FIRST, "ns": 2**80})[:-1], text({**FIRST, "step": "1"})[:-1],
        text({**FIRST, "ns": -1})[:-1], text({**FIRST, "phases": {"forward": [-1, 1]}})[:-1],
        text({**FIRST, "gap": {"ns": -7, "phases": {}}})[:-1],
        text({**FIRST, "phases": {"forward": [26, 1], "backward": [25, 1]}})[:-1],  # of 50 ns
        text({**FIRST, "gap": {"ns": 7, "phases": {"callbacks": [8, 1]}}})[:-1],
        text({**FIRST, "phases": {f"p{number}": [1, 1] for number in range(66)}})[:-1],
        text({**FIRST, "phases": {"a": [1]}})[:-1],
        text({**FIRST, "gap": 3})[:-1], b'{"kind":"step","step":1e999,"begin_ns":0,"ns":0,"phases":{}}',
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_ours_is_counted_and_costs_itself_alone(line):
    found = read(text(OPEN) + line + b"\n" + text(SECOND))
    assert (found.num_unreadable, found.steps["step"].to_list(), found.is_cut) == (1, [1], False)


def test_what_is_measured_holds_from_the_step_it_is_said_at_and_each_training_says_it_anew():
    forward, none = {"kind": "measures", "phases": {"forward": "replaced"}}, {"kind": "measures", "phases": {}}
    found = read(text(OPEN, MEASURES, FIRST, MEASURES, SECOND, forward, none, OPEN, MEASURES, FIRST))
    assert found.measured == [
        (0, 0, "forward", None), (0, 0, "h2d", "no device"), (0, 2, "forward", "replaced"),
        (1, 2, "forward", None), (1, 2, "h2d", "no device"),
    ]  # fmt: skip


def test_names_without_end_cost_their_lines_and_no_memory():
    lines = [
        {**SECOND, "step": number, "phases": {f"{number}-{at}": [1, 1] for at in range(50)}} for number in range(90)
    ]
    found = read(text(OPEN, *lines, {**SECOND, "phases": {"0-0": [2, 1]}}))
    assert (found.num_unreadable, found.phases["phase"].n_unique()) == (70, 1000)
    assert found.steps["step"].to_list() == [*range(20), 1]


def test_of_batches_that_came_to_nothing_the_first_are_kept_and_all_are_counted():
    assert read(text({**DROPPED, "batches": list(range(5000))})).dropped == [(2, tuple(range(64)), 5000, "zeroed")]


def test_a_long_file_is_read_as_a_short_one():
    num = 100_003  # more than one block of rows
    found = read(text(OPEN) + b"".join(text({**SECOND, "step": number}) for number in range(num)))
    assert found.steps["step"].to_list() == list(range(num))


def test_a_line_without_an_end_is_not_held_in_memory():
    found = read(text(OPEN, FIRST) + b"x" * (5 << 20) + b"\n" + text(SECOND))
    assert (found.num_unreadable, found.steps["step"].to_list()) == (1, [0, 1])


@given(st.binary(max_size=400))
def test_no_content_raises(content):
    assert read(content).steps.height <= content.count(b"step")


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(TraceFileError, match="cannot be read: No such file"):
        read_phases(Path("no/rank-0.jsonl"))
