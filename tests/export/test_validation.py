"""``validate`` names every planted defect by its rule, rank and node, and nothing else on files that are right."""

import gzip
import json
from collections.abc import Callable

import pytest
from commands import refused, run

from export.et_writer import (
    ALL_GATHER,
    ALL_REDUCE,
    COLL,
    COMP,
    Node,
    Run,
    coll,
    comp,
    et,
    healthy,
    metadata,
    p2p,
    record,
    varint,
)


def validated(folder, *options):
    done = run("validate", folder, "--json", *options)
    assert done.err == ""
    said = json.loads(done.out)
    assert said["schema_version"] == 1
    assert done.code == (0 if said["is_valid"] else 1)
    return said


def checks(said) -> set[str]:
    return {one["check"] for one in said["findings"]}


def change(rank: int, node_id: int, **changes: object) -> Callable[[Run], None]:
    return lambda given: given.put(rank, given.node(rank, node_id).but(**changes))


def attr(rank: int, node_id: int, name: str, kind: str | None, value: object) -> Callable[[Run], None]:
    return lambda given: given.put(rank, given.node(rank, node_id).having(name, kind, value))


def no_attr(rank: int, node_id: int, name: str) -> Callable[[Run], None]:
    return lambda given: given.put(rank, given.node(rank, node_id).without(name))


def both(node_id: int, name: str, kind: str, value: object) -> Callable[[Run], None]:
    def plant(given: Run) -> None:
        for rank in (0, 1):
            attr(rank, node_id, name, kind, value)(given)

    return plant


def groups(text: str | None) -> Callable[[Run], None]:
    return lambda given: setattr(given, "groups", text)


def added(rank: int, *nodes: Node) -> Callable[[Run], None]:
    return lambda given: given.add(rank, *nodes)


def data(rank: int, made: Callable[[bytes], bytes]) -> Callable[[Run], None]:
    return lambda given: given.data.update({rank: made(et(given.ranks[rank]))})


def no_durations(given: Run) -> None:
    for one in (1, 2, 7, 8):
        change(0, one, dur=0, start=0)(given)


def crossed(given: Run) -> None:
    """Rank 1 has its second collective, of group 2, before its first, of group 1."""
    third, fourth = given.node(1, 3), given.node(1, 4)
    given.put(1, fourth.but(data=(2,)))
    given.put(1, third.but(data=(4,)))
    given.put(1, given.node(1, 5).but(data=(3,)))


def unchained(given: Run) -> None:
    given.put(1, given.node(1, 5).but(data=(2,)))
    given.put(1, given.node(1, 6).but(data=(4, 5)))


def not_waited_for(given: Run) -> None:
    change(0, 3, data=(1,))(given)
    change(0, 8, ctrl=())(given)


def swapped(given: Run) -> None:
    """Rank 1's two collectives of group 1 have changed places."""
    attr(1, 3, "comm_type", "int64_val", ALL_GATHER)(given)
    attr(1, 5, "comm_type", "int64_val", ALL_REDUCE)(given)


def one_collective_fewer(given: Run) -> None:
    given.drop(1, 5)
    change(1, 6, data=(4,))(given)


def no_receive(given: Run) -> None:
    given.drop(1, 6)
    change(1, 7, data=(5,))(given)


def duplicate_attribute(given: Run) -> None:
    node = given.node(0, 3)
    given.put(0, node.but(attrs=(*node.attrs, ("comm_size", "int64_val", 4096))))


def everything_waits(given: Run) -> None:
    given.ranks[0] = [one.but(data=(*one.data, 8)) for one in given.ranks[0] if one.id != 8]
    given.add(0, comp(8, (1,), start=240, dur=5, cpu=True))


def groups_differ(given: Run) -> None:
    """Both ranks list their groups as torch's observer does; one of them with other members."""
    for rank, members in ((0, [0, 1]), (1, [1])):
        listed = json.dumps([{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "7", "ranks": members}])
        node = Node(90, COMP, "## process_group:init ##", (1,), dur=1, attrs=(("is_cpu_op", "bool_val", True),))
        given.add(rank, node.but(values=str([listed])))


