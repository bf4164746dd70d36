"""``slice``: what stays of a run, held against a reading of its tables row by row, and used by the other verbs."""

import hashlib
import json
import shutil
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder
from commands import refused, run
from disks import files_end_at
from handed import DATA, require

from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.analysis.rest_parts import rest_parts
from chakra_capture.merge.slices.counts import counted_columns, recounted
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import COLLECTIVES, COMMUNICATION, EDGES, NODES, STEPS

SAMPLES = Path(__file__).parents[2] / "traces"
TWIN = "pairs/resnet50_ddp_twin"
ACTIVITIES = ("kernel", "memcpy", "memset")
MARKS = ("device_annotation", "sync")
IDS = ("node_id", "parent_id", "launch_id")
CUTS = [
    (TWIN, [5]),
    (TWIN, [5, 6]),
    (TWIN, [4, 6]),
    ("pairs/dlrm_8gpu_by_order", [10]),
    ("device_only/hta_ns_resolution", [102]),
    ("device_only/hta_ns_resolution", [102, 103, 105]),
    ("device_only/hta_trace_diff_control", [1010, 1011]),
    ("device_only/h100_qwen_0_5b_chat", [6]),
    ("device_only/hta_mi250_minitoy", [2]),
    ("host_only/resnet_1gpu_schema_1.1.1", [7]),
    ("digits_ddp2_gloo", [6]),
    ("digits_two_cycles", [7]),
]
NAMES = [f"{name.rsplit('/')[-1]}-{'_'.join(map(str, steps))}" for name, steps in CUTS]


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Merge a handed trace, or one of our own, once; returns its folder of ranks."""

    @cache
    def folder(name):
        out = tmp_path_factory.mktemp("merged") / "whole"
        file = DATA / f"{name}.json.gz"
        if name.startswith("device_only"):
            done = run("merge", "--device", require(file), "-o", out)
        elif name.startswith("host_only"):
            done = run("merge", "--host", require(file), "-o", out)
        elif name.startswith("pairs"):
            done = run("merge", require(DATA / name), "--force", "-o", out)
        else:
            done = run("merge", SAMPLES / name, "-o", out)
        assert done.code == 0, done
        return out

    return folder


@pytest.fixture(scope="module")
def sliced(merged, tmp_path_factory):
    """Slice it once; returns the folder of the slice."""

    @cache
    def folder(name, *options):
        out = tmp_path_factory.mktemp("sliced") / "part"
        done = run("slice", merged(name), *options, "-o", out)
        assert (done.code, done.err) == (0, "")
        return out

    return folder


def steps_option(steps):
    return "--steps", ",".join(map(str, steps))


def ranks_of(folder):
    return {int(one.name.removeprefix("rank=")): one for one in sorted(folder.glob("rank=*"))}


def table(folder, name):
    return pl.read_parquet(folder / f"{name}.parquet")


def link_of(folder):
    return json.loads((folder / "link.json").read_text())


def source_ids(folder):
    """Of each row of a slice the node_id in the run that it was cut from, as link.json says."""
    return [number for low, high in link_of(folder)["slice"]["source_node_ids"] for number in range(low, high + 1)]


def expected_rows(rows, steps, wanted):
    """What stays of one rank, decided row by row; and those of it that are only carried."""
    by_id = {row["node_id"]: row for row in rows}
    stays, carried = set(), set()
    for window in {row["window"] for row in steps if row["step"] in wanted}:
        marks = sorted(
            (row["step"], row["ts_ns"], row["ts_ns"] + row["dur_ns"])
            for row in steps
            if row["window"] == window and row["step"] in wanted and row["dur_ns"] is not None
        )
        spans = [(low, high) for _, low, high in marks]
        for (step, _, high), (after, low, _) in pairwise(marks):
            if after == step + 1:
                spans.append((high, low))
        mine = [row for row in rows if row["window"] == window]

        def runs_in(row, spans):
            low = row["ts_ns"]
            high = max(low + (row["dur_ns"] or 0), low + 1)
            return any(low < end and high > begin for begin, end in spans)

        for row in mine:
            on_mark, has_time = row["kind"] in MARKS, row["ts_ns"] is not None
            starts_in = has_time and any(low <= row["ts_ns"] < high for low, high in spans)
            has_no_step = row["step"] is None and row["launch_id"] is None and not on_mark
            if row["kind"] in ("process", "thread") or row["step"] in wanted or (has_no_step and starts_in):
                stays.add(row["node_id"])
        for row in mine:  # those without a time go with what is around them
            up = row
            while up is not None and up["ts_ns"] is None and up["node_id"] not in stays:
                up = by_id.get(up["parent_id"])
            if row["ts_ns"] is None and up is not None and up["kind"] not in ("process", "thread"):
                stays |= {row["node_id"]} if up["node_id"] in stays else set()
        for row in mine:
            if row["kind"] in ACTIVITIES and row["launch_id"] in stays:
                stays.add(row["node_id"])
        for row in mine:
            is_timed = row["kind"] in ACTIVITIES and row["ts_ns"] is not None
            if is_timed and row["node_id"] not in stays and runs_in(row, spans):
                carried.add(row["node_id"])
        busy = [
            (by_id[node]["ts_ns"], by_id[node]["ts_ns"] + (by_id[node]["dur_ns"] or 0))
            for node in stays | carried
            if by_id[node]["kind"] in ACTIVITIES and by_id[node]["window"] == window
        ]
        for row in mine:
            if row["kind"] in MARKS and runs_in(row, [*spans, *((low, high) for low, high in busy if high > low)]):
                stays.add(row["node_id"])
    return sorted(stays | carried), carried


@pytest.mark.parametrize(("name", "steps"), CUTS, ids=NAMES)
def test_rows_of_steps_are_those_that_a_walk_over_all_rows_finds_unchanged(merged, sliced, name, steps):
    source, out = merged(name), sliced(name, *steps_option(steps))
    for rank, folder in ranks_of(out).items():
        whole = ranks_of(source)[rank]
        rows = table(whole, "nodes").to_dicts()
        kept, carried = expected_rows(rows, table(whole, "steps").to_dicts(), steps)
        assert source_ids(folder) == kept
        number = {node: at for at, node in enumerate(kept)}
        expected = [rows[node] | {key: number.get(rows[node][key]) for key in IDS} for node in kept]
        nodes = table(folder, "nodes")
        assert nodes.schema == NODES.schema
        assert nodes.to_dicts() == expected
        said = link_of(folder)["slice"]
        assert said["num_carried"] == len(carried)
        assert (said["num_rows"], said["num_rows_left_out"]) == (len(kept), len(rows) - len(kept))
        for key, count in (("parent_id", "num_parents_left_out"), ("launch_id", "num_launches_left_out")):
            assert said[count] == sum(rows[n][key] is not None and rows[n][key] not in number for n in kept)


@pytest.mark.parametrize(("name", "steps"), CUTS, ids=NAMES)
def test_edges_stay_where_both_ends_do_and_none_is_made_up(merged, sliced, name, steps):
    source, out = merged(name), sliced(name, *steps_option(steps))
    for rank, folder in ranks_of(out).items():
        number = {node: at for at, node in enumerate(source_ids(folder))}
        of_source = table(ranks_of(source)[rank], "edges").to_dicts()
        expected = [
            edge | {"src": number[edge["src"]], "dst": number[edge["dst"]]}
            for edge in of_source
            if edge["src"] in number and edge["dst"] in number
        ]
        edges = table(folder, "edges")
        assert edges.schema == EDGES.schema
        assert edges.to_dicts() == expected
        said = link_of(folder)["slice"]
        assert said["num_edges"] == len(expected)
        assert said["num_edges_left_out"] == len(of_source) - len(expected)
        assert said["num_edges_cut"] == sum((e["src"] in number) != (e["dst"] in number) for e in of_source)


@pytest.mark.parametrize(("name", "steps"), CUTS, ids=NAMES)
def test_steps_and_their_phases_are_what_they_were(merged, sliced, name, steps):
    source, out = merged(name), sliced(name, *steps_option(steps))
    for rank, folder in ranks_of(out).items():
        part, whole = MergedTrace(rank, folder), MergedTrace(rank, ranks_of(source)[rank])
        chosen = whole.steps.filter(pl.col("step").is_in(steps))
        assert part.steps.drop("node_id").equals(chosen.drop("node_id"))
        ids = source_ids(folder)
        assert [ids[node] for node in part.steps["node_id"]] == chosen["node_id"].to_list()
        assert phase_times(part).equals(phase_times(whole).filter(pl.col("step").is_in(steps)))
        of_rest = [rest_parts(each).filter(pl.col("step").is_in(steps)).sort(pl.all()) for each in (part, whole)]
        assert of_rest[0].equals(of_rest[1])


@pytest.mark.parametrize(("name", "steps"), CUTS, ids=NAMES)
def test_a_slice_of_a_slice_is_the_same(sliced, tmp_path, name, steps):
    out = sliced(name, *steps_option(steps))
    assert run("slice", out, *steps_option(steps), "-o", tmp_path / "again").code == 0
    files = sorted(out.rglob("*.parquet"))
    assert len(files) == 1 + 4 * len(ranks_of(out))
    for file in files:
        assert pl.read_parquet(file).equals(pl.read_parquet(tmp_path / "again" / file.relative_to(out)))


@pytest.mark.parametrize("name", sorted({name for name, _ in CUTS}))
def test_counts_of_link_json_made_anew_from_the_tables_are_those_of_the_merge(merged, name):
    for rank, folder in ranks_of(merged(name)).items():
        trace = MergedTrace(rank, folder)
        rows = counted_columns(trace.nodes.lazy())
        for entry in trace.link["windows"]:
            of_window = [each.filter(pl.col("window") == entry["window"]) for each in (rows, trace.edges, trace.steps)]
            steps = of_window[2]["step"].drop_nulls().to_list()
            assert recounted(entry, of_window[0], of_window[1], steps) == entry


@pytest.mark.parametrize(("name", "steps"), CUTS, ids=NAMES)
def test_communication_is_that_of_rows_that_stay_for_themselves(merged, sliced, name, steps):
    source, out = merged(name), sliced(name, *steps_option(steps))
    number, own = {}, {}
    for rank, folder in ranks_of(out).items():
        rows, marks = (table(ranks_of(source)[rank], each).to_dicts() for each in ("nodes", "steps"))
        kept, carried = expected_rows(rows, marks, steps)
        number[rank] = {node: at for at, node in enumerate(kept)}
        own[rank] = set(kept) - carried
        expected = [
            row | {key: number[rank].get(row[key]) for key in ("node_id", "host_node_id")}
            for row in table(ranks_of(source)[rank], "communication").to_dicts()
            if row["node_id"] in own[rank]
        ]
        communication = table(folder, "communication")
        assert communication.schema == COMMUNICATION.schema
        assert communication.to_dicts() == expected
    rows = [row for row in table(source, "collectives").to_dicts() if row["node_id"] in own.get(row["rank"], ())]
    here = Counter(row["collective_id"] for row in rows)
    for row in rows:
        row |= {key: number[row["rank"]].get(row[key]) for key in ("node_id", "host_node_id")}
        row["num_found"] = here[row["collective_id"]]
    collectives = table(out, "collectives")
    assert collectives.schema == COLLECTIVES.schema
    assert collectives.to_dicts() == rows
    said = json.loads((out / "alignment.json").read_text())["slice"]
    assert said["num_operations"] == len(here)
    lacking = {row["collective_id"] for row in rows if row["num_found"] < (row["num_ranks"] or 0)}
    assert said["num_operations_that_lack_a_rank"] == len(lacking)


@pytest.mark.parametrize(
    ("name", "steps", "error"),
    [
        (TWIN, [5], 0.001),
        (TWIN, [4, 5], 0.001),
        ("pairs/dlrm_8gpu_by_order", [10], 0.005),
        ("digits_ddp2_gloo", [6], 0.02),
        ("device_only/hta_ns_resolution", [102, 103], 0.01),
        ("device_only/hta_trace_diff_control", [1010, 1011], 0.02),
    ],
)
def test_a_slice_of_whole_steps_is_replayed_like_the_whole(merged, sliced, name, steps, error):
    done = run("validate", sliced(name, *steps_option(steps)), "--replay", "--json")

    assert done.code == 0
    (window,) = json.loads(done.out)["windows"]
    for rank in window["ranks"]:
        recorded = table(ranks_of(merged(name))[rank["rank"]], "steps").filter(pl.col("step").is_in(steps))
        assert [(each["step"], each["measured_ns"]) for each in rank["steps"]] == recorded["step", "dur_ns"].rows()
        assert rank["worst_error"] <= error


def test_starts_of_kernels_in_the_replay_of_a_slice_are_as_good_as_in_that_of_the_whole(sliced):
    done = run("validate", sliced(TWIN, "--steps", "5"), "--replay", "--json")
    (rank,) = json.loads(done.out)["windows"][0]["ranks"]
    assert rank["start_error_mean_ns"] <= 5_000
    assert rank["start_error_p95_ns"] <= 10_000
    assert rank["unexplained_ns"] == 0


def test_summary_of_a_slice_states_its_steps_and_counts(merged, sliced):
    whole = json.loads(run("summary", merged(TWIN), "--json").out)
    part = json.loads(run("summary", sliced(TWIN, "--steps", "5"), "--json").out)
    (rank,) = part["ranks"]
    recorded = table(merged(TWIN) / "rank=0", "steps").filter(pl.col("step") == 5).row(0, named=True)
    assert rank["steps"] == [5]
    assert rank["step_time"]["mean_ns"] == rank["step_time"]["max_ns"] == recorded["dur_ns"]
    # Of 14 391 host nodes 3 are roots; each of the three equal steps has a third of the rest.
    assert (rank["host_ops"], rank["host_linked"]) == (4796, 4796)
    assert (rank["activities"], rank["launched"]) == (1258, 1258)
    assert recorded["num_device_activities"] == 1258
    assert rank["notes"][0] == "a slice: step 5 of rank 0"
    assert rank["notes"][1:] == whole["ranks"][0]["notes"]
    assert part["world_size"] == 2


def test_every_verb_reads_a_slice(sliced, tmp_path):
    out = sliced("digits_ddp2_gloo", "--steps", "6")
    assert "Steps      6" in run("summary", out).out
    assert [row["merged"] for row in json.loads(run("inspect", out, "--json").out)["ranks"]] == [True, True]
    sql = "SELECT rank, count(*) AS n FROM nodes GROUP BY rank ORDER BY rank"
    rows = json.loads(run("query", out, sql, "--json").out)["rows"]
    assert rows == [{"rank": rank, "n": table(folder, "nodes").height} for rank, folder in ranks_of(out).items()]
    assert run("export", "graph", out, "-o", tmp_path / "graph").code == 0
    assert run("slice", out / "rank=1", "--steps", "6", "-o", tmp_path / "one").code == 0
    assert [*ranks_of(tmp_path / "one")] == [1]


def beneath(rows, node):
    """The row, its descendants by parent_id, and what their launches launched: found by walking down."""
    children, launched = defaultdict(list), defaultdict(list)
    for row in rows:
        children[row["parent_id"]].append(row["node_id"])
        launched[row["launch_id"]].append(row["node_id"])
    found, left = set(), [node]
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            left += children[at] + launched[at]
    return sorted(found)


def test_one_op_with_all_beneath_it_and_what_it_launched(merged, sliced):
    rows = table(merged(TWIN) / "rank=0", "nodes").to_dicts()
    (node,) = [r["node_id"] for r in rows if r["name"] == "DistributedDataParallel.forward" and r["step"] == 5
               and r["kind"] == "annotation"]  # fmt: skip
    out = sliced(TWIN, "--node", str(node), "--rank", "0")
    folder = out / "rank=0"
    kept = beneath(rows, node)
    assert source_ids(folder) == kept
    nodes = table(folder, "nodes")
    kinds = Counter(rows[number]["kind"] for number in kept)
    assert kinds["kernel"] > 100
    assert dict(nodes["kind"].cast(pl.String).value_counts().iter_rows()) == kinds
    # What a window without a marked step has: one row for all of it.
    starts = [rows[number]["ts_ns"] for number in kept]
    ends = [rows[number]["ts_ns"] + rows[number]["dur_ns"] for number in kept]
    (step,) = table(folder, "steps").to_dicts()
    assert (step["step"], step["node_id"], step["ts_ns"]) == (None, None, min(starts))
    assert step["dur_ns"] == max(ends) - min(starts)
    assert step["device_busy_ns"] + step["device_idle_ns"] == step["dur_ns"]
    # One stream: nothing overlaps, so busy is the sum.
    assert step["device_busy_ns"] == sum(rows[n]["self_dur_ns"] for n in kept if rows[n]["kind"] in ACTIVITIES)
    said = link_of(folder)["slice"]
    assert (said["node_id"], said["num_parents_left_out"], said["num_launches_left_out"]) == (node, 1, 0)
    assert run("summary", out).code == 0
    assert run("validate", out, "--replay").code == 0


def test_the_op_can_be_sliced_out_of_its_slice_again(merged, sliced, tmp_path):
    rows = table(merged(TWIN) / "rank=0", "nodes")
    node = rows.filter(pl.col("name") == "aten::addmm")["node_id"][0]
    out = sliced(TWIN, "--node", str(node))
    again = source_ids(out / "rank=0").index(node)
    assert run("slice", out, "--node", again, "-o", tmp_path / "again").code == 0
    for name in ("nodes", "edges", "steps", "communication"):
        assert table(out / "rank=0", name).equals(table(tmp_path / "again" / "rank=0", name))


def test_an_op_of_a_host_trace_alone_has_its_rows_and_no_times(merged, sliced):
    rows = table(merged("host_only/resnet_1gpu_schema_1.1.1") / "rank=0", "nodes").to_dicts()
    (node, *_) = [row["node_id"] for row in rows if row["name"] == "aten::linear"]
    folder = sliced("host_only/resnet_1gpu_schema_1.1.1", "--node", str(node)) / "rank=0"
    assert source_ids(folder) == beneath(rows, node)
    assert len(source_ids(folder)) > 2
    assert table(folder, "steps").height == 0


def test_chosen_ranks_stay_as_they_are_and_collectives_say_who_is_missing(merged, sliced):
    source, out = merged("pairs/dlrm_8gpu_by_order"), sliced("pairs/dlrm_8gpu_by_order", "--ranks", "0,2-3")
    assert [*ranks_of(out)] == [0, 2, 3]
    for rank, folder in ranks_of(out).items():
        for name in ("nodes", "edges", "steps", "communication"):
            assert (folder / f"{name}.parquet").read_bytes() == (
                ranks_of(source)[rank] / f"{name}.parquet"
            ).read_bytes()
    whole, part = table(source, "collectives"), table(out, "collectives")
    assert whole["num_found"].unique().to_list() == [4]
    assert part.drop("num_found").equals(whole.filter(pl.col("rank") != 1).drop("num_found"))
    assert part["num_found"].unique().to_list() == [3]
    alignment = json.loads((out / "alignment.json").read_text())
    assert alignment["ranks"] == [0, 2, 3]
    assert sorted(alignment["clocks"]) == ["0", "2", "3"]
    clocks = json.loads((source / "alignment.json").read_text())["clocks"]
    assert all(alignment["clocks"][rank] == clocks[rank] for rank in alignment["clocks"])


def test_json_says_what_stayed_and_the_screen_what_was_left_out(merged, tmp_path):
    source = merged("device_only/hta_ns_resolution")
    done = run("slice", source, "--steps", "102", "--ranks", "0", "-o", tmp_path / "a", "--json")
    report = json.loads(done.out)
    said = link_of(tmp_path / "a" / "rank=0")["slice"]
    assert (report["schema_version"], report["output"], report["steps"]) == (1, str(tmp_path / "a"), [102])
    (rank,) = report["ranks"]
    assert rank == {"rank": 0, **{key: said[key] for key in rank if key != "rank"}}
    shown = run("slice", source, "--steps", "102", "-o", tmp_path / "b").out
    assert f"rank 0: {rank['num_rows']} of 45422 rows" in shown
    assert f"device activities launched before that run in these steps: {rank['num_carried']}" in shown
    assert f"1 rank sliced into {tmp_path / 'b'}" in shown


def small(tmp_path):
    """Three steps; an epoch around them, an op and its kernel between the first two, a kernel that runs on."""
    built = TraceBuilder().annotation("epoch", 0, 1000)
    built.step(1, 10, 100).op("aten::mm", 20, 30).launched("long", 60, 100, 1, at=30)
    built.op("metrics", 115, 10).launched("between", 170, 5, 2, at=117)
    built.step(2, 130, 100).op("aten::mm", 140, 30).launched("late", 240, 20, 3, at=150)
    built.step(3, 250, 50).op("aten::mm", 260, 10)
    built.write(tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    return tmp_path / "run"


def names(folder):
    return sorted(table(folder / "rank=0", "nodes").filter(~pl.col("kind").is_in(("process", "thread")))["name"])


def test_what_is_between_two_steps_that_follow_each_other_stays(tmp_path):
    source = small(tmp_path)
    for steps, out in (("1-2", "both"), ("1,3", "apart")):
        assert run("slice", source, "--steps", steps, "-o", tmp_path / out).code == 0
    assert names(tmp_path / "both") == sorted(
        ["ProfilerStep#1", "ProfilerStep#2", "aten::mm", "aten::mm", "metrics", "between", "long", "late"]
        + ["cudaLaunchKernel"] * 3
    )
    # Of step 3 nothing runs on the device but what step 2 launched.
    assert names(tmp_path / "apart") == sorted(
        ["ProfilerStep#1", "ProfilerStep#3", "aten::mm", "aten::mm", "cudaLaunchKernel", "long", "late"]
    )


def test_a_kernel_of_the_step_before_runs_on_without_its_launch(tmp_path):
    source = small(tmp_path)
    done = run("slice", source, "--steps", "2", "-o", tmp_path / "out")
    assert done.code == 0
    nodes = table(tmp_path / "out" / "rank=0", "nodes")
    rows = {row["name"]: row for row in nodes.filter(pl.col("kind") == "kernel").iter_rows(named=True)}
    assert {name: (row["launch_id"] is None, row["parent_id"] is None, row["step"]) for name, row in rows.items()} == {
        "long": (True, True, 1), "between": (True, True, None), "late": (False, False, 2),
    }  # fmt: skip
    link = link_of(tmp_path / "out" / "rank=0")
    assert link["slice"]["num_carried"] == 2
    assert link["windows"][0]["device"]["orphans"]["launch_left_out"] == 1
    # long until 160 and between 170-175, as in the whole run.
    (step,) = table(tmp_path / "out" / "rank=0", "steps").to_dicts()
    assert (step["device_busy_ns"], step["device_idle_ns"]) == (35_000, 65_000)


def test_a_collective_is_of_the_step_that_launched_it_though_it_runs_on(tmp_path):
    reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    built = TraceBuilder().step(1, 0, 50).launched(reduce, 20, 60, 1, at=10)
    built.step(2, 60, 50).launched(reduce, 90, 10, 2, at=70).write(tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    assert table(tmp_path / "run" / "0_merged" / "rank=0", "communication")["step"].to_list() == [1, 2]
    for step, busy_ns in ((1, 30_000), (2, 30_000)):
        out = tmp_path / str(step)
        assert run("slice", tmp_path / "run", "--steps", step, "-o", out).code == 0
        assert table(out / "rank=0", "communication")["step"].to_list() == [step]
        assert table(out, "collectives")["step"].to_list() == [step]
        assert table(out / "rank=0", "nodes").filter(pl.col("kind") == "kernel").height == step
        assert table(out / "rank=0", "steps")["device_busy_ns"].to_list() == [busy_ns]


def test_a_launch_call_stays_with_what_it_launched(tmp_path):
    source = small(tmp_path)
    rows = table(source / "0_merged" / "rank=0", "nodes")
    (call,) = rows.filter((pl.col("kind") == "runtime") & (pl.col("step") == 2))["node_id"]
    assert run("slice", source, "--node", call, "-o", tmp_path / "out").code == 0
    assert names(tmp_path / "out") == ["cudaLaunchKernel", "late"]


def test_an_annotation_around_all_steps_is_left_out_and_its_children_lose_their_parent(tmp_path):
    source = small(tmp_path)
    done = run("slice", source, "--steps", "3", "-o", tmp_path / "out")
    assert "now null: parent 2, launch 1" in done.out  # of the step the epoch, of the kernel its op
    nodes = table(tmp_path / "out" / "rank=0", "nodes")
    by_name = {row["name"]: row for row in nodes.iter_rows(named=True)}
    assert by_name["ProfilerStep#3"]["parent_id"] is None
    # 50 us, of which the op takes 10; what was around it changes neither.
    assert (by_name["ProfilerStep#3"]["self_dur_ns"], by_name["aten::mm"]["self_dur_ns"]) == (40_000, 10_000)
    assert "epoch" not in by_name


def test_the_annotation_of_a_phase_that_reaches_into_the_step_stays(tmp_path):
    TraceBuilder().annotation("input_wait", 0, 30).step(1, 20, 50).op("a", 40, 5).write(tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    assert run("slice", tmp_path / "run", "--steps", "1", "-o", tmp_path / "out").code == 0
    times = phase_times(MergedTrace(0, tmp_path / "out" / "rank=0"))
    assert times.select("phase", "wall_ns").rows() == [("input_wait", 10_000), (None, 40_000)]


def test_ranks_that_lack_the_steps_are_left_out_and_named(tmp_path):
    for rank, step in ((0, 1), (1, 2)):
        built = TraceBuilder(rank=rank, pid=100 + rank, world_size=2).step(step, 0, 10).op("a", 1, 2)
        built.write(tmp_path / "run", rank)
    assert run("merge", tmp_path / "run").code == 0
    done = run("slice", tmp_path / "run", "--steps", "2", "-o", tmp_path / "out")
    assert "note: none of these steps is on rank 0, which is left out" in done.out
    assert [*ranks_of(tmp_path / "out")] == [1]


def test_the_run_that_a_slice_was_cut_from_is_named_through_slices_of_slices(tmp_path):
    shutil.copytree(SAMPLES / "plain_loop", tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    run_id = json.loads((tmp_path / "run" / "0_run" / "rank-0.json").read_text())["run_id"]
    assert run("slice", tmp_path / "run", "--steps", "2-3", "-o", tmp_path / "a").code == 0
    assert run("slice", tmp_path / "a", "--steps", "3", "-o", tmp_path / "b").code == 0
    first, second = (link_of(tmp_path / name / "rank=0")["slice"] for name in "ab")
    assert first["source"]["run_id"] == run_id
    assert first["source"]["made_from"]["windows"][0]["host"]["name"] == "rank-0.json.gz"
    assert (first["steps"], first["ranks"], first["node_id"]) == ([2, 3], [0], None)
    assert second["source"]["slice"] == first
    assert second["steps"] == [3]


def test_a_merge_never_takes_a_slice_for_its_own(tmp_path):
    source = small(tmp_path)
    assert run("slice", source, "--steps", "2", "-o", tmp_path / "out").code == 0
    assert link_of(tmp_path / "out" / "rank=0")["made_from"] is None
    # Asked to merge there all the same, it merges.
    assert "unchanged" not in run("merge", source, "-o", tmp_path / "out").out
    assert table(tmp_path / "out" / "rank=0", "steps")["step"].to_list() == [1, 2, 3]


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def test_the_source_is_only_read_and_nothing_is_written_over(tmp_path):
    source = small(tmp_path)
    before = digest(source)
    out = tmp_path / "deep" / "er" / "out"
    assert run("slice", source, "--steps", "2", "-o", out).code == 0
    assert run("slice", source, "--node", "1", "-o", tmp_path / "node").code == 0
    made = digest(out)
    refused(run("slice", source, "--steps", "3", "-o", out), str(out), "exists already", "new folder")
    (tmp_path / "empty").mkdir()
    refused(run("slice", source, "--steps", "3", "-o", tmp_path / "empty"), "exists already")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(run("slice", source, "--steps", "3", "-o", tmp_path / "dangling"), "exists already")
    refused(run("slice", source, "--steps", "3", "-o", source / "0_merged" / "x"), "lies in the run", "elsewhere")
    named = tmp_path / "other" / "0_merged"
    shutil.copytree(source / "0_chakra", named.parent / "0_chakra")
    refused(run("slice", source, "--steps", "3", "-o", named), "where a merge of run 0 would write")
    assert (digest(source), digest(out)) == (before, made)
    assert not list(tmp_path.rglob("*.part"))


def test_what_is_not_there_is_said_with_what_there_is(tmp_path):
    source, out = small(tmp_path), tmp_path / "out"
    refused(run("slice", source, "--steps", "2-4", "-o", out), "has no step 4; it has 1-3.")
    refused(run("slice", source, "--steps", "1", "--ranks", "0-1", "-o", out), "has no merged rank 1; it has 0.")
    refused(run("slice", source, "--node", "99", "-o", out), "has no node 99; its", "rows are numbered from 0")
    refused(run("slice", source, "--node", "1", "--rank", "7", "-o", out), "has no merged rank 7; it has 0.")
    refused(run("slice", tmp_path / "none", "--steps", "1", "-o", out), "does not exist")
    (source / "0_merged").rename(tmp_path / "away")
    done = run("slice", source, "--steps", "1", "-o", out)
    assert (done.code, done.out) == (1, "")
    assert f"{source} holds no merged rank. Merge it first: chakra-capture merge {source}" in done.err
    TraceBuilder().op("a", 0, 5).merged(tmp_path / "unmarked" / "rank=0")
    shutil.copytree(tmp_path / "unmarked" / "rank=0" / "out", tmp_path / "plain" / "rank=0")
    refused(run("slice", tmp_path / "plain", "--steps", "1", "-o", out), "marks no step", "ranks or a node")
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing says what is to stay"),
        (("--steps", "x"), "is no number or range"),
        (("--ranks", "3-1"), "ends before it begins"),
        (("--rank", "0"), "--rank is for --node"),
        (("--node", "1", "--steps", "1"), "--node goes with neither"),
        (("--node", "-1"), "negative"),
    ],
)
def test_wrong_usage_is_one_sentence(tmp_path, options, says):
    done = run("slice", small(tmp_path), *options, "-o", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_node_needs_a_rank_where_there_are_several(merged, tmp_path):
    done = run("slice", merged("digits_ddp2_gloo"), "--node", "1", "-o", tmp_path / "out")
    assert done.code == 2
    assert "Give --rank, too." in done.err


@pytest.mark.parametrize("name", ["nodes.parquet", "edges.parquet", "steps.parquet", "communication.parquet"])
def test_a_damaged_table_costs_one_sentence_and_leaves_nothing(tmp_path, name):
    source = small(tmp_path)
    path = source / "0_merged" / "rank=0" / name
    path.write_bytes(path.read_bytes()[:-9])
    refused(run("slice", source, "--steps", "2", "-o", tmp_path / "out"), "Merge")
    assert {each.name for each in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"windows": [{}]}'])
def test_a_damaged_link_json_costs_one_sentence(tmp_path, text):
    source = small(tmp_path)
    (source / "0_merged" / "rank=0" / "link.json").write_bytes(text)
    refused(run("slice", source, "--steps", "2", "-o", tmp_path / "out"), "link.json", "Merge this rank again.")
    assert {each.name for each in tmp_path.iterdir()} == {"run"}


def test_a_full_disk_costs_one_sentence_and_leaves_nothing(merged, tmp_path):
    source = merged(TWIN)
    with files_end_at(20_000):
        done = run("slice", source, "--steps", "5", "-o", tmp_path / "out")
    refused(done, "cannot be written", "File too large")
    assert not list(tmp_path.iterdir())


def test_a_window_that_marks_several_steps_of_one_number_keeps_both(tmp_path):
    for cycle in (0, 1):
        TraceBuilder().step(4, 1000 * cycle, 50).op("a", 1000 * cycle + 5, 10).write(tmp_path / "run", cycle=cycle)
    assert run("merge", tmp_path / "run").code == 0
    assert run("slice", tmp_path / "run", "--steps", "4", "-o", tmp_path / "out").code == 0
    assert table(tmp_path / "out" / "rank=0", "steps").select("window", "step").rows() == [(0, 4), (1, 4)]
    assert table(tmp_path / "out" / "rank=0", "steps").schema == STEPS.schema
