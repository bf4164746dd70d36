"""Real gloo runs (DDP, FSDP2, tensor parallel, sub-groups, all collectives, send and recv, objects) against what the
ranks themselves wrote down."""

import json
import shutil
import sys
from collections import Counter

import polars as pl
import pytest
import warm
from export.exported import PROFILES, errors, exported, ranks_of, walked
from export.feeder_walk import defects, without_successor

from chakra_capture.export.et_schema import CollectiveType, NodeType
from chakra_capture.merge.across.alignment import align_run
from chakra_capture.merge.across.outcome import RunFacts
from chakra_capture.merge.many.run import merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import find_run
from chakra_capture.trace.merged import MergedTrace
from integrations.communication_job import STEPS
from integrations.test_lightning_ddp import environment

SIZES = (2, 4)
LATE_MS = 60
TOLD = ["collective", "process_group", "in_bytes", "out_bytes", "root", "peer", "tag"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of the run of each number of ranks, merged."""
    found = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        command = [sys.executable, "-m", "integrations.communication_job", str(folder), str(size), str(LATE_MS)]
        done = warm.run(command, timeout=300, env=environment())
        assert done.returncode == 0, done.stderr
        run = find_run(folder / "t")
        reports = merge_run(run, run.merged_dir, MergeOptions(), workers=1)
        assert [report.error for report in reports] == [None] * size
        found[size] = folder
    return found


def merged(folder, rank):
    return MergedTrace(rank, folder / "t" / "0_merged" / f"rank={rank}")


def truth(folder, rank):
    return json.loads((folder / f"truth-{rank}.json").read_text())


CASES = [(size, rank) for size in SIZES for rank in range(size)]


@pytest.mark.parametrize(("size", "rank"), CASES)
def test_every_operation_has_the_group_sizes_root_and_peer_that_the_rank_really_used(runs, size, rank):
    table = merged(runs[size], rank).communication
    for step, expected in truth(runs[size], rank).items():
        found = table.filter(step=int(step)).select(TOLD)
        assert [list(row) for row in found.iter_rows()] == expected
    assert table["step"].to_list() == sorted(table["step"].to_list())
    assert set(table["step"]) == set(STEPS)


@pytest.mark.parametrize("size", SIZES)
def test_host_traces_alone_tell_the_same_of_every_operation(runs, size, tmp_path):
    folder = tmp_path / "t"
    for part in ("0_chakra", "0_run"):
        shutil.copytree(runs[size] / "t" / part, folder / part)
    run = find_run(folder)
    assert [report.error for report in merge_run(run, run.merged_dir, MergeOptions(), workers=1)] == [None] * size
    for rank in range(size):
        table = merged(tmp_path, rank).communication
        expected = [row for rows in truth(runs[size], rank).values() for row in rows]
        assert [list(row) for row in table.select(TOLD).iter_rows()] == expected
        whole = merged(runs[size], rank).communication
        same = ["dtype", "seq", "group_ranks", "mesh_dim"]
        assert table.select(same).equals(whole.select(same))
        assert table["ts_ns"].null_count() == table.height
    alignment = json.loads((run.merged_dir / "alignment.json").read_text())
    assert alignment["num_operations"] == alignment["num_matched"] == operations_of_the_run(runs[size], size)


@pytest.mark.parametrize(("size", "rank"), CASES)
def test_members_and_mesh_dimensions_are_those_of_the_job(runs, size, rank):
    table = merged(runs[size], rank).communication
    groups = {
        row["process_group"]: (row["mesh_dim"], row["group_ranks"])
        for row in table.select("process_group", "mesh_dim", "group_ranks").to_dicts()
    }
    members = [rank - rank % 2, rank - rank % 2 + 1]
    world = list(range(size))
    assert groups["0"] == (None, world)
    # Where a dimension is the whole world torch serves it with the default group, whose description names no dimension.
    assert size == 2 or all((dim, members) in groups.values() for dim in ("tp", "shard"))
    assert ("replicate", list(range(rank % 2, size, 2))) in groups.values()
    assert [group for name, group in groups.items() if name != "0"].count((None, world)) == (2 if size == 2 else 1)
    if rank < 2:
        assert (None, [0, 1]) in groups.values()


@pytest.mark.parametrize(("size", "rank"), CASES)
def test_every_row_of_an_operation_carries_its_group_and_bytes(runs, size, rank):
    trace = merged(runs[size], rank)
    nodes = trace.nodes.filter(pl.col("collective").is_not_null())
    assert nodes["process_group"].null_count() == 0
    assert nodes["comm_bytes"].null_count() == 0
    table = trace.communication
    joined = table.join(nodes.select("node_id", "process_group", "comm_bytes"), on="node_id", suffix="_of_node")
    assert joined.height == table.height
    assert (joined["process_group"] == joined["process_group_of_node"]).all()
    assert (joined["comm_bytes"] == joined["comm_bytes_of_node"]).all()


@pytest.mark.parametrize(("size", "rank"), CASES)
def test_sequence_numbers_count_up_within_each_group(runs, size, rank):
    table = merged(runs[size], rank).communication.filter(~pl.col("collective").is_in(["send", "recv"]))
    assert table["seq"].null_count() == 0
    for (name,), group in table.group_by("process_group"):
        steps = group.select("collective", up=pl.col("seq").shift(-1) - pl.col("seq"))
        others = steps.filter(pl.col("collective") != "reduce_scatter")["up"].drop_nulls()
        assert others.to_list() == [1] * len(others)
        # Gloo runs, and counts, an all_reduce for each tensor of a reduce_scatter: the job has two of 2, one of a list.
        further = len(STEPS) * (1 + 1 + size - 1) if name == "0" else 0
        assert steps["up"].sum() == len(steps) - 1 + further


def test_reduce_scatter_says_what_gloo_runs_in_its_place(runs):
    table = merged(runs[2], 0).communication
    assert set(table.filter(collective="reduce_scatter")["algorithm"]) == {"all_reduce"}
    assert (
        table.filter(collective="all_gather")["algorithm"].null_count() == table.filter(collective="all_gather").height
    )


def operations_of_the_run(folder, size):
    """How many operations the ranks' own notes make: those of a group counted once, a send and its recv too."""
    num_sends, in_group = 0, {}
    for rank in range(size):
        for rows in truth(folder, rank).values():
            num_sends += sum(row[0] == "send" for row in rows)
        listed = [row[1] for rows in truth(folder, rank).values() for row in rows if row[0] not in ("send", "recv")]
        for group in set(listed):
            in_group.setdefault(group, set()).add(listed.count(group))
    assert all(len(counts) == 1 for counts in in_group.values())
    return num_sends + sum(counts.pop() for counts in in_group.values())


@pytest.mark.parametrize("size", SIZES)
def test_every_operation_is_matched_on_all_of_its_members(runs, size):
    folder = runs[size] / "t" / "0_merged"
    alignment = json.loads((folder / "alignment.json").read_text())
    assert alignment["num_operations"] == alignment["num_matched"] == operations_of_the_run(runs[size], size)
    assert [group["first_mismatch"] for group in alignment["groups"] if group["first_mismatch"]] == []
    table = pl.read_parquet(folder / "collectives.parquet")
    assert (table["num_found"] == table["num_ranks"]).all()
    assert table["mismatch"].null_count() == table.height
    members = {group["process_group"]: set(group["ranks"]) for group in alignment["groups"]}
    for (group, collective), rows in table.group_by("process_group", "collective"):
        if collective not in ("send", "recv"):
            assert set(rows["rank"]) == members[group], (group, collective)
    # Both sides of a send are one operation.
    sides = (
        table.filter(pl.col("collective").is_in(["send", "recv"])).group_by("collective_id").agg("collective", "rank")
    )
    assert all(sorted(pair) == ["recv", "send"] for pair in sides["collective"].to_list())
    # All ranks ran on this machine, so on one clock.
    assert {clock["offset_ns"] for clock in alignment["clocks"].values()} == {0}
    assert table["wait_ns"].null_count() == 0
    assert (table["wait_ns"] >= 0).all()


def run_table(folder):
    return pl.read_parquet(folder / "t" / "0_merged" / "collectives.parquet")


def expected_operations(folder, size):
    """Sets of (rank, node) that are one operation: k-th of the group, or of source, destination and tag."""
    sets = {}
    for rank in range(size):
        nodes = iter(merged(folder, rank).communication["node_id"])
        counts = {}
        for rows in truth(folder, rank).values():
            for collective, group, _, _, _, peer, tag in rows:
                # Group names of dimensions differ by rank, of one group they do not.
                if collective == "recv" and peer is None:  # from any of the pair, which is one
                    peer = 1 - rank
                ends = {"send": (rank, peer, tag), "recv": (peer, rank, tag)}.get(collective)
                number = counts[group, ends] = counts.get((group, ends), -1) + 1
                sets.setdefault((group, ends, number), set()).add((rank, next(nodes)))
    return {frozenset(members) for members in sets.values()}


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_one_operation_are_those_that_the_ranks_counted_alike(runs, size):
    found = run_table(runs[size]).group_by("collective_id").agg("rank", "node_id")
    sets = {frozenset(zip(ranks, nodes, strict=True)) for _, ranks, nodes in found.iter_rows()}
    assert sets == expected_operations(runs[size], size)


@pytest.mark.parametrize("size", SIZES)
def test_the_others_wait_for_a_rank_that_sleeps(runs, size):
    slept = run_table(runs[size]).filter(collective="all_reduce", comm_bytes=404)
    assert slept["collective_id"].n_unique() == len(STEPS)
    assert slept["last_rank"].unique().to_list() == [size - 1]
    waits = slept.filter(pl.col("rank") != size - 1)["wait_ns"]
    # They leave the operation before it some ms apart, on a machine that is busy tens of them.
    assert waits.median() > LATE_MS / 2 * 1_000_000
    own = {r: merged(runs[size], r).communication.filter(collective="all_reduce", comm_bytes=404) for r in range(size)}
    for at in range(len(STEPS)):
        arrivals = [own[rank]["ts_ns"][at] for rank in range(size)]
        found = slept.sort("collective_id", "rank")["wait_ns"][at * size : (at + 1) * size].to_list()
        assert found == [max(arrivals) - arrival for arrival in arrivals]


@pytest.mark.parametrize("size", SIZES)
def test_clocks_planted_into_a_real_run_are_found(runs, size, tmp_path):
    planted = {rank: 37_000_000 * (-1) ** rank for rank in range(1, size)}
    folders = {}
    for rank in range(size):
        folders[rank] = tmp_path / f"rank={rank}"
        folders[rank].mkdir()
        table = merged(runs[size], rank).communication.with_columns(pl.col("ts_ns") + planted.get(rank, 0))
        table.write_parquet(folders[rank] / "communication.parquet")
    clocks = align_run(tmp_path, folders, RunFacts(world_size=size)).clocks
    whole = run_table(runs[size]).filter(pl.col("num_found") == size).group_by("collective_id")
    durations = whole.agg(pl.col("end_ns").max() - pl.col("arrival_ns").max())["end_ns"]
    for rank, offset in planted.items():
        assert clocks[rank].low_ns <= offset <= clocks[rank].high_ns
        assert abs(clocks[rank].offset_ns - offset) < durations.median()


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for size, profile in [(size, profile) for size in SIZES for profile in PROFILES]:
        exported(runs[size] / "t", folder / f"{size}-{profile}", profile)
    return folder


@pytest.mark.parametrize(("size", "profile"), [(size, profile) for size in SIZES for profile in PROFILES])
def test_export_of_all_ways_to_communicate_runs_to_its_end_in_a_simulator(exports, size, profile):
    folder = exports / f"{size}-{profile}"
    assert errors(folder, profile) == set()
    done = walked(folder, full=profile == "full")
    for rank, of in ranks_of(folder).items():
        assert defects(of) == []
        assert without_successor(of) == []
        assert len(done.issued[rank]) == len(of.nodes)


LOWERED = {"reduce": "ALL_REDUCE", "barrier": "ALL_REDUCE", "gather": "ALL_GATHER", "scatter": "BROADCAST"}


def test_exported_operations_have_the_types_and_bytes_that_the_ranks_noted(runs, exports):
    """Of each the largest amount that a member puts in, which is how a simulator takes one for all."""
    size = 4  # of which no group has one rank alone
    noted, largest = {rank: [] for rank in range(size)}, {}
    for rank in range(size):
        number = Counter()
        for collective, group, put, *_ in (row for rows in truth(runs[size], rank).values() for row in rows):
            if collective not in ("send", "recv"):
                one = (group, number[group])
                number[group] += 1
                noted[rank].append((LOWERED.get(collective, collective.upper()), one))
                largest[one] = max(largest.get(one, 0), 1 if collective == "barrier" else put)
    for rank, of in ranks_of(exports / f"{size}-astra").items():
        found = Counter(
            (CollectiveType(node.attrs["comm_type"]).name, node.attrs["comm_size"])
            for node in of.communication
            if node.type == NodeType.COMM_COLL_NODE
        )
        assert found == Counter((name, largest[one]) for name, one in noted[rank])
