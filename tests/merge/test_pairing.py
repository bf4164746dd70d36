"""Files that are no pair are refused, and why is said; merged by force they say it in link.json."""

from collections.abc import Callable
from pathlib import Path

import pytest
from builder import TraceBuilder, merge_files

from chakra_capture.errors import PairingError
from chakra_capture.trace.discovery import WindowFiles


def ten_ops() -> TraceBuilder:
    trace = TraceBuilder(rank=0)
    for number in range(10):
        trace.op(f"op{number}", 10 * number, 5, **{"Sequence number": 100 + number})
    return trace


def other_pid(trace: TraceBuilder) -> None:
    trace.host_pid = 4242


def other_rank(trace: TraceBuilder) -> None:
    trace.rank, trace.world_size = 1, 2


def other_ids(trace: TraceBuilder) -> None:
    for node in trace.nodes:
        node["rf"] += 1000


def other_names(trace: TraceBuilder) -> None:
    for node in trace.nodes[:2]:
        node["name"] = "renamed"


def other_sequence_numbers(trace: TraceBuilder) -> None:
    for node in trace.nodes:
        node["seq"] += 50


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (other_pid, "different process: host trace of pid 4242, device trace of pid 100"),
        (other_rank, "different rank: rank 0 expected, device trace of rank 1"),
        (other_ids, "different window: no record-function id of the host trace is in the device trace"),
        (
            other_names,
            "different program: of the record-function ids in both files only 8 of 10 have the same name",
        ),
        (other_sequence_numbers, "different run: 10 of 10 sequence numbers differ"),
    ],
)
def test_files_of_two_runs_are_refused(change: Callable[[TraceBuilder], None], fault: str, tmp_path: Path) -> None:
    trace = ten_ops()
    change(trace)
    files = WindowFiles(trace.write_host(tmp_path / "h.json"), trace.write_device(tmp_path / "d.json"))
    with pytest.raises(PairingError) as refused:
        merge_files(tmp_path / "out", files)
    assert f" are not a pair: {fault}. " in str(refused.value)
    assert not (tmp_path / "out").exists()
    pairing = merge_files(tmp_path / "out", files, force=True).link["windows"][0]["pairing"]
    assert (pairing["forced"], pairing["faults"]) == (True, [fault])


def test_a_pair_has_no_fault(tmp_path: Path) -> None:
    pairing = ten_ops().merged(tmp_path).link["windows"][0]["pairing"]
    assert (pairing["forced"], pairing["faults"]) == (False, [])
    compared = ("num_ids_common", "num_names_equal", "num_sequence_numbers_compared", "num_sequence_numbers_equal")
    assert [pairing[key] for key in compared] == [10, 10, 10, 10]
