"""What holds of any two runs: causes sum to the difference, either way round, and a run does not differ from itself."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from handed import DATA, require
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.trace_diff.runs import Call, recorded, sums, worst
from chakra_capture.analysis.trace_diff.diff import RankDifference, compare_recorded
from chakra_capture.analysis.trace_diff.side import Side, read_side, whole_steps
from chakra_capture.trace.merged import MergedRun, MergedTrace

NAMES = ("aten::mm", "aten::relu", "block", "cudaLaunchKernel")
KERNELS = st.lists(st.tuples(st.sampled_from(["gemm_a", "gemm_b", "copy"]), st.integers(1, 9)), max_size=2)


def call(inside: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    return st.builds(
        Call,
        name=st.sampled_from(NAMES),
        own=st.integers(0, 30),
        inside=st.lists(inside, max_size=3).map(tuple),
        kind=st.sampled_from(["host_op", "host_op", "annotation", "runtime"]),
        shapes=st.sampled_from([None, "[[2]]", "[[4]]"]),
        before=st.integers(0, 5),
        kernels=KERNELS.map(tuple),
    )


def phase(inside: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    name = st.sampled_from(["forward", "backward", "optimizer"])
    return st.tuples(name, st.integers(0, 30), st.lists(inside, max_size=3)).map(
        lambda each: Call(each[0], each[1], tuple(each[2]), kind="annotation", phase=each[0])
    )


CALLS = st.recursive(st.builds(Call, st.sampled_from(NAMES), st.integers(1, 30)), call, max_leaves=8)
STEPS = st.lists(st.lists(CALLS | phase(CALLS), max_size=4), min_size=1, max_size=6)
SIDES = st.tuples(STEPS, st.booleans(), st.integers(0, 3))
# Runs of one program that changed a little compare otherwise than any two.
PAIRS = st.tuples(SIDES, SIDES) | STEPS.flatmap(
    lambda steps: st.tuples(st.just((steps, False, 0)), st.permutations(steps).map(lambda other: (other, False, 0)))
)


def write(folder: Path, side: tuple[Sequence[Sequence[Call]], bool, int]) -> MergedTrace:
    steps, has_worker, first = side
    worker = [[Call("ReluBackward0", 3, before=2), *list(calls)[:1]] for calls in steps] if has_worker else []
    return recorded(folder, steps, worker=worker, first=first)


@settings(max_examples=40, deadline=None)
@given(PAIRS)
def test_causes_sum_to_the_difference_and_the_other_way_round_they_are_its_opposite(pair: Any) -> None:
    with TemporaryDirectory() as folder:
        a, b = (write(Path(folder) / name, side) for name, side in zip("ab", pair, strict=True))
        there, back = worst(a, b), worst(b, a)
        assert_sums(there)
        assert_sums(back)
        assert there.scale.exact_difference == -back.scale.exact_difference
        for name, table in there.tables.items():
            assert told(table, 1) == told(back.tables[name], -1)


@settings(max_examples=20, deadline=None)
@given(SIDES)
def test_a_run_does_not_differ_from_itself(side: Any) -> None:
    with TemporaryDirectory() as folder:
        a = write(Path(folder), side)
        assert_same(worst(a, a))


@settings(max_examples=25, deadline=None)
@given(SIDES)
def test_each_ns_of_a_step_belongs_to_the_innermost_call_that_is_open(side: Any) -> None:
    with TemporaryDirectory() as folder:
        trace = write(Path(folder), side)
        read = read_side(trace, whole_steps(trace))
        assert owners(read) == expected_owners(trace)


def assert_sums(each: RankDifference) -> None:
    assert set(sums(each)) == {each.scale.exact_difference}
    ops, phases = each.tables["ops"], each.tables["phases"]
    for side, total in zip(("first", "second"), each.scale.total_ns, strict=True):
        assert ops[f"{side}_total_ns"].sum() == total
        # By phase what the analysis of phases says, which knows nothing of calls.
        by_phase = Counter[str | None]()
        for phase_of, first_phase, ns in ops.select("phase", "first_phase", f"{side}_total_ns").iter_rows():
            by_phase[first_phase if side == "first" else phase_of] += ns
        loop = phases.filter(phases["part"] == "loop")
        assert {k: v for k, v in by_phase.items() if v} == {
            phase_of: ns for phase_of, ns in loop.select("phase", f"{side}_total_ns").iter_rows() if ns
        }
    parts = ops["calls_ns"] + ops["longer_ns"]
    assert parts.to_list() == pytest.approx(ops["difference_ns"].to_list(), abs=1e-6)


def told(table: Any, sign: int) -> list[tuple[Any, ...]]:
    """Rows in numbers, the other way round for -1, in one order."""
    columns = ["first_total_ns", "second_total_ns", "first_count", "second_count"]
    if sign < 0:
        columns = [columns[at] for at in (1, 0, 3, 2)]
    other = {"slower": "faster", "faster": "slower", "new": "gone", "gone": "new"} if sign < 0 else {}
    words = [name for name in ("status", "change") if name in table.columns]
    return sorted(
        (*(other.get(word, word) for word in row[: len(words)]), sign * row[len(words)], *row[len(words) + 1 :])
        for row in table.select(*words, "exact_difference", *columns).iter_rows()
    )


def assert_same(each: RankDifference) -> None:
    for table in each.tables.values():
        assert set(table["exact_difference"]) <= {0}
        assert set(table["change"]) <= {"within_noise", "not_judged"}
        assert "status" not in table.columns or set(table["status"]) <= {"matched"}


def owners(side: Side) -> Counter[tuple[int, int | None]]:
    ids = side.rows["node_id"].to_list()
    found: Counter[tuple[int, int | None]] = Counter()
    for at, row, ns in side.times.select("at", "row", "ns").iter_rows():
        found[at, ids[row] if row >= 0 else None] += ns
    return found


def expected_owners(trace: MergedTrace) -> Counter[tuple[int, int | None]]:
    """Nanosecond by nanosecond, by what is open then."""
    rows = trace.nodes.filter(trace.nodes["kind"] != "kernel").sort("node_id").to_dicts()
    found: Counter[tuple[int, int | None]] = Counter()
    for at, step in enumerate(trace.steps.to_dicts()):
        for ns in range(step["ts_ns"], step["ts_ns"] + step["dur_ns"]):
            is_open = [row for row in rows if row["ts_ns"] <= ns < row["ts_ns"] + row["dur_ns"]]
            loop, beside = ([row for row in is_open if row["tid"] == tid] for tid in (1, 2))
            owner = loop[-1]
            if owner["kind"] == "annotation" and beside:
                owner = beside[-1]
            found[at, owner["node_id"]] += 1
    return found


@pytest.fixture(scope="session")
def handed(merged: Any) -> dict[str, tuple[dict[int, MergedTrace], MergedRun]]:
    """Handed traces that mark steps, and some that do not."""
    names = [f"pairs/{path.name}" for path in sorted((DATA / "pairs").glob("*"))]
    names += [
        f"device_only/{path.name.removesuffix('.json.gz')}" for path in sorted((DATA / "device_only").glob("*.gz"))
    ]
    found = {}
    for name in names:
        folder = merged(name)
        ranks = {int(path.name.removeprefix("rank=")): MergedTrace(int(path.name.removeprefix("rank=")), path)
                 for path in folder.glob("rank=*")}  # fmt: skip
        found[name] = ranks, MergedRun(folder)
    return found


def test_causes_sum_on_every_handed_trace_against_itself_and_against_the_next(handed: Any) -> None:
    require(DATA / "pairs")
    # Whole windows are compared with no steps.
    names = sorted(handed, key=lambda name: whole_steps(next(iter(handed[name][0].values())))[0] is None)
    num_compared = 0
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        (ranks, run), (others, other_run) = handed[name], handed[other]
        itself = compare_recorded(ranks, ranks, (run, run))
        assert itself.reason is None, name
        for each in (itself.worst, itself.median):
            if each is not None:
                assert_sums(each)
                assert_same(each)
        found = compare_recorded(ranks, others, (run, other_run)).worst
        if found is not None:
            num_compared += 1
            assert_sums(found)
    assert num_compared >= 10
