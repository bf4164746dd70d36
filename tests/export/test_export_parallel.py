"""Real gloo runs (DDP, FSDP2, sub-groups, pipeline, all_to_all) as exports, against what their jobs must communicate,
and broken ones, which ``validate`` names."""

import json
import random
import shutil

import polars as pl
import pytest
from commands import refused, run

from chakra_capture.export.et_schema import CollectiveType
from chakra_capture.merge.across.alignment import align_run
from chakra_capture.merge.across.outcome import RunFacts
from export.exported import (
    PROFILES,
    errors,
    exported,
    findings,
    groups_of,
    ranks_of,
    recorded_parallel,
    walked,
)
from export.feeder_walk import COLL, COMP, METADATA, SEND, HangError, defects, longest_path_us, without_successor

RUNS = {"two": 2, "four": 4}
CASES = [(name, profile) for name in RUNS for profile in PROFILES]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return recorded_parallel(tmp_path_factory.mktemp("parallel") / "runs")


@pytest.fixture(scope="module")
def exports(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for name, profile in CASES:
        exported(recorded / name / "t", folder / f"{name}-{profile}", profile)
    return folder


def expected(recorded, name, rank):
    return json.loads((recorded / name / f"expected-{rank}.json").read_text())


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_export_has_no_error_and_every_node_of_every_rank_is_issued(exports, name, profile):
    folder = exports / f"{name}-{profile}"
    assert errors(folder, profile) == set()
    ranks, done = ranks_of(folder), walked(folder, full=profile == "full")
    assert {rank: sorted(ids) for rank, ids in done.issued.items()} == {
        rank: sorted(node.id for node in of.nodes) for rank, of in ranks.items()
    }
    assert len(ranks) == RUNS[name]
    for rank in ranks.values():
        assert defects(rank) == []
        assert without_successor(rank) == []


@pytest.mark.parametrize("name", RUNS)
def test_ranks_of_any_speed_never_wait_for_each_other_for_ever(exports, name):
    """Groups that are at work side by side are the trap: one rank may get to the second one first."""
    for seed in range(5):
        draw = random.Random(seed)
        factor = {}

        def duration(rank, node, draw=draw, factor=factor):
            return int(node.duration_us * factor.setdefault((rank, node.id), 8 ** draw.uniform(-1, 1)))

        walked(exports / f"{name}-astra", duration=duration)


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_collectives_have_the_type_size_and_group_of_the_job(recorded, exports, name, profile):
    folder = exports / f"{name}-{profile}"
    groups = groups_of(folder)
    assert groups[1] == [*range(RUNS[name])]
    assert sorted(groups) == [*range(1, len(groups) + 1)]
    for number, rank in ranks_of(folder).items():
        found = {}
        for node in sorted(rank.communication, key=lambda one: one.id):
            if node.type == COLL:
                assert node.attrs["pg_name"].isdecimal()
                members = ",".join(map(str, groups[int(node.attrs["pg_name"])]))
                kind = CollectiveType(node.attrs["comm_type"]).name
                found.setdefault(members, []).append([kind, node.attrs["comm_size"]])
        assert found == expected(recorded, name, number)["collectives"]


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_sends_and_receives_have_the_ends_tag_and_size_of_the_job(recorded, exports, name, profile):
    for number, rank in ranks_of(exports / f"{name}-{profile}").items():
        found = [
            [
                "SEND" if node.type == SEND else "RECV",
                *(node.attrs[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size")),
            ]
            for node in sorted(rank.communication, key=lambda one: one.id)
            if node.type != COLL
        ]
        assert sorted(found) == sorted(expected(recorded, name, number)["transfers"])


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_nodes_are_of_types_that_the_profile_may_have_and_no_communication_is_on_the_cpu(exports, name, profile):
    for rank in ranks_of(exports / f"{name}-{profile}").values():
        types = {node.type for node in rank.nodes} - {node.type for node in rank.communication}
        assert types == ({COMP} if profile == "astra" else {COMP, METADATA})
        assert not any(node.on_cpu for node in rank.communication)
        assert all(type(node.attrs["is_cpu_op"]) is bool for node in rank.nodes)
        assert all(node.start_us > 0 for node in rank.nodes)


@pytest.mark.parametrize("name", RUNS)
def test_longest_path_is_the_measured_span_unless_validate_says_otherwise(exports, name):
    """A thread that gets no core for more than a millisecond after an operation looks as if it had worked."""
    found = findings(exports / f"{name}-astra")
    odd = {place["rank"] for place in found.get("V13-path-and-span", {"places": []})["places"]}
    for number, rank in ranks_of(exports / f"{name}-astra").items():
        span = max(one.start_us + one.duration_us for one in rank.nodes) - min(one.start_us for one in rank.nodes)
        assert (abs(longest_path_us(rank) - span) > span / 10) == (number in odd)


# Broken runs


def broken(recorded, name, target, change):
    """A copy of a merged run of which ``change`` has edited the table of communication of the last rank."""
    shutil.copytree(recorded / name / "t" / "0_merged", target)
    folders = {rank: target / f"rank={rank}" for rank in range(RUNS[name])}
    path = folders[RUNS[name] - 1] / "communication.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    align_run(target, folders, RunFacts(world_size=RUNS[name]))
    return target


def place_of(table, collective, nth=0):
    return table.with_row_index().filter(collective=collective)["index"][nth]


def swapped(table, one, other):
    """Two operations changed places: each ran when and where the other did."""
    stays = ["node_id", "host_node_id", "issued_ns", "ts_ns", "dur_ns"]
    order = [other if at == one else one if at == other else at for at in range(len(table))]
    moved = table[order].with_columns(table[name] for name in stays)
    return moved.select(table.columns)


def first(found):
    place = found["places"][0]
    return place["rank"], place["name"], place["detail"]


def test_two_collectives_of_a_group_in_another_order_on_one_rank_are_named(recorded, tmp_path):
    def change(table):
        return swapped(table, place_of(table, "all_gather"), place_of(table, "reduce_scatter"))

    exported(broken(recorded, "two", tmp_path / "run", change), tmp_path / "et")
    found = findings(tmp_path / "et")
    rank, _, detail = first(found["V15-order-differs"])
    assert rank == 1
    assert detail.startswith("group 1, collective 2: REDUCE_SCATTER, rank 0 (node ")
    assert detail.endswith("has ALL_GATHER")
    with pytest.raises(HangError):
        walked(tmp_path / "et")


def test_size_that_differs_on_one_rank_is_named(recorded, tmp_path):
    def change(table):
        at = pl.int_range(pl.len()) == place_of(table, "all_reduce")
        return table.with_columns(pl.when(at).then(pl.col("comm_bytes") + 4).otherwise("comm_bytes"))

    exported(broken(recorded, "two", tmp_path / "run", change), tmp_path / "et")
    rank, name, detail = first(findings(tmp_path / "et")["V15-size-differs"])
    assert (rank, name) == (1, "gloo:all_reduce")
    assert detail.startswith("group 1, collective 1: 844 bytes, rank 0 (node ")
    assert detail.endswith("has 840")


def test_two_groups_in_opposite_orders_are_named(recorded, tmp_path):
    def change(table):
        return swapped(table, place_of(table, "reduce_scatter"), place_of(table, "all_reduce", 1))

    said = exported(broken(recorded, "four", tmp_path / "run", change), tmp_path / "et")
    assert said["counts"]["operations that ranks have in opposite orders, left without one"] >= 1
    groups = groups_of(tmp_path / "et")
    pair = next(number for number, members in groups.items() if members == [2, 3])
    _, _, detail = first(findings(tmp_path / "et")["V17-crossed"])
    assert "rank 3 has collective " in detail
    assert f"of group {pair}" in detail
    assert "of group 1" in detail
    with pytest.raises(HangError):
        walked(tmp_path / "et")


def test_send_that_is_not_recorded_on_the_other_side_is_named(recorded, tmp_path):
    def change(table):
        return table.filter(pl.int_range(pl.len()) != place_of(table, "recv"))

    exported(broken(recorded, "two", tmp_path / "run", change), tmp_path / "et")
    rank, _, detail = first(findings(tmp_path / "et")["V18-unpaired"])
    assert rank == 0
    assert detail == "rank 0 to rank 1, tag 0: 2 sent, 1 received"


def test_rank_that_recorded_another_step_is_named(recorded, tmp_path):
    exported(recorded / "other-step" / "t", tmp_path / "et")
    rank, _, detail = first(findings(tmp_path / "et")["V19-steps-differ"])
    assert (rank, detail) == (1, "[2], and rank 0 has [1]")


@pytest.mark.parametrize(("lost", "check"), [(0, "V1-rank-missing"), (1, "V14-group-outside")])
def test_rank_that_is_not_there_is_told_by_the_export_and_named_by_validate(recorded, tmp_path, lost, check):
    shutil.copytree(recorded / "two" / "t" / "0_merged", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / f"rank={lost}")
    done = run("export", "et", tmp_path / "run", "-o", tmp_path / "et")
    assert done.code == 0
    assert "1 ranks of the run not merged, which simulators will miss" in done.out
    assert [path.name for path in (tmp_path / "et").glob("*.et")] == [f"chakra.{1 - lost}.et"]
    found = findings(tmp_path / "et")
    assert found[check]["level"] == "error"
    rank, _, detail = first(found[check])
    assert (rank, detail) == ((0, "") if lost == 0 else (None, "group 1 has rank 1, and there are 1 ranks"))


@pytest.mark.parametrize("table", ["nodes.parquet", "communication.parquet", "link.json"])
def test_rank_whose_tables_are_damaged_is_an_error_and_the_others_are_written(recorded, tmp_path, table):
    shutil.copytree(recorded / "two" / "t" / "0_merged", tmp_path / "run")
    for rank in (1, 0):
        path = tmp_path / "run" / f"rank={rank}" / table
        path.write_bytes(path.read_bytes()[:-100])
        done = run("export", "et", tmp_path / "run", "-o", tmp_path / f"et-{rank}")
        assert (done.code, "Traceback" in done.err) == (1, False)
        assert f"rank={rank}" in done.err
        assert table in done.err
    assert sorted(ranks_of(tmp_path / "et-1")) == [0]
    assert not [*(tmp_path / "et-0").glob("*.et")]


def test_export_over_another_one_leaves_no_rank_of_that_beside_its_own(recorded, tmp_path):
    exported(recorded / "four" / "t", tmp_path / "et")
    shutil.copytree(recorded / "two" / "t" / "0_merged", tmp_path / "run")
    refused(run("export", "et", tmp_path / "run", "-o", tmp_path / "et"), "holds an export already", "--overwrite")
    assert sorted(ranks_of(tmp_path / "et")) == [0, 1, 2, 3]
    path = tmp_path / "run" / "rank=1" / "edges.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    refused(run("export", "et", tmp_path / "run", "-o", tmp_path / "et", "--overwrite"), "rank 1 was not exported")
    assert sorted(ranks_of(tmp_path / "et")) == [0]
