"""What torch noted of the collectives of a window, written beside the manifest; and nothing where it does not tell."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from chakra_capture.recording.files import write_json
from chakra_capture.recording.issued import IssuedOperations
from chakra_capture.trace.issued import read_issued


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def recorded(path, work):
    issued = IssuedOperations()
    issued.start()
    work()
    issued.end()
    write_json(path, issued.content)
    return read_issued(path).issued


def test_operations_of_the_window_are_written_with_group_numbers_and_sizes(group, tmp_path):
    dist.all_reduce(torch.ones(3))
    dist.barrier()

    def work():
        dist.all_reduce(torch.ones(5, 2, dtype=torch.float64))
        dist.all_gather_into_tensor(torch.zeros(4), torch.ones(4))

    issued = recorded(tmp_path / "r.json", work)
    assert [(op.name, op.seq, op.op) for op in issued.operations] == [
        ("gloo:all_reduce", 3, 3),
        ("gloo:all_gather", 4, 4),
    ]
    reduce = issued.operations[0]
    assert (reduce.process_group, reduce.description) == (group.group_name, "default_pg")
    assert (reduce.dtype, reduce.in_elements, reduce.out_elements) == ("Double", 10, 10)
    assert issued.start_ns <= reduce.time_ns <= issued.end_ns
    assert [(g.name, g.start, g.end, g.ranks) for g in issued.groups] == [(group.group_name, 2, 4, [0])]
    assert issued.lost is False


def test_nothing_is_noted_without_a_process_group():
    issued = IssuedOperations()
    issued.start()
    issued.end()
    assert issued.content is None


def test_a_torch_that_does_not_tell_costs_the_notes_and_nothing_else(group, monkeypatch):
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda **_: b'{"entries": [{}]}')
    issued = IssuedOperations()
    issued.start()
    issued.end()
    assert issued.content is None
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_distributed_c10d=SimpleNamespace()))
    issued.end()
    assert issued.content is None


def test_a_ring_that_ran_over_says_that_the_first_ones_are_lost(group, monkeypatch, tmp_path):
    issued = IssuedOperations()
    issued.start()
    dist.barrier()
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    entries["entries"] = [{**entries["entries"][-1], "record_id": 2000}]
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda **_: json.dumps(entries).encode())
    issued.end()
    assert issued.content["lost"] is True
    write_json(tmp_path / "r.json", issued.content)
    assert read_issued(tmp_path / "r.json").note == "r.json: torch kept only the last 1 collectives of the window"


@pytest.mark.parametrize("content", [b"", b"{", b'{"operations": [{"name": 1}]}', b"[" * 5000])
def test_damaged_file_costs_what_it_would_have_told(tmp_path, content):
    path = tmp_path / "rank-0.collectives.json"
    path.write_bytes(content)
    found = read_issued(path)
    assert found.issued.operations == []
    assert "rank-0.collectives.json cannot be read" in found.note


@pytest.mark.parametrize("number", [-1, 2**60, 2**70])
@pytest.mark.parametrize("what", ["seq", "op", "in_elements", "out_elements"])
def test_numbers_that_no_group_reaches_make_the_file_useless_not_the_merge(tmp_path, what, number):
    note = {"name": "gloo:all_reduce", "process_group": "0", "time_ns": 5, what: number}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"operations": [note]}))
    found = read_issued(path)
    assert found.issued.operations == []
    assert f"$.operations[0].{what}" in found.note