def steps_differ(given: Run) -> None:
    given.heads = {0: metadata(steps="5"), 1: metadata(steps="6")}


def no_pg_names(given: Run) -> None:
    for rank in (0, 1):
        given.put(rank, given.node(rank, 3).without("pg_name"))
        attr(rank, 5, "pg_name", "string_val", "0")(given)


def lonely(given: Run) -> None:
    """A group of rank 1 alone."""
    given.groups = '{"1": [0, 1], "2": [0, 1], "3": [1]}'


# What is planted, the check that names it, rank and node of its first place, and what its detail holds.
PLANTED = [
    ("cut", data(0, lambda text: text[:-3]), "V1-damaged", 0, None, "the file ends after"),
    ("cut in a length", data(0, lambda text: text + b"\x80"), "V1-damaged", 0, None, "cut within its length"),
    ("a record too large", data(0, lambda text: text + varint(1 << 30)), "V1-damaged", 0, None, "1,073,741,824 bytes"),
    ("an empty record", data(0, lambda text: text + b"\0"), "V1-damaged", 0, None, "empty"),
    ("no node", data(0, lambda text: text + record(b"\xff\xff\xff")), "V1-damaged", 0, None, "no Chakra node"),
    ("no length", data(0, lambda text: text + b"\xff" * 9), "V1-damaged", 0, None, "does not begin with a length"),
    ("text", data(0, lambda text: b'{"schema": "1.1.1"}'), "V1-damaged", 0, None, "it looks like JSON"),
    ("no metadata", data(0, lambda text: text[text[0] + 1 :]), "V1-no-metadata", 0, None, "chakra.0.et"),
    ("gzip", data(1, gzip.compress), "V1-compressed", 1, None, "chakra.1.et"),
    ("read-only", lambda given: given.modes.update({0: 0o444}), "V1-read-only", 0, None, "chakra.0.et"),
    ("padded", lambda given: given.names.update({1: "chakra.01.et"}), "V1-name", None, None, "chakra.01.et"),
    ("a gap", lambda given: given.names.update({1: "chakra.2.et"}), "V1-rank-missing", 1, None, ""),
    ("two of one id", added(1, comp(7, (6,), start=210, dur=30)), "V2-duplicate-id", 1, 7, ""),
    ("data to nowhere", change(0, 2, data=(1, 99)), "V3-data-dangling", 0, 2, "node 99"),
    ("ctrl to nowhere", change(1, 2, ctrl=(0,)), "V3-ctrl-dangling", 1, 2, "node 0"),
    ("data twice", change(0, 4, data=(3, 3)), "V4-data-repeated", 0, 4, "node 3"),
    ("ctrl twice", change(0, 4, ctrl=(2, 2)), "V4-ctrl-repeated", 0, 4, "node 2"),
    ("itself", change(0, 7, data=(6, 7)), "V4-self-dependency", 0, 7, "node 7"),
    ("itself by ctrl", change(0, 7, ctrl=(7,)), "V4-self-dependency", 0, 7, "node 7"),
    ("a circle", change(0, 2, data=(1, 4)), "V5-cycle", 0, 2, "2 waits for 4 waits for 3 waits for 2; 7 of 8 nodes"),
    ("a circle by ctrl", change(1, 3, ctrl=(5,)), "V5-cycle", 1, 3, "3 waits for 5 waits for 4 waits for 3; 6 of 8"),
    ("no nodes", lambda given: given.ranks.update({0: []}), "V6-no-nodes", 0, None, ""),
    ("no root", everything_waits, "V6-no-root", 0, None, ""),
    ("metadata node", change(0, 7, type=1), "V7-metadata-node", 0, 7, ""),
    ("invalid node", change(0, 7, type=0), "V7-invalid-node", 0, 7, ""),
    ("a type to come", change(0, 7, type=9), "V7-unknown-type", 0, 7, "type 9"),
    ("a negative type", change(0, 7, type=-1), "V7-unknown-type", 0, 7, "type -1"),
    ("memory", change(0, 7, type=2), "V7-memory-node", 0, 7, ""),
    ("memory without size", change(0, 7, type=3), "V8-attribute-missing", 0, 7, "tensor_size"),
    ("attribute twice", duplicate_attribute, "V8-attribute-repeated", 0, 3, "comm_size, 2 times"),
    ("size as text", attr(0, 3, "comm_size", "string_val", "4096"), "V8-attribute-kind", 0, 3, "wanted int64_val"),
    ("type as float", attr(0, 3, "comm_type", "double_val", 0), "V8-attribute-kind", 0, 3, "comm_type in double_val"),
    ("group as number", attr(0, 3, "pg_name", "int64_val", 1), "V8-attribute-kind", 0, 3, "wanted string_val"),
    ("no value", attr(0, 3, "comm_size", None, None), "V8-attribute-kind", 0, 3, "no field"),
    ("size unsigned", attr(0, 3, "comm_size", "uint64_val", 4096), "V8-attribute-kind-old", 0, 3, "comm_size"),
    ("tag of 64 bits", attr(1, 6, "comm_tag", "int64_val", 3), "V8-attribute-kind-old", 1, 6, "wanted int32_val"),
    ("no type", no_attr(0, 3, "comm_type"), "V8-attribute-missing", 0, 3, "comm_type"),
    ("no size", no_attr(0, 3, "comm_size"), "V8-attribute-missing", 0, 3, "comm_size"),
    ("no tag", no_attr(0, 6, "comm_tag"), "V8-attribute-missing", 0, 6, "comm_tag"),
    ("no destination", no_attr(0, 6, "comm_dst"), "V8-attribute-missing", 0, 6, "comm_dst"),
    ("no source", no_attr(1, 6, "comm_src"), "V8-attribute-missing", 1, 6, "comm_src"),
    ("no is_cpu_op", no_attr(0, 2, "is_cpu_op"), "V8-is-cpu-op-missing", 0, 2, ""),
    ("a barrier", both(3, "comm_type", "int64_val", 9), "V9-comm-type-unsupported", 0, 3, "BARRIER"),
    ("a reduce", both(3, "comm_type", "int64_val", 1), "V9-comm-type-unsupported", 0, 3, "REDUCE"),
    ("no such collective", both(3, "comm_type", "int64_val", 17), "V9-comm-type-unknown", 0, 3, "type 17"),
    ("collective on CPU", attr(0, 3, "is_cpu_op", "bool_val", True), "V10-comm-on-cpu", 0, 3, ""),
    ("send on CPU", attr(0, 6, "is_cpu_op", "bool_val", True), "V10-comm-on-cpu", 0, 6, ""),
    ("nothing sent", both(3, "comm_size", "int64_val", 0), "V11-comm-size-zero", 0, 3, ""),
    ("less than nothing", both(3, "comm_size", "int64_val", -8), "V11-comm-size-negative", 0, 3, ""),
    ("a share", both(4, "comm_size", "int64_val", 1023), "V11-comm-size-share", 0, 4, "1,023 bytes, 2 ranks"),
    ("no durations", no_durations, "V12-no-durations", 0, None, "4 nodes"),
    ("one of no duration", change(0, 8, dur=0), "V12-zero-duration", 0, 8, "25.0 %"),
    ("not waited for", not_waited_for, "V13-no-successor", 0, 2, ""),
    ("at the start", change(0, 3, data=()), "V13-collective-at-start", 0, 3, ""),
    ("a gap of the CPU", change(0, 8, start=2400), "V13-path-and-span", 0, None, "path 145 us, measured 2,305 us"),
    ("waits twice", change(0, 8, dur=500, start=0), "V13-path-and-span", 0, None, "longest path 640 us"),
    ("no group file", groups(None), "V14-groups-missing", 0, 3, "group 1"),
    ("no JSON", groups('{"1": [0, 1'), "V14-groups-unreadable", None, None, "truncated"),
    ("a list", groups("[[0, 1]]"), "V14-groups-unreadable", None, None, "object"),
    ("group 0", groups('{"0": [0, 1], "1": [0, 1], "2": [0, 1]}'), "V14-group-key", None, None, "'0'"),
    ("group a", groups('{"a": [0, 1], "1": [0, 1], "2": [0, 1]}'), "V14-group-key", None, None, "'a'"),
    ("rank twice", groups('{"1": [0, 1], "2": [0, 1], "3": [0, 0]}'), "V14-group-members", None, None, "group 3"),
    ("rank as text", groups('{"1": [0, 1], "2": [0, "1"]}'), "V14-group-members", None, None, "group 2"),
    ("a rank too many", groups('{"1": [0, 1], "2": [0, 1, 2]}'), "V14-group-outside", None, None, "group 2 has rank 2"),
    ("a group of one", lonely, "V14-group-of-one", 1, None, "group 3"),
    ("numbers with gaps", groups('{"1": [0, 1], "2": [0, 1], "9": [0, 1]}'), "V14-group-ids", None, None, "1, 2, 9"),
    ("a group of words", both(3, "pg_name", "string_val", "default_pg"), "V14-pg-name", 0, 3, "default_pg"),
    ("a group too large", both(3, "pg_name", "string_val", "4294967296"), "V14-pg-name", 0, 3, "4294967296"),
    ("no such group", both(3, "pg_name", "string_val", "5"), "V14-pg-unknown", 0, 3, "group 5"),
    ("not a member", groups('{"1": [0, 1], "2": [0, 2]}'), "V14-not-a-member", 1, 4, "group 2"),
    ("other members", groups_differ, "V14-groups-differ", 1, None, "group 7: ranks 1, and rank 0 has 0, 1"),
    ("no world", no_pg_names, "V14-world-implicit", 0, 3, "group 0"),
    ("another order", swapped, "V15-order-differs", 1, 3, "ALL_GATHER, rank 0 (node 3) has ALL_REDUCE"),
    ("another size", attr(1, 3, "comm_size", "int64_val", 4095), "V15-size-differs", 1, 3, "4,095 bytes, rank 0"),
    ("another root", attr(1, 3, "root_rank", "int64_val", 1), "V15-root-differs", 1, 3, "root 1, rank 0"),
    ("no chain", unchained, "V16-unchained", 1, 5, "group 1, collective 2"),
    ("crossed", crossed, "V17-crossed", None, None, "before 1 of group"),
    ("not received", no_receive, "V18-unpaired", 0, 6, "rank 0 to rank 1, tag 3: 1 sent, 0 received"),
    ("another tag", attr(1, 6, "comm_tag", "int32_val", 4), "V18-unpaired", 0, 6, "1 sent, 0 received"),
    ("pair of two sizes", attr(1, 6, "comm_size", "int64_val", 511), "V18-pair-size", 1, 6, "512 bytes sent (node 6)"),
    ("from elsewhere", attr(0, 6, "comm_src", "int32_val", 1), "V18-own-end", 0, 6, "its own end is rank 1"),
    ("to nobody", attr(0, 6, "comm_dst", "int32_val", 2), "V18-peer", 0, 6, "the other end is rank 2"),
    ("to itself", attr(0, 6, "comm_dst", "int32_val", 0), "V18-peer", 0, 6, "the other end is rank 0"),
    ("fewer", one_collective_fewer, "V19-count-differs", 1, None, "group 1: 1, and rank 0 has 2"),
    ("other steps", steps_differ, "V19-steps-differ", 1, None, "'6', and rank 0 has '5'"),
]  # fmt: skip


