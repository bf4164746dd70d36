"""Mending of what torch writes into traces: the parents of what follows an op that raised."""

import json
import threading

import pytest
import torch
from commands import process

from chakra_capture import capture
from chakra_capture.annotations import PROCESS_ROOT, THREAD_ROOT
from chakra_capture.recording.repair import Repairs, repair_host_trace
from recording.loops import work
from recording.recorded import device_ids, entries, host_ids, manifest, read, settings, steps


def fail():
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_op_that_raises_and_is_caught_leaves_no_node_without_a_parent(tmp_path):
    with capture(settings(tmp_path, 1, 4)) as session:
        for step in range(6):
            with session.step(step):
                work()
                if step == 2:
                    fail()

    host, device = tmp_path / "0_chakra/rank-0.json", tmp_path / "0_kineto/rank-0.json"
    assert steps(host) == steps(device) == [1, 2, 3, 4]
    only = device_ids(device) - host_ids(host)
    raised = [e["name"] for e in entries(device) if e.get("args", {}).get("Record function id") in only]
    assert raised == ["aten::matmul", "aten::mm"]  # which the observer never writes
    nodes = {node["id"]: node for node in entries(host)}
    assert [node["name"] for node in nodes.values() if node["ctrl_deps"] not in nodes] == []
    # What the thread begins at the top after the op that raised: its next steps.
    assert manifest(tmp_path)["windows"][0]["repaired_parents"] == 2
    parents = {n["name"]: nodes[n["ctrl_deps"]]["name"] for n in nodes.values() if n["name"].startswith("ProfilerStep")}
    assert set(parents.values()) == {THREAD_ROOT}

    done = process("merge", tmp_path)
    assert (done.code, "salvaged" in done.out) == (0, False), done
    host = read(tmp_path / "0_merged/rank=0/link.json")["windows"][0]["host"]
    assert (host["num_dangling_parents"], host["num_host_only"]) == (0, 0)


def test_ops_that_raise_on_another_thread_are_mended_under_its_own_root(tmp_path):
    def other():
        fail()
        torch.ones(3).sum()

    with capture(settings(tmp_path, 1, 2)) as session:
        for step in range(4):
            with session.step(step):
                work()
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()

    nodes = {node["id"]: node for node in entries(tmp_path / "0_chakra/rank-0.json")}
    assert [node["name"] for node in nodes.values() if node["ctrl_deps"] not in nodes] == []

    def thread_of(node):
        return next(a["value"] for a in node["attrs"] if a["name"] == "tid")

    sums = [node for node in nodes.values() if node["name"] == "aten::sum"]
    assert len({thread_of(node) for node in sums}) == 3
    assert all(thread_of(nodes[node["ctrl_deps"]]) == thread_of(node) for node in sums)
    assert manifest(tmp_path)["windows"][0]["repaired_parents"] == 4  # ones and sum, in two steps


def written(path, *nodes):
    """A host trace as the observer lays it out: (id, name, parent, thread) each."""
    empty = '{"values": [], "shapes": [], "types": [], "strides": []}'
    texts = [
        f'''
      {{
        "id": {number}, "name": "{name}", "ctrl_deps": {parent},
        "inputs": {empty},
        "outputs": {empty},
        "attrs": [{{"name": "tid", "type": "uint64", "value": {thread}}}]
      }}'''
        for number, name, parent, thread in nodes
    ]
    path.write_text('{\n  "nodes": [' + ",".join(texts) + '\n  ],\n  "finish_ts": 1\n}')
    return path


def test_parent_goes_to_the_root_of_the_thread_and_without_one_to_the_process(tmp_path):
    root = (1, PROCESS_ROOT, 1, 0)
    path = written(
        tmp_path / "host.json",
        (20, THREAD_ROOT, 1, 7),
        (22, "kept", 20, 7),
        (24, "lost", 23, 7),
        (26, "lost", 3, 7),  # no room for the number of its thread's root
        (28, "lost", 23, 8),  # a thread without a root
        root,
    )

    assert repair_host_trace(path) == Repairs(names=0, parents=3)
    found = {node["id"]: node["ctrl_deps"] for node in json.loads(path.read_text())["nodes"]}
    assert found == {20: 1, 22: 20, 24: 20, 26: 1, 28: 1, 1: 1}
    assert repair_host_trace(path) == Repairs()
