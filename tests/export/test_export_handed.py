"""Exports of the handed cases, read by the independent walk."""

import pytest
from commands import run
from handed import CASES, require

from chakra_capture.export.et_schema import CollectiveType
from export.exported import PROFILES, exported, merged, merged_case, ranks_of, walked
from export.feeder_walk import COLL, COMP, METADATA, defects, in_order, longest_path_us, without_successor


def rank_of(folder):
    (rank,) = ranks_of(folder).values()
    return rank


@pytest.mark.parametrize("profile", PROFILES)
def test_case_043_collectives_are_device_nodes_with_type_size_group_and_time(tmp_path, profile):
    exported(merged_case(tmp_path / "m", "043-collective-nodes-and-sizes"), tmp_path / "et", profile)
    rank = rank_of(tmp_path / "et")
    nodes = rank.communication
    assert [(CollectiveType(node.attrs["comm_type"]).name, node.attrs["comm_size"]) for node in nodes] == [
        ("BROADCAST", 40),
        ("ALL_REDUCE", 4096),
        ("ALL_GATHER", 1024),
    ]
    assert {node.type for node in nodes} == {COLL}
    assert {node.on_cpu for node in nodes} == {False}
    assert {node.attrs["pg_name"] for node in nodes} == {"1"}
    assert sum(node.duration_us for node in nodes) == 180
    wrappers = [node for node in rank.nodes if node.name.startswith(("nccl:", "record_param_comms"))]
    assert wrappers
    assert all(node.type in (COMP, METADATA) and node.on_cpu for node in wrappers)
    walked(tmp_path / "et", full=profile == "full")


@pytest.mark.parametrize("profile", PROFILES)
def test_case_044_streams_are_chained_and_the_collective_waits_for_the_other_stream(tmp_path, profile):
    exported(merged_case(tmp_path / "m", "044-gpu-stream-order-edges"), tmp_path / "et", profile)
    rank = rank_of(tmp_path / "et")
    device = [node for node in rank.nodes if "stream" in node.attrs and node.type != METADATA]
    stream_of = {node.id: node.attrs["stream"] for node in device}
    chain = [node for node in device if node.attrs["stream"] == 7]
    assert [part for part, node in zip(("Memcpy HtoD", "_tn", "_nn", "multi_tensor_apply"), chain, strict=True)
            if part in node.name] == ["Memcpy HtoD", "_tn", "_nn", "multi_tensor_apply"]  # fmt: skip
    edges = [(dep, node.id) for node in device for dep in node.deps if dep in stream_of]
    assert sum(stream_of[src] == stream_of[dst] == 7 for src, dst in edges) == 3
    assert [(src, dst) for src, dst in edges if stream_of[src] != stream_of[dst]] == [(chain[-1].id, device[-1].id)]
    assert device[-1].type == COLL
    assert [node.id for node in device if not node.deps & stream_of.keys()] == [chain[0].id]
    assert len(in_order(rank)) == len(rank.nodes)
    assert without_successor(rank) == []
    by_id = rank.by_id
    assert all(by_id[dep].start_us <= node.start_us for node in rank.nodes for dep in node.deps)


@pytest.mark.parametrize(
    "schema", ["1.0.1", "1.0.2", "1.0.3", "1.1.0", "1.1.1-chakra.0.0.4", "1.1.1-chakra.1.0.0", "1.9.0"]
)
def test_case_033_host_trace_of_any_schema_alone_has_no_times_and_says_so(tmp_path, schema):
    (path,) = require(CASES / "033-et-schema-variants").glob(f"{schema}*.json")
    done = run("export", "et", merged(tmp_path / "m", host=path), "-o", tmp_path / "et")
    assert done.code == 1
    assert "nothing in window 0 that took time" in done.err
    assert done.out == ""
    assert [*(tmp_path / "et").iterdir()] == []


def test_case_041_deep_host_trace_alone_is_refused_without_recursion(tmp_path):
    path = require(CASES / "041-deep-nesting" / "et.json.gz")
    done = run("export", "et", merged(tmp_path / "m", host=path), "-o", tmp_path / "et")
    assert done.code == 1
    assert "Merge it with its device trace" in done.err


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("case", "host"),
    [
        ("034-no-record-function-ids", "et.json"),
        ("035-missing-thread-root", "a.json"),
        ("035-missing-thread-root", "b.json"),
        ("036-cyclic-ctrl-deps", "et.json"),
        ("046-kineto-has-more-steps-than-et", "et.json"),
        ("048-rank-and-pid-mismatch", "et-rank-0.json"),
    ],
)
def test_odd_host_traces_leave_no_dangling_or_circular_dependency(tmp_path, case, host, profile):
    folder = require(CASES / case)
    devices = {"034": "zero.json", "048": "kineto-rank-1.json"}
    device = folder / devices.get(case[:3], "kineto.json")
    exported(merged(tmp_path / "m", host=folder / host, device=device), tmp_path / "et", profile)
    rank = rank_of(tmp_path / "et")
    assert defects(rank) == []
    assert without_successor(rank) == []
    walked(tmp_path / "et", full=profile == "full")
    work = [node for node in rank.nodes if node.type != METADATA]
    span = max(one.start_us + one.duration_us for one in work) - min(one.start_us for one in work)
    assert longest_path_us(rank) <= span


def test_case_046_device_time_of_steps_without_host_trace_is_exported(tmp_path):
    exported(merged_case(tmp_path / "m", "046-kineto-has-more-steps-than-et"), tmp_path / "et")
    rank = rank_of(tmp_path / "et")
    assert sum(node.duration_us for node in rank.nodes if not node.on_cpu) == 1040
    assert rank.head["steps"] == [3, 4]