def test_a_set_that_is_right_has_no_finding(tmp_path):
    said = validated(healthy().write(tmp_path), "--npus", "2")
    assert said["findings"] == []
    assert [(one["rank"], one["num_nodes"]) for one in said["files"]] == [(0, 8), (1, 8)]
    assert said["num_groups"] == 2


@pytest.mark.parametrize("planted", PLANTED, ids=[one[0] for one in PLANTED])
def test_each_planted_defect_is_named_with_its_place(planted, tmp_path):
    _, plant, check, rank, node, detail = planted
    given = healthy()
    plant(given)
    said = validated(given.write(tmp_path / "et"))
    assert check in checks(said), checks(said)
    finding = next(one for one in said["findings"] if one["check"] == check)
    first = finding["places"][0]
    assert rank is None or first["rank"] == rank
    assert node is None or first["node"] == node
    assert detail in first["detail"]
    assert finding["cause"]
    assert finding["fix"]


def test_every_check_is_planted_at_least_once():
    from chakra_capture.export.validation import checks as known
    from chakra_capture.export.validation.findings import Check

    every = {str(one) for one in vars(known).values() if isinstance(one, Check)}
    assert every - {one[2] for one in PLANTED} == {"V20-npus"}
    assert {one.split("-")[0] for one in every} == {f"V{number}" for number in range(1, 21)}


