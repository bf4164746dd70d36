"""Every handed trace merges through the command line; what comes out is checked against an independent reader.

The numbers in the tables below were counted with plain ``json.loads`` (see ``oracle``), not with the product.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from commands import Outcome, refused, run
from handed import DATA, SAMPLES, expected_breakdown, load_json, require
from oracle import ACTIVITIES, DeviceFile, Row, union_length


class Counts(NamedTuple):
    """Events and rows (slices and instants) of a device file, its activities, and how many can be linked."""

    events: int
    rows: int
    kernels: int
    memcpys: int
    memsets: int
    launched: int
    parented: int

    @property
    def activities(self) -> int:
        return self.kernels + self.memcpys + self.memsets


DEVICE_ONLY = {
    "h100_bert_small": Counts(2551, 2298, 60, 1, 0, launched=61, parented=61),
    "h100_qwen_0_5b_chat": Counts(18221, 14532, 1465, 1, 241, launched=1198, parented=1198),
    "hta_alexnet_critical_path": Counts(1408, 870, 79, 16, 3, launched=98, parented=98),
    "hta_cpu_only": Counts(30, 18, 0, 0, 0, launched=0, parented=0),
    "hta_event_sync": Counts(92, 35, 4, 1, 0, launched=5, parented=4),
    "hta_event_sync_multi_stream": Counts(149, 59, 3, 0, 3, launched=6, parented=6),
    "hta_mi250_minitoy": Counts(220, 115, 14, 2, 0, launched=16, parented=16),
    "hta_ns_resolution": Counts(68692, 45422, 4350, 1600, 145, launched=6095, parented=6095),
    "hta_rank_non_gpu": Counts(2467, 2467, 0, 0, 0, launched=0, parented=0),
    "hta_sampled_two_ranks_0": Counts(4855, 4811, 1154, 40, 10, launched=1204, parented=1204),
    "hta_sampled_two_ranks_1": Counts(4720, 4676, 1104, 40, 10, launched=1154, parented=1154),
    "hta_simple_add_critical_path": Counts(1348, 840, 79, 16, 3, launched=98, parented=98),
    "hta_trace_diff_control": Counts(109123, 74939, 8568, 228, 654, launched=9450, parented=9450),
    "hta_triton": Counts(71, 10, 1, 0, 0, launched=1, parented=1),
    # GPU rows and launch calls, but not one CPU op: nothing can be a parent.
    "mi210_gpu_only": Counts(2443, 1196, 562, 0, 0, launched=562, parented=0),
    "mi300_qwen_0_5b_chat": Counts(18090, 14806, 1516, 1, 0, launched=1054, parented=1054),
    "torch_compile_triton": Counts(246, 117, 12, 0, 0, launched=12, parented=12),
    "vllm_decode_cuda_graph": Counts(1993, 1539, 425, 9, 0, launched=434, parented=434),
}

# host nodes, then the device file
PAIRS = {
    ("dlrm_8gpu_by_order", 0): (1675, Counts(3290, 2462, 245, 16, 0, launched=261, parented=261)),
    ("dlrm_8gpu_by_order", 1): (1675, Counts(3424, 2529, 310, 16, 0, launched=262, parented=262)),
    ("dlrm_8gpu_by_order", 2): (1675, Counts(3268, 2451, 246, 16, 0, launched=262, parented=262)),
    ("dlrm_8gpu_by_order", 3): (1675, Counts(3474, 2554, 315, 16, 6, launched=273, parented=273)),
    ("linear_one_of_40_iterations", 0): (931, Counts(86859, 61952, 8716, 0, 1640, launched=10356, parented=10356)),
    ("simple_add_by_order", 0): (38, Counts(111, 58, 4, 0, 0, launched=4, parented=4)),
}

# file: schema, pid, nodes, root nodes, nodes of process groups, record_param_comms
HOST_ONLY = {
    "gpt2_schema_1.1.0": ("1.1.0-chakra.0.0.4", 512643, 27156, 3, 0, 0),
    "pt2_schema_1.1.1": ("1.1.1-chakra.0.0.4", 793657, 20, 2, 0, 0),
    "resnet_1gpu_schema_1.1.1": ("1.1.1-chakra.0.0.4", 177708, 14392, 3, 1, 27),
    "resnet_2gpu_schema_1.1.0": ("1.1.0-chakra.0.0.4", 2254958, 14392, 3, 1, 27),
    "small_schema_1.0.2": ("1.0.2-chakra.0.0.4", 788625, 263, 2, 1, 20),
}

# host file, device file, nodes, nodes with an id that both files have, names of the others (roots aside)
GROUP = "## process_group:init ##"
PROFILER = ("[pytorch|profiler|execution_trace|process]", "[pytorch|profiler|execution_trace|thread]")
REAL_PAIRS = [
    ("single_rank/0_chakra/rank-0.json.gz", "single_rank/0_kineto/rank-0.json", 677, 675),
    ("single_rank_shapes/0_chakra/rank-0.json.gz", "single_rank_shapes/0_kineto/rank-0.json", 677, 675),
    ("grad_accum3/0_chakra/rank-0.json.gz", "grad_accum3/0_kineto/rank-0.json", 1148, 1146),
    ("with_stack/0_chakra/rank-0.json.gz", "with_stack/0_kineto/rank-0.json.gz", 452, 450),
    ("profile_memory/0_chakra/rank-0.json.gz", "profile_memory/0_kineto/rank-0.json", 452, 450),
    ("ddp2_gloo/rank-0.chakra.json.gz", "ddp2_gloo/rank-0.kineto.json", 720, 717),
    ("ddp2_gloo/rank-1.chakra.json.gz", "ddp2_gloo/rank-1.kineto.json", 720, 717),
    ("collectives2_gloo/rank-0.chakra.json.gz", "collectives2_gloo/rank-0.kineto.json", 527, 522),
    ("collectives2_gloo/rank-1.chakra.json.gz", "collectives2_gloo/rank-1.kineto.json", 485, 480),
    ("fsdp2_gloo/rank-0.chakra.json.gz", "fsdp2_gloo/rank-0.kineto.json.gz", 1133, 1128),
    ("fsdp2_gloo/rank-1.chakra.json.gz", "fsdp2_gloo/rank-1.kineto.json.gz", 1133, 1128),
    ("torch_compile_cpu/compile.et.json.gz", "torch_compile_cpu/compile.k.json", 437, 435),
    # NeMo's flaw: the device trace holds one step of the host trace's six.
    ("nemo_flaw_docs_example/rank-0_chakra.json.gz", "nemo_flaw_docs_example/rank-0_kineto.json", 1158, 198),
]

# file: whole nodes that stand before the damage, what the note says
DAMAGED = {
    "killed_sigterm": (926, "truncated at byte 935402"),
    "disk_full_truncated": (200, "truncated at byte 200000"),
    "fork_child_finalized": (618, "more nodes after an early end"),
    "bad_annotation_name": (11, "unescaped quote in a text"),
}


def tables(folder: Path, rank: int = 0) -> tuple[pl.DataFrame, dict[str, Any]]:
    part = folder / f"rank={rank}"
    return pl.read_parquet(part / "nodes.parquet"), json.loads((part / "link.json").read_text())["windows"][0]


def merged(out: Path, *args: Any) -> Outcome:
    done = run("merge", *args, "-o", out)
    assert (done.code, done.err) == (0, "")
    return done


def check_device_side(truth: DeviceFile, nodes: pl.DataFrame, link: dict[str, Any], counts: Counts) -> None:
    """The rows, launches, parents and orphans of a device file against the independent reader."""
    assert (len(truth.events), len(truth.rows)) == (counts.events, counts.rows)
    kinds = Counter(row.kind for row in truth.rows)
    assert tuple(kinds[k] for k in ACTIVITIES) == (counts.kernels, counts.memcpys, counts.memsets)
    timed = nodes.filter(pl.col("ts_ns").is_not_null())
    seen_rows = Counter(timed.select("kind", "name", "ts_ns", "dur_ns").iter_rows())
    assert seen_rows == Counter(row.key for row in truth.rows)
    assert link["device"]["categories"] == dict(Counter(str(e.get("cat") or "") for e in truth.events))
    launch, around = truth.launch_of(), truth.covering()
    assert sum(call is not None for call in launch.values()) == counts.launched
    parents = {row: around.at(call) if call else [] for row, call in launch.items()}
    assert sum(bool(found) for found in parents.values()) == counts.parented
    seen = linked_names(nodes)
    for row, call in launch.items():
        seen_launch, seen_parent = seen[row.key, row.args.get("correlation")].pop()
        assert seen_launch == (None if call is None else call.key)
        found = parents[row]
        assert seen_parent == (innermost(found).key if found else None)
    orphans = link["device"]["orphans"]
    assert link["device"]["num_launched"] == counts.launched
    assert link["device"]["num_with_parent"] == counts.parented
    assert orphans["no_correlation_id"] + orphans["launch_not_in_file"] == counts.activities - counts.launched
    assert orphans["launch_outside_any_op"] == counts.launched - counts.parented


def innermost(tied: list[Row]) -> Row:
    """Of rows with equal bounds the one opened last, which the counters of the profiler say."""
    return max(tied, key=lambda row: (row.args.get("Record function id", 0), row.args.get("External id", 0)))


def linked_names(nodes: pl.DataFrame) -> dict[Any, list[Any]]:
    keys = {n: tuple(rest) for n, *rest in nodes.select("node_id", "kind", "name", "ts_ns", "dur_ns").iter_rows()}
    keys[None] = None  # type: ignore[index,assignment]
    seen: dict[Any, list[Any]] = {}
    activities = nodes.filter(pl.col("kind").is_in(ACTIVITIES))
    for node, correlation, launch, parent in activities.select(
        "node_id", "correlation_id", "launch_id", "parent_id"
    ).iter_rows():
        seen.setdefault((keys[node], correlation), []).append((keys[launch], keys[parent]))
    return seen


# This file writes epoch times in ns, 16 digits before the point, and the handed values of its span and idle time went
# through float64, which keeps quarters of a microsecond there. From the text: 985358.440 + 253.727 - 505582.988 us.
EXACT = {"hta_ns_resolution": {"span_ns": 480029179, "idle_ns": 480029179 - 472454441}}


def check_device_time(out: Path, truth: DeviceFile, expected: dict[str, Any], exact: dict[str, int]) -> None:
    """Every value of the handed breakdown, as the summary gives it."""
    shown = json.loads(run("summary", out, "--json", "--top", 5).out)
    device = shown["ranks"][0]["device"]
    if expected["num_device_activities"] is None:
        assert device is None
    else:
        names = {
            "num_activities": "num_device_activities", "communication_ns": "comm_ns", "memory_ns": "mem_ns",
            "exposed_communication_ns": "exposed_comm_ns", "exposed_memory_ns": "exposed_mem_ns",
        }  # fmt: skip
        assert device == {key: expected[names.get(key, key)] for key in device} | exact
        assert device["communication_ns"] - device["exposed_communication_ns"] == expected["comm_overlap_ns"]
        assert sum(k["total_ns"] for k in shown["kernels"]) == expected["sum_durations_ns"]
        top = [{"name": k["name"], "count": k["count"], "sum_ns": k["total_ns"]} for k in shown["kernels"][:5]]
        by_time = sorted(expected["kernel_top"], key=lambda k: (-k["sum_ns"], k["name"]))
        assert sorted(top, key=lambda k: (-k["sum_ns"], k["name"])) == by_time
    steps = pl.read_parquet(out / "rank=0" / "steps.parquet").filter(pl.col("step").is_not_null())
    assert [f"ProfilerStep#{n}" for n in steps["step"]] == expected["step_names"]
    marks = [row for row in truth.rows if row.is_step and row.kind == "annotation"]
    assert steps["dur_ns"].to_list() == [row.dur for row in sorted(marks, key=lambda r: r.ts)]
    tolerance = 250 if exact else 0
    assert all(abs(a - b) <= tolerance for a, b in zip(steps["dur_ns"], expected["step_dur_ns"], strict=True))
    for row in steps.filter(pl.col("device_busy_ns").is_not_null()).iter_rows(named=True):
        low, high = row["ts_ns"], row["ts_ns"] + row["dur_ns"]
        inside = [(max(a.ts, low), min(a.end, high)) for a in truth.activities if a.ts < high and a.end > low]
        assert row["device_busy_ns"] == union_length(inside)


def test_the_tables_above_name_every_handed_file() -> None:
    require(DATA)
    stems = {p.name.removesuffix(".json.gz") for p in (DATA / "device_only").iterdir()}
    assert stems == set(DEVICE_ONLY)
    assert {p.name.removesuffix(".json.gz") for p in (DATA / "host_only").iterdir()} == set(HOST_ONLY)
    pairs = {(p.parts[-3], int(p.name[5])) for p in DATA.glob("pairs/*/device/*")}
    assert pairs - set(PAIRS) == {("resnet50_ddp_twin", 0)}  # test_twin.py
    traces = {str(p.relative_to(SAMPLES)) for p in SAMPLES.rglob("*.json*") if "manifest" not in p.name}
    named = {name for row in REAL_PAIRS for name in row[:2]}
    assert {p for p in traces - named if "damaged" not in p} == set()


@pytest.mark.parametrize("name", DEVICE_ONLY)
def test_device_only_file(name: str, tmp_path: Path) -> None:
    path = require(DATA / "device_only" / f"{name}.json.gz")
    merged(tmp_path, "--device", path, "--rank", stated_rank(path))
    rank = stated_rank(path)
    nodes, link = tables(tmp_path, rank)
    truth = DeviceFile.read(path)
    check_device_side(truth, nodes, link, DEVICE_ONLY[name])
    assert (link["host"], link["pairing"], link["salvaged"]) == (None, None, False)
    if name in (breakdown := expected_breakdown()):
        (tmp_path / f"rank={rank}").rename(tmp_path / "rank=0")
        check_device_time(tmp_path, truth, breakdown[name], EXACT.get(name, {}))


def stated_rank(path: Path) -> int:
    content = load_json(path)
    return int(content.get("distributedInfo", {}).get("rank", 0))


# Host ops, how often they occur in the device trace, sequence numbers (equal, compared). The host trace of linear is
# the iteration with numbers 660..725 of 40 iterations with 66 numbers each (the first one recorded has fewer ops);
# that of dlrm is the step before the one in the device trace: all its numbers are 40 lower.
BY_ORDER = {
    "dlrm_8gpu_by_order": (1672, 1, (0, 315)),
    "linear_one_of_40_iterations": (928, 39, (201, 201)),
    "simple_add_by_order": (36, 1, (6, 6)),
}


def check_order_link(nodes: pl.DataFrame, host_file: Path) -> None:
    """Every linked row has the name of its node, and the rows of an observer thread lie on one thread in its order."""
    by_id = {int(n["id"]): n for n in load_json(host_file)["nodes"]}
    linked = nodes.filter(pl.col("host_id").is_not_null() & pl.col("ts_ns").is_not_null())
    rows = linked.select("host_id", "name", "tid", "ts_ns").sort("host_id").rows()
    assert all(by_id[host_id]["name"] == name for host_id, name, _, _ in rows)
    threads: dict[int, list[tuple[int, int]]] = {}
    for host_id, _, tid, ts_ns in rows:
        threads.setdefault(by_id[host_id]["tid"], []).append((tid, ts_ns))
    for places in threads.values():
        assert len({tid for tid, _ in places}) == 1
        assert [ts for _, ts in places] == sorted(ts for _, ts in places)


@pytest.mark.parametrize("folder", sorted({name for name, _ in PAIRS}))
def test_pair_folder(folder: str, tmp_path: Path) -> None:
    merged(tmp_path, require(DATA / "pairs" / folder))
    ranks = [rank for name, rank in PAIRS if name == folder]
    assert sorted(p.name for p in tmp_path.glob("rank=*")) == [f"rank={rank}" for rank in ranks]
    for rank in ranks:
        num_nodes, counts = PAIRS[folder, rank]
        truth = DeviceFile.read(DATA / "pairs" / folder / "device" / f"rank-{rank}.json.gz")
        nodes, link = tables(tmp_path, rank)
        assert link["salvaged"] is False
        check_device_side(truth, nodes, link, counts)
        # No record-function ids on the device side: every host op is linked by call order, nothing is lost.
        num_ops, occurrences, sequences = BY_ORDER[folder]
        assert (link["host"]["num_nodes"], link["host"]["num_linked"]) == (num_nodes, num_ops)
        assert link["pairing"]["num_device_ids"] == 0
        assert link["pairing"]["linked_by"] == "call_order"
        order = link["pairing"]["call_order"]
        assert (order["num_matched"], order["num_occurrences"]) == (num_ops, occurrences)
        assert (order["num_sequence_equal"], order["num_sequence_compared"]) == sequences
        assert nodes.filter(pl.col("host_id").is_not_null()).height == num_nodes
        check_order_link(nodes, DATA / "pairs" / folder / "host" / f"rank-{rank}.json.gz")
    key = f"pairs/{folder}"
    if key in (breakdown := expected_breakdown()):
        check_device_time(tmp_path, truth, breakdown[key], {})


@pytest.mark.parametrize("name", HOST_ONLY)
def test_host_only_file(name: str, tmp_path: Path) -> None:
    schema, pid, num_nodes, num_roots, num_groups, num_comms = HOST_ONLY[name]
    path = require(DATA / "host_only" / f"{name}.json.gz")
    merged(tmp_path, "--host", path)
    nodes, link = tables(tmp_path)
    assert link["device"] is None
    assert (link["host"]["schema"], link["host"]["pid"]) == (schema, pid)
    assert (link["host"]["num_nodes"], link["host"]["num_roots"]) == (num_nodes, num_roots)
    assert link["salvaged"] is False
    check_host_tree(load_json(path)["nodes"], nodes)
    assert nodes.filter(pl.col("name").str.contains("process_group:init")).height == num_groups
    assert nodes.filter(pl.col("name") == "record_param_comms").height == num_comms


def check_host_tree(recorded: list[dict[str, Any]], nodes: pl.DataFrame) -> None:
    """Every node once, under the parent that the host trace names; no times."""
    host_id = dict(nodes.select("node_id", "host_id").iter_rows())
    host_id[None] = None
    seen = {h: (name, host_id[p]) for h, name, p in nodes.select("host_id", "name", "parent_id").iter_rows()}
    ids = {n["id"] for n in recorded}

    def parent(node: dict[str, Any]) -> int | None:
        named = node.get("ctrl_deps", node.get("parent"))
        return named if named != node["id"] and named in ids else None

    assert seen == {n["id"]: (n["name"], parent(n)) for n in recorded}
    assert nodes["ts_ns"].null_count() == nodes["dur_ns"].null_count() == nodes["self_dur_ns"].null_count() == len(seen)


@pytest.mark.parametrize(("host", "device", "num_nodes", "num_linked"), REAL_PAIRS, ids=lambda v: str(v)[:30])
def test_real_pair_of_torch_2_13(host: str, device: str, num_nodes: int, num_linked: int, tmp_path: Path) -> None:
    host_file, device_file = require(SAMPLES / host), SAMPLES / device
    merged(tmp_path, "--host", host_file, "--device", device_file)
    rank = 1 if "rank-1" in host else 0
    nodes, link = tables(tmp_path, rank)
    recorded = load_json(host_file)["nodes"]
    assert len(recorded) == num_nodes == link["host"]["num_nodes"]
    truth = DeviceFile.read(device_file)
    device_ids = {r.args["Record function id"]: r.name for r in truth.rows if r.args.get("Record function id")}
    by_id = {a["value"]: n for n in recorded for a in n["attrs"] if a["name"] == "rf_id" and a["value"]}
    common = {number: node["id"] for number, node in by_id.items() if device_ids.get(number) == node["name"]}
    assert len(common) == num_linked == link["host"]["num_linked"]
    linked = nodes.filter(pl.col("ts_ns").is_not_null() & pl.col("host_id").is_not_null())
    assert dict(linked.select("record_function_id", "host_id").iter_rows()) == common
    assert (link["pairing"]["faults"], link["salvaged"]) == ([], False)
    assert link["device"]["num_activities"] == 0
    if "nemo_flaw" not in host:
        alone = Counter(n["name"] for n in recorded if n["id"] not in set(common.values()) | roots(recorded))
        assert set(alone) <= {GROUP}
        assert link["host"]["host_only_names"] == dict(alone)
        agreement = link["host"]["parents"]
        assert agreement["num_compared"] == num_linked
        assert agreement["num_equal"] == sum(parents_agree(recorded, nodes))


def roots(recorded: list[dict[str, Any]]) -> set[int]:
    return {n["id"] for n in recorded if n["name"] in PROFILER}


def parents_agree(recorded: list[dict[str, Any]], nodes: pl.DataFrame) -> list[bool]:
    rows = {r["node_id"]: r for r in nodes.select("node_id", "parent_id", "host_id", "ts_ns").to_dicts()}
    named = {n["id"]: None if n["ctrl_deps"] in roots(recorded) else n["ctrl_deps"] for n in recorded}
    equal = []
    for row in rows.values():
        if row["host_id"] is None or row["ts_ns"] is None:
            continue
        at = row["parent_id"]
        while at is not None and rows[at]["host_id"] is None:
            at = rows[at]["parent_id"]
        equal.append((None if at is None else rows[at]["host_id"]) == named[row["host_id"]])
    return equal


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_host_trace_is_salvaged_and_refused_when_strict(name: str, tmp_path: Path) -> None:
    num_nodes, note = DAMAGED[name]
    path = require(SAMPLES / "damaged" / f"{name}.et.json")
    done = merged(tmp_path / "out", "--host", path)
    _, link = tables(tmp_path / "out")
    assert link["salvaged"] is True
    assert link["host"]["num_nodes"] == num_nodes
    assert note in done.out
    refused(run("merge", "--host", path, "-o", tmp_path / "strict", "--strict"), f"{name}.et.json is damaged", note)


def test_damaged_pair_is_salvaged_on_both_sides(tmp_path: Path) -> None:
    folder = require(SAMPLES / "damaged")
    host, device = folder / "bad_annotation_name.et.json", folder / "bad_annotation_name.kineto.json"
    # Kineto writes '/' for a backslash and drops control characters, so one of nine names differs.
    done = merged(tmp_path, "--host", host, "--device", device, "--force")
    assert done.out.count("unescaped quote in a text") == 2
    _, link = tables(tmp_path)
    assert (link["host"]["num_linked"], link["host"]["num_nodes"]) == (8, 11)


def test_parents_never_written_are_counted_and_said(tmp_path: Path) -> None:
    path = require(SAMPLES / "damaged" / "dangling_after_op_exception.et.json")
    recorded = load_json(path)["nodes"]
    ids = {n["id"] for n in recorded}
    dangling = [n for n in recorded if n["ctrl_deps"] not in ids]
    done = merged(tmp_path, "--host", path)
    nodes, link = tables(tmp_path)
    assert (len(recorded), len(dangling)) == (35, 2)
    assert link["host"]["num_dangling_parents"] == 2
    assert "nodes put under added roots: 2" in done.out
    missing = {n["ctrl_deps"] for n in dangling}
    assert set(link["host"]["missing_parents"]) == missing
    added = nodes.filter(pl.col("repaired"))
    assert (added["kind"].to_list(), set(added["host_id"]) - missing) == (["thread"], set())
    under = nodes.filter(pl.col("parent_id").is_in(added["node_id"].to_list()))
    assert set(under["host_id"]) == {n["id"] for n in dangling}
    root = next(n for n in recorded if n["name"] == PROFILER[0])
    assert nodes["host_id"][added["parent_id"][0]] == root["id"]


def test_handed_span_of_the_ns_file_is_the_float64_one() -> None:
    activities = DeviceFile.read(require(DATA / "device_only" / "hta_ns_resolution.json.gz")).activities
    starts = [int(float(row.event["ts"]) * 4) * 250 for row in activities]
    ends = [start + row.dur for start, row in zip(starts, activities, strict=True)]
    assert max(ends) - min(starts) == expected_breakdown()["hta_ns_resolution"]["span_ns"] == 480029227
    assert max(row.end for row in activities) - min(row.ts for row in activities) == 480029179


# The only refusals among the handed traces, each with what it says. Both files of each pair merge when paired rightly.
CROSSED = {
    "rank 0 with rank 1": ("ddp2_gloo/rank-0.chakra.json.gz", "ddp2_gloo/rank-1.kineto.json", "different process"),
    # Two containers, so both processes have pid 2370.
    "equal pids": (
        "single_rank/0_chakra/rank-0.json.gz",
        "grad_accum3/0_kineto/rank-0.json",
        "no record-function id of the host trace is in the device trace",
    ),
}


@pytest.mark.parametrize("what", CROSSED)
def test_files_of_two_processes_are_refused(what: str, tmp_path: Path) -> None:
    host, device, reason = CROSSED[what]
    done = run("merge", "--host", require(SAMPLES / host), "--device", SAMPLES / device, "-o", tmp_path)
    refused(done, reason, "--force")
    assert not list(tmp_path.rglob("*.parquet"))
