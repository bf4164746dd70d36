"""Exports of the handed traces: nothing lost, nothing twice, and every node runs; by the independent walk."""

from collections import defaultdict

import polars as pl
import pytest
from commands import run
from handed import DATA, expected_breakdown, require

from export.exported import (
    PROFILES,
    errors,
    exported,
    findings,
    groups_of,
    merged_device,
    merged_pair,
    ranks_of,
    walked,
)
from export.feeder_walk import COMP, METADATA, defects, longest_path_us, without_successor

PAIRS = ("resnet50_ddp_twin", "linear_one_of_40_iterations", "simple_add_by_order")
DEVICE = (
    "h100_bert_small", "h100_qwen_0_5b_chat", "hta_alexnet_critical_path", "hta_event_sync_multi_stream",
    "hta_mi250_minitoy", "hta_ns_resolution", "hta_trace_diff_control", "mi210_gpu_only", "mi300_qwen_0_5b_chat",
    "torch_compile_triton", "vllm_decode_cuda_graph",
)  # fmt: skip
# In full these take half a minute to read one by one; two of a kind are enough.
ASTRA_ONLY = ("linear_one_of_40_iterations", "hta_trace_diff_control", "h100_qwen_0_5b_chat")
FULL = [name for name in (*PAIRS, *DEVICE) if name not in ASTRA_ONLY]
# Their first activity waits for what was launched before the window (facts of the trace, not of the export).
BACKLOG = ("vllm_decode_cuda_graph",)
ON_THREAD = ["host_op", "annotation", "python_function", "runtime"]
DLRM, NUM_RECORDED = 8, 4


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Merges each trace once, when it is asked for."""
    folder, made = tmp_path_factory.mktemp("merged"), dict[str, object]()

    def get(name):
        if name not in made:
            make = merged_pair if name in PAIRS else merged_device
            made[name] = make(folder / name, name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def exports(tables, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("exports"), set()

    def get(name, profile):
        target = folder / f"{name}-{profile}"
        if target not in made:
            exported(tables(name), target, profile)
            made.add(target)
        return target

    return get


@pytest.fixture(scope="module")
def rank_of(exports):
    """Reads each file once: plain Python takes its time."""
    made = {}

    def get(name, profile):
        if (name, profile) not in made:
            (made[name, profile],) = ranks_of(exports(name, profile)).values()
        return made[name, profile]

    return get


def nodes_of(tables, name):
    (path,) = tables(name).glob("rank=*/nodes.parquet")
    return pl.read_parquet(path).with_columns(pl.col("kind").cast(pl.String))


def activities(nodes):
    return nodes.filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *((name, "astra") for name in (*PAIRS, *DEVICE)),
        *((name, "full") for name in FULL if name != "hta_ns_resolution"),
    ],
)
def test_every_node_runs_and_waits_for_what_is_there(exports, rank_of, name, profile):
    folder, rank = exports(name, profile), rank_of(name, profile)
    assert defects(rank) == []
    assert without_successor(rank) == []
    done = walked(folder, full=profile == "full")
    assert all(len(ids) == len(rank.nodes) for ids in done.issued.values())
    assert errors(folder, profile) <= {"V1-rank-missing", "V14-group-outside"}
    types = {node.type for node in rank.nodes} - {node.type for node in rank.communication}
    assert types <= ({COMP} if profile == "astra" else {COMP, METADATA})
    assert not any(node.on_cpu for node in rank.communication)
    assert all(node.attrs["pg_name"] in map(str, groups_of(folder)) for node in rank.communication)
    assert all(node.start_us > 0 for node in rank.nodes)


@pytest.mark.parametrize("name", FULL)
def test_no_nanosecond_of_the_device_is_lost(tables, rank_of, name):
    found = defaultdict(list)
    for node in rank_of(name, "full").nodes:
        if "stream" in node.attrs and node.type != METADATA:
            found[node.attrs["device"], node.attrs["stream"]].append(node)
    ran = activities(nodes_of(tables, name))
    expected = {row[:2]: row[2] for row in ran.group_by("device", "stream").agg(pl.col("dur_ns").sum()).iter_rows()}
    assert {key: sum(node.attrs["dur_ns"] for node in nodes) for key, nodes in found.items()} == expected
    for key, nodes in found.items():
        assert abs(sum(node.duration_us for node in nodes) * 1000 - expected[key]) <= 1000
    stated = expected_breakdown().get(name)
    if stated:
        assert sum(expected.values()) == stated["sum_durations_ns"]
        assert sum(map(len, found.values())) == stated["num_device_activities"]


@pytest.mark.parametrize("name", FULL)
def test_a_thread_works_or_waits_from_its_first_row_to_its_last(tables, rank_of, name):
    found = defaultdict(list)
    for node in rank_of(name, "full").nodes:
        if node.on_cpu and node.type != METADATA:
            found[node.attrs["pid"], node.attrs["tid"]].append(node)
    on_thread = nodes_of(tables, name).filter(pl.col("kind").is_in(ON_THREAD) & pl.col("dur_ns").is_not_null())
    assert found
    for (pid, tid), nodes in found.items():
        rows = on_thread.filter(pid=pid, tid=tid)
        first, last = rows["ts_ns"].min(), (rows["ts_ns"] + rows["dur_ns"]).max()
        at, worked, waited = first, 0, 0
        for node in nodes:
            assert node.attrs["start_ns"] >= at
            waited += node.attrs["start_ns"] - at
            worked += node.attrs["dur_ns"]
            at = node.attrs["start_ns"] + node.attrs["dur_ns"]
        assert (at, worked + waited) == (last, last - first)
        assert abs(sum(node.duration_us for node in nodes) * 1000 - worked) <= 1000


@pytest.mark.parametrize("name", [*PAIRS, *DEVICE])
def test_longest_path_is_the_measured_span_unless_validate_says_otherwise(exports, rank_of, name):
    folder, rank = exports(name, "astra"), rank_of(name, "astra")
    span = max(one.start_us + one.duration_us for one in rank.nodes) - min(one.start_us for one in rank.nodes)
    is_far = abs(longest_path_us(rank) - span) > span / 10
    assert is_far == ("V13-path-and-span" in findings(folder))
    assert is_far == (name in BACKLOG)


@pytest.mark.parametrize("name", [*PAIRS, *DEVICE])
def test_device_time_in_microseconds_adds_up_by_stream(tables, rank_of, name):
    found = defaultdict(int)
    for node in rank_of(name, "astra").nodes:
        if "stream" in node.attrs:
            found[node.attrs["stream"]] += node.duration_us
    ran = activities(nodes_of(tables, name))
    for stream, num_devices, total in (
        ran.group_by("stream").agg(pl.col("device").n_unique().alias("n"), pl.col("dur_ns").sum()).iter_rows()
    ):
        assert abs(found[stream] * 1000 - total) <= 1000 * num_devices


def path_with_device(rank, factor):
    return longest_path_us(rank, lambda node: node.duration_us if node.on_cpu else int(node.duration_us * factor))


def test_faster_device_halves_what_is_bound_by_it_since_waits_are_not_work(rank_of):
    rank = rank_of("hta_ns_resolution", "astra")
    assert 0.50 <= path_with_device(rank, 0.5) / path_with_device(rank, 1) <= 0.53


def test_slower_device_doubles_what_is_bound_by_it(rank_of):
    rank = rank_of("hta_ns_resolution", "astra")
    assert 1.9 <= path_with_device(rank, 2) / path_with_device(rank, 1) <= 2


def test_faster_device_leaves_alone_what_is_bound_by_launches(rank_of):
    rank = rank_of("resnet50_ddp_twin", "astra")
    assert path_with_device(rank, 0.5) / path_with_device(rank, 1) > 0.999


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dlrm")
    done = run("merge", require(DATA / "pairs" / "dlrm_8gpu_by_order"), "-o", folder / "m", "--force", "--workers", "1")
    assert done.code == 0, done.err
    for profile in PROFILES:
        exported(folder / "m", folder / profile, profile)
    return folder


@pytest.mark.parametrize("profile", PROFILES)
def test_ranks_that_exchange_unequal_amounts_run_together(dlrm, profile):
    folder = dlrm / profile
    assert errors(folder, profile) == {"V14-group-outside"}  # half of the ranks were handed
    ranks, done = ranks_of(folder), walked(folder, full=profile == "full")
    assert sorted(ranks) == [*range(NUM_RECORDED)]
    for number, rank in ranks.items():
        assert len(done.issued[number]) == len(rank.nodes)
        assert defects(rank) == []
        assert without_successor(rank) == []
    groups = groups_of(folder)
    assert groups[1] == [*range(DLRM)]
    # They began 6 ms apart, and begin at once here: a replay that takes the skew away says 13.9 to 14.0 ms of each.
    assert all(13_650 < end < 14_250 for end in done.end.values())