@pytest.mark.parametrize(
    ("npus", "is_valid"), [("2", True), ("1x2", True), ("[2, 1]", True), ("4", False), ("2x2", False)]
)
def test_the_network_must_have_as_many_npus_as_there_are_ranks(npus, is_valid, tmp_path):
    said = validated(healthy().write(tmp_path), "--npus", npus)
    assert said["is_valid"] is is_valid
    assert checks(said) == (set() if is_valid else {"V20-npus"})


@pytest.mark.parametrize("npus", ["two", "2x", "", "0", "-2", "2;3", "9" * 40])
def test_npus_that_are_no_number_are_wrong_usage(npus, tmp_path):
    done = run("validate", healthy().write(tmp_path), f"--npus={npus}")
    assert done.code == 2
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("plant", ["metadata node", "memory", "a barrier", "a reduce"])
def test_the_full_profile_allows_what_only_astra_sim_does_not_run(plant, tmp_path):
    given = healthy()
    next(one for one in PLANTED if one[0] == plant)[1](given)
    found = checks(validated(given.write(tmp_path), "--profile", "full"))
    assert not {one for one in found if one.startswith(("V7", "V9"))}


def test_a_file_a_prefix_a_folder_and_a_run_are_found(tmp_path):
    folder = healthy().write(tmp_path / "0_merged")
    (folder / "et").mkdir()
    for path in [*folder.glob("*.et"), folder / "comm_group.json"]:
        path.rename(folder / "et" / path.name)
    (tmp_path / "0_chakra").mkdir()
    for path in (tmp_path, folder, folder / "et", folder / "et" / "chakra"):
        assert [one["rank"] for one in validated(path)["files"]] == [0, 1]
    assert [one["rank"] for one in validated(folder / "et" / "chakra.1.et")["files"]] == [1]


