"""Roots added for parents that a host trace names and does not hold."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import TraceBuilder, assert_table, merge_files, write_json

from chakra_capture.errors import TraceFileError
from chakra_capture.merge.rank import merge_rank
from chakra_capture.merge.report import MergeOptions
from chakra_capture.merge.roots import add_roots
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.host import read_host_trace


def host_file(folder: Path, **parents: int) -> Path:
    """Ops a (3), b (4) and c (5) of two threads under the thread root 2 and the process root 1, with other parents."""
    content = TraceBuilder().op("a", 0, 9).op("b", 10, 9).op("c", 20, 9).host_dict()
    for node in content["nodes"]:
        node["ctrl_deps"] = parents.get(node["name"], node["ctrl_deps"])
        if node["name"] == "c":
            next(attr for attr in node["attrs"] if attr["name"] == "tid")["value"] = 2
    return write_json(folder / "h.json", content)


def test_one_root_for_each_thread_under_the_process_root_of_the_file(tmp_path: Path) -> None:
    trace = merge_files(tmp_path / "out", WindowFiles(host_file(tmp_path, a=77, b=78, c=99), None))
    names = trace.nodes.select(pl.col("node_id").alias("parent_id"), pl.col("host_id").alias("under"))
    shown = trace.nodes.join(names, on="parent_id", how="left").sort("host_id")
    assert_table(
        shown.select("kind", "host_id", "under", "repaired", "step"),
        """
        kind,host_id,under,repaired,step
        process,1,,False,
        thread,2,1,False,
        host_op,3,77,False,
        host_op,4,77,False,
        host_op,5,99,False,
        thread,77,1,True,
        thread,99,1,True,
        """,
    )
    assert shown.filter("repaired")["args"].unique().to_list() == [
        '{"host":{"inputs":{"values":[]},"outputs":{"values":[]}}}'
    ]


def test_host_trace_whose_parents_are_all_there_stays_as_it_is(tmp_path: Path) -> None:
    host = read_host_trace(host_file(tmp_path))
    assert add_roots(host) is host
    assert not host.salvage


def test_missing_ids_are_named_up_to_ten(tmp_path: Path) -> None:
    content = TraceBuilder().host_dict()
    ops: list[dict[str, Any]] = [
        {**content["nodes"][0], "id": 100 + n, "name": "x", "ctrl_deps": 200 + n} for n in range(12)
    ]
    content["nodes"] += ops
    host = add_roots(read_host_trace(write_json(tmp_path / "h.json", content)))
    assert (host.added.num_nodes, host.added.num_roots) == (12, 1)
    assert host.added.missing_parents == tuple(range(200, 210))
    (note,) = host.salvage.notes
    assert "208, 209 ...), nodes put under added roots: 12" in note


def test_two_threads_that_name_one_missing_parent_get_roots_of_their_own(tmp_path: Path) -> None:
    host = add_roots(read_host_trace(host_file(tmp_path, b=50, c=50)))
    assert host.added.num_roots == 2
    assert len(set(host.node_id[:].tolist())) == host.num_nodes


def test_thread_root_that_names_a_missing_process_goes_under_the_process_root_of_the_file(tmp_path: Path) -> None:
    content = TraceBuilder().op("a", 0, 9).host_dict()
    content["nodes"][0]["ctrl_deps"] = 99  # the thread root 2; the process root is 1
    host = add_roots(read_host_trace(write_json(tmp_path / "h.json", content)))
    assert dict(zip(host.node_id[:].tolist(), host.parent[:].tolist(), strict=True))[2] == 1
    assert (host.added.num_nodes, host.added.num_roots, host.added.missing_parents) == (1, 0, (99,))


def test_strict_refuses_a_host_trace_that_lacks_a_parent(tmp_path: Path) -> None:
    files = WindowFiles(host_file(tmp_path, a=77), None)
    with pytest.raises(TraceFileError, match="parents that are not in the file"):
        merge_rank(0, [files], tmp_path / "out", MergeOptions(strict=True))


def test_added_root_has_no_inputs_and_outputs_where_every_node_of_the_file_has_some(tmp_path: Path) -> None:
    content = TraceBuilder().op("a", 0, 9).host_dict()
    for node in content["nodes"]:
        node["inputs"] = node["outputs"] = {"values": [7], "shapes": [[2]], "types": ["Int"], "strides": [[1]]}
        node["ctrl_deps"] = 50 if node["name"] == "a" else node["ctrl_deps"]
    nodes = merge_files(tmp_path / "out", WindowFiles(write_json(tmp_path / "h.json", content), None)).nodes
    added = nodes.filter("repaired").select("host_id", "input_shapes", "input_types", "args").rows()
    assert added == [(50, None, None, '{"host":{"inputs":{"values":[]},"outputs":{"values":[]}}}')]
    (args,) = nodes.filter(pl.col("host_id") == 3)["args"]
    assert json.loads(args)["host"]["inputs"] == {"values": [7], "strides": [[1]]}


@pytest.mark.parametrize("named", [0, 99])
def test_process_root_that_names_a_missing_parent_is_the_root_all_the_same(tmp_path: Path, named: int) -> None:
    content = TraceBuilder().op("a", 0, 9).host_dict()
    for node in content["nodes"]:
        if node["id"] == 1:
            node["ctrl_deps"] = named
    nodes = merge_files(tmp_path / "out", WindowFiles(write_json(tmp_path / "h.json", content), None)).nodes
    names = dict(nodes.select("node_id", "name").iter_rows())
    parents = {name: names.get(parent) for name, parent in nodes.select("name", "parent_id").iter_rows()}
    process, thread = (f"[pytorch|profiler|execution_trace|{root}]" for root in ("process", "thread"))
    assert parents == {process: None, thread: process, "a": thread}
