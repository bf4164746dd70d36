"""The walk that judges exports can fail: each planted defect hangs in it or is refused."""

import json

import pytest

from export.et_writer import ALL_REDUCE, Node, Run, coll, comp, healthy
from export.feeder_walk import BadTraceError, FeederWalk, HangError, defects, in_order, read_export, without_successor


def walk(given: Run, folder, **options):
    ranks = read_export(given.write(folder))
    groups = {int(key): members for key, members in json.loads(given.groups).items()}
    return FeederWalk(ranks, groups, **options).run()


def work(node_id: int, dur: int, data: tuple[int, ...] = (), *, cpu: bool = False) -> Node:
    return comp(node_id, data, start=0, dur=dur, cpu=cpu)


def edit(given: Run, rank: int, node_id: int, **changes) -> None:
    given.put(rank, given.node(rank, node_id).but(**changes))


def lost_target(given: Run) -> None:
    given.drop(0, 2)


def lost_control_target(given: Run) -> None:
    edit(given, 1, 8, ctrl=(99,))


def no_beginning(given: Run) -> None:
    edit(given, 0, 1, data=(8,))


def circle(given: Run) -> None:
    edit(given, 0, 7, data=(6, 8))


def itself(given: Run) -> None:
    edit(given, 0, 7, data=(6, 7))


def missing_collective(given: Run) -> None:
    given.drop(1, 5)
    edit(given, 1, 6, data=(4,))


def opposite_groups(given: Run) -> None:
    edit(given, 1, 4, data=(2,))
    edit(given, 1, 3, data=(4,))
    edit(given, 1, 5, data=(3,))


def unpaired_receive(given: Run) -> None:
    given.drop(0, 6)
    edit(given, 0, 7, data=(5,))


def other_tag(given: Run) -> None:
    given.put(0, given.node(0, 6).having("comm_tag", "int32_val", 9))


def other_size(given: Run) -> None:
    given.put(1, given.node(1, 3).having("comm_size", "int64_val", 4095))


def of_one_rank(given: Run) -> None:
    given.groups = '{"1": [0, 1], "2": [0]}'
    given.drop(1, 4)
    edit(given, 1, 5, data=(3,))


HANGS = {
    circle: {0: [7, 8]},
    itself: {0: [7, 8]},
    missing_collective: {0: [5, 6, 7, 8], 1: [6, 7, 8]},
    opposite_groups: {0: [3, 4, 5, 6, 7, 8], 1: [3, 4, 5, 6, 7, 8]},
    unpaired_receive: {1: [6, 7, 8]},
    other_tag: {1: [6, 7, 8]},
    other_size: {0: [3, 4, 5, 6, 7, 8], 1: [3, 4, 5, 6, 7, 8]},
    of_one_rank: {0: [4, 5, 6, 7, 8], 1: [5, 6, 7, 8]},
}


def test_all_nodes_of_a_sound_run_are_issued_and_ranks_wait_for_each_other(tmp_path):
    given = healthy()
    edit(given, 1, 2, dur=140)
    done = walk(given, tmp_path)
    assert done.issued == {0: [*range(1, 9)], 1: [*range(1, 9)]}
    # 10 on the CPU, 140 of the slower rank, 20 + 20 + 10 + 10 of communication, 30, 5.
    assert done.end == {0: 245, 1: 245}


@pytest.mark.parametrize("plant", HANGS, ids=lambda plant: plant.__name__)
def test_defect_hangs(plant, tmp_path):
    given = healthy()
    plant(given)
    with pytest.raises(HangError) as caught:
        walk(given, tmp_path)
    assert caught.value.stuck == HANGS[plant]


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (lost_target, "node 2 in data_dep graph, but not found in index"),
        (lost_control_target, "node 99 in ctrl_dep graph, but not found in index"),
        (no_beginning, "no dependency free nodes"),
        (lambda given: given.put(0, given.node(0, 3).having("is_cpu_op", "bool_val", True)), "should not be on CPU"),
        (lambda given: given.put(0, given.node(0, 3).having("comm_type", "int64_val", 9)), "unsupported collective"),
        (lambda given: given.put(0, given.node(0, 3).having("pg_name", "string_val", "3")), "group 3 not found"),
        (lambda given: given.put(0, given.node(0, 3).having("pg_name", "string_val", "dp")), "no decimal number"),
        (lambda given: given.put(0, given.node(0, 6).without("comm_tag")), "attribute comm_tag not found"),
        (lambda given: given.put(1, given.node(1, 6).having("comm_size", "int64_val", 3)), "are not those that are"),
        (lambda given: edit(given, 0, 2, type=1), "type 1"),
    ],
)
def test_defect_is_refused(plant, text, tmp_path):
    given = healthy()
    plant(given)
    with pytest.raises(BadTraceError, match=text):
        walk(given, tmp_path)


def test_send_that_nobody_receives_is_refused(tmp_path):
    given = healthy()
    given.drop(1, 6)
    edit(given, 1, 7, data=(5,))
    with pytest.raises(BadTraceError, match="never received"):
        walk(given, tmp_path)


def test_two_collectives_side_by_side_hang_only_where_one_may_be_in_flight(tmp_path):
    """Group 2's is first on rank 1, since the other has not its data yet; nothing orders them."""
    given = Run({})
    for rank, (first, second) in enumerate([(5, 50), (50, 5)]):
        given.ranks[rank] = [
            comp(1, start=0, dur=first, cpu=True),
            comp(2, start=0, dur=second),
            coll(3, (1,), ALL_REDUCE, 8, "1", start=50, dur=10),
            coll(4, (2,), ALL_REDUCE, 8, "2", start=60, dur=10),
        ]
    with pytest.raises(HangError):
        walk(given, tmp_path)
    assert walk(given, tmp_path, full=True).end == {0: 60, 1: 60}


def test_lowest_id_first_and_one_at_a_time_on_cpu_and_device(tmp_path):
    nodes = [work(3, 5), work(2, 7), work(1, 9, cpu=True), work(9, 1, (1, 2), cpu=True)]
    done = walk(Run({0: nodes}), tmp_path)
    assert done.issued[0].index(2) < done.issued[0].index(3)
    assert done.end == {0: 12}


def test_defects_of_one_file_are_listed(tmp_path):
    nodes = [work(1, 1), Node(2, 4, data=(1, 1, 8), ctrl=(2,))]
    rank = read_export(Run({0: nodes}).write(tmp_path))[0]
    assert defects(rank) == ["2 data on absent 8", "2 data doubled", "2 on itself"]
    nodes = [work(1, 1), work(2, 1, (1, 3)), work(3, 1, (2,)), work(4, 1, (3,))]
    rank = read_export(Run({0: nodes}).write(tmp_path))[0]
    assert defects(rank) == ["3 nodes in or behind a circle"]
    assert in_order(rank) == [1]


def test_device_nodes_that_nothing_waits_for_are_found_unless_they_end_their_stream(tmp_path):
    nodes = [comp(1, start=0, dur=1), comp(2, start=1, dur=1), comp(3, (2,), start=2, dur=1)]
    rank = read_export(Run({0: nodes}).write(tmp_path))[0]
    assert [node.id for node in without_successor(rank)] == [1]