def test_the_group_file_can_lie_elsewhere(tmp_path):
    given = healthy()
    text, given.groups = given.groups, None
    folder = given.write(tmp_path / "et")
    (tmp_path / "g.json").write_text(text)
    assert checks(validated(folder)) == {"V14-groups-missing"}
    assert checks(validated(folder, "--comm-group", tmp_path / "g.json")) == set()
    refused(run("validate", folder, "--comm-group", tmp_path / "none.json"), "none.json cannot be read")


def test_what_is_not_there_is_said_in_one_sentence(tmp_path):
    refused(run("validate", tmp_path / "none"), "none holds no Chakra trace")
    refused(run("validate", tmp_path), "holds no traces")
    for name in ("a.0.et", "b.0.et"):
        (tmp_path / name).write_bytes(et(healthy().ranks[0]))
    refused(run("validate", tmp_path), "several exports: a, b")


def test_replay_and_files_do_not_share_options(tmp_path):
    for options in (["--rules"], ["--rank", "0"], ["--replay", "--npus", "2"], ["--replay", "--comm-group", "x"]):
        assert run("validate", tmp_path, *options).code == 2


def test_what_a_cut_file_lacks_is_no_further_finding(tmp_path):
    given = healthy()
    given.data[0] = et(given.ranks[0])[:-400]
    said = validated(given.write(tmp_path))
    assert checks(said) == {"V1-damaged"}
    assert 0 < said["files"][0]["num_nodes"] < 8


def test_people_see_equal_findings_once_with_the_first_places_and_the_fix(tmp_path):
    given = healthy()
    for node_id in (2, 3, 4, 5, 7):
        node = given.node(0, node_id)
        given.put(0, node.but(ctrl=(77,), name="bad\x1b[31m\n" if node_id == 2 else node.name))
    done = run("validate", given.write(tmp_path / "et"))
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[0].endswith("ranks 0-1, 16 nodes, 1.1 kB, 2 groups")
    assert lines[1:] == [
        "error V3    a control dependency on a node that is not in the file: ASTRA-sim",
        "            refuses it (5 times)",
        "            rank 0, node 2 bad\ufffd[31m\ufffd: depends on node 77",
        "            rank 0, node 3 nccl 3: depends on node 77",
        "            rank 0, node 4 nccl 4: depends on node 77",
        "            ...",
        "            Fix: Drop the dependency, or write the node.",
        "Not valid: 1 error, 0 warnings.",
    ]


def test_warnings_alone_leave_the_files_valid(tmp_path):
    given = healthy()
    change(0, 8, dur=0)(given)
    done = run("validate", given.write(tmp_path / "et"))
    assert done.code == 0
    assert done.out.splitlines()[-1] == "Valid: 0 errors, 1 warning."


def test_unordered_collectives_are_chained_through_other_groups_and_nodes(tmp_path):
    """A chain need not be of direct dependencies, and two groups beside each other need no order."""
    given = Run({})
    for rank in (0, 1):
        given.ranks[rank] = [
            comp(1, start=0, dur=1),
            coll(2, (1,), ALL_REDUCE, 8, "1", start=0, dur=1),
            coll(3, (1,), ALL_REDUCE, 8, "2", start=0, dur=1),
            comp(4, (2,), start=0, dur=1),
            coll(5, (4,), ALL_REDUCE, 8, "1", start=0, dur=1),
            coll(6, (3,), ALL_REDUCE, 8, "2", start=0, dur=1),
            comp(7, (5, 6), start=0, dur=1),
        ]
    assert checks(validated(given.write(tmp_path / "a"))) == set()
    # Node 6 after 5 on one rank, and 5 after 6 on the other: second of group 1 and of group 2 cross.
    given.put(0, given.node(0, 6).but(data=(3, 5)))
    assert checks(validated(given.write(tmp_path / "b"))) == set()
    given.put(1, given.node(1, 5).but(data=(4, 6)))
    said = validated(given.write(tmp_path / "c"))
    assert checks(said) == {"V17-crossed"}
    detail = said["findings"][0]["places"][0]["detail"]
    assert "rank 0 has collective 2 of group 1 before 2 of group 2 (node 6)" in detail
    assert "rank 1 has collective 2 of group 2 before 2 of group 1 (node 5)" in detail


def test_collectives_without_a_group_need_no_group_file(tmp_path):
    given = Run({rank: [comp(1, start=0, dur=1), coll(2, (1,), ALL_REDUCE, 8, "", start=1, dur=1)] for rank in (0, 1)})
    given.groups = None
    assert checks(validated(given.write(tmp_path))) == set()
    assert given.node(0, 2).type == COLL


def test_a_pipeline_pairs_the_kth_send_with_the_kth_receive(tmp_path):
    given = Run({}, groups=None)
    for rank in (0, 1):
        nodes = [comp(1, start=0, dur=1)]
        for k in range(4):
            nodes.append(p2p(2 + k, (1 + k,), 1 - rank, 8 << k, sends=rank == 0, start=1 + k, dur=1))
        given.ranks[rank] = nodes
    assert checks(validated(given.write(tmp_path / "a"))) == set()
    attr(1, 4, "comm_size", "int64_val", 16)(given)
    said = validated(given.write(tmp_path / "b"))
    assert checks(said) == {"V18-pair-size"}
    assert "pair 3: 32 bytes sent (node 4), 16 received" in said["findings"][0]["places"][0]["detail"]
