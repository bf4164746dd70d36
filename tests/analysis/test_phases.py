"""The summary of phases against sums done by hand, and against plain Python over random steps."""

import statistics
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis.phases import phase_summary
from chakra_capture.trace.phase_records import PHASES_SCHEMA, STEPS_SCHEMA, PhaseRecords

BETWEEN = ("validation", "checkpoint", "callbacks")


def records(
    steps: list[dict[str, Any]], *, measured: dict[str, str | None] | None = None, news: Any = (), **more: Any
) -> PhaseRecords:
    """Steps of {"ns", "gap", "phases": {name: ns}, "gap_phases": {name: ns}, "flags", "fit"}."""
    rows, phases = [], []
    for number, step in enumerate(steps):
        flags = [flag in step.get("flags", ()) for flag in ("profiled", "first", "partial", "update_skipped")]
        rows.append(
            (step.get("fit", 0), number, 0, None, step["ns"], step.get("gap", 0), *flags, None, None, step.get("size"))
        )
        for in_gap, key in ((False, "phases"), (True, "gap_phases")):
            calls = step.get("calls", 1)
            phases += [(number, in_gap, name, ns, calls, None) for name, ns in step.get(key, {}).items()]
    return PhaseRecords(
        steps=pl.DataFrame(rows, schema=STEPS_SCHEMA, orient="row"),
        phases=pl.DataFrame(phases, schema=PHASES_SCHEMA, orient="row"),
        is_closed=True,
        measured=[*((0, 0, name, why) for name, why in (measured or {}).items()), *news],
        **more,
    )


def means(summary: Any) -> dict[tuple[str, str], float | None]:
    return {(row["place"], row["phase"]): row["mean_ns"] for row in summary.table.iter_rows(named=True)}


def test_two_steps_by_hand():
    found = phase_summary(
        records(
            [
                {"ns": 100, "gap": 10, "phases": {"forward": 40, "optimizer": 20, "callbacks": 8},
                 "gap_phases": {"validation": 4, "callbacks": 1}},
                {"ns": 60, "gap": 30, "phases": {"forward": 30}, "gap_phases": {"callbacks": 30}},
            ],
            measured={"forward": None, "h2d": "no device", "optimizer": None, "backward": None},
        )
    )  # fmt: skip
    assert means(found) == {
        ("step", "h2d"): None,
        ("step", "forward"): 35,
        ("step", "backward"): 0,  # timed, and there was none
        ("step", "optimizer"): 10,
        ("step", "residual"): (92 - 60 + 60 - 30) / 2,
        ("between", "validation"): 2,
        ("between", "callbacks"): (9 + 30) / 2,
        ("between", "other"): 5 / 2,
    }
    assert (found.step_mean_ns, found.step_median_ns, found.wall_ns) == ((92 + 60) / 2, (92 + 60) / 2, 200)
    assert found.coverage == pytest.approx((40 + 20 + 8 + 4 + 1 + 30 + 30) / 200)
    assert found.not_measured == {"h2d": "no device"}
    counts = {row["phase"]: row["num_steps"] for row in found.table.iter_rows(named=True)}
    assert (counts["forward"], counts["optimizer"], counts["backward"]) == (2, 1, 0)


def test_one_missing_forward_in_a_hundred_steps_is_99_of_100():
    steps = [{"ns": 10, "phases": {"forward": 4} if number != 50 else {}} for number in range(100)]
    (row,) = phase_summary(records(steps)).table.filter(pl.col("phase") == "forward").iter_rows(named=True)
    assert (row["num_steps"], row["mean_ns"], row["median_ns"]) == (99, 3.96, 4)


def row_of(summary: Any, name: str) -> tuple[Any, ...]:
    (row,) = summary.table.filter(pl.col("phase") == name).iter_rows(named=True)
    return row["num_steps"], row["mean_ns"], row["median_ns"], row["p90_ns"]


def test_steps_in_which_a_phase_was_not_timed_are_no_zeros():
    steps = [{"ns": 10, "phases": {"forward": 4} if number < 20 else {}} for number in range(100)]
    why = "the inferer was replaced"
    found = phase_summary(records(steps, measured={"forward": None}, news=[(0, 25, "forward", why)]))
    assert row_of(found, "forward") == (20, 20 * 4 / 25, 4, 4)
    assert found.notes == (f"forward is timed in 25 of 100 steps: {why}",)
    assert found.not_measured == {}
    again = phase_summary(records(steps, news=[(0, 0, "forward", why), (0, 60, "forward", None)]))
    assert row_of(again, "forward")[:2] == (20, 80 / 60)  # those that have it, and the 40 from the 60th on


def test_a_training_that_times_other_phases_adds_no_zeros_to_those_of_the_first():
    steps = [{"ns": 10, "phases": {"forward": 4}, "fit": 0} for _ in range(10)]
    steps += [{"ns": 10, "phases": {"iteration": 6} if number else {}, "fit": 1} for number in range(10)]
    found = phase_summary(
        records(steps, measured={"forward": None, "optimizer": None}, news=[(1, 10, "h2d", "no device")])
    )
    assert row_of(found, "forward") == (10, 4, 4, 4)
    assert row_of(found, "iteration") == (9, 5.4, 6, 6)
    assert row_of(found, "optimizer") == (0, 0, 0, 0)
    assert row_of(found, "h2d") == (0, None, None, None)
    assert found.not_measured == {"h2d": "no device"}
    assert found.notes == tuple(f"{name} is timed in 10 of 20 steps" for name in ("forward", "optimizer", "iteration"))


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4)


@given(st.lists(st.tuples(st.lists(st.booleans(), max_size=4), EVENTS), min_size=1, max_size=4))
def test_in_which_steps_a_phase_was_timed_is_what_going_through_the_file_line_by_line_says(fits):
    steps, news, timed = [], [], []
    for fit, (has_forward, events) in enumerate(fits):
        first = len(steps)
        said = sorted(events, key=lambda event: event[0])
        news += [
            (fit, first + at, "forward", None if is_timed else "no") for at, is_timed in said if at <= len(has_forward)
        ]
        for place, has in enumerate(has_forward):
            steps.append({"ns": 9, "phases": {"forward": 4} if has else {}, "fit": fit})
            before = [is_timed for at, is_timed in said if at <= place and at <= len(has_forward)]
            known = [is_timed for at, is_timed in said if at <= len(has_forward)]
            state = before[-1] if before else known[0] if known else any(has_forward)
            timed.append(4 * has if state or has else None)
    found = phase_summary(records(steps, news=news))
    times = [time for time in timed if time is not None]
    if times and (news or 4 in times):
        assert row_of(found, "forward")[:2] == (times.count(4), pytest.approx(statistics.fmean(times)))
    elif news:
        assert row_of(found, "forward")[1] is None


def test_first_profiled_and_partial_steps_do_not_count_where_others_do():
    kinds = [(1000, ("first",)), (500, ("profiled",)), (10, ()), (7, ("partial",))]
    steps = [{"ns": ns, "flags": flags} for ns, flags in kinds]
    found = phase_summary(records(steps))
    assert (found.num_steps, found.num_recorded, found.step_mean_ns) == (1, 3, 10)
    assert found.left_out == {"under the profiler": 1, "first of a training": 1}
    assert found.notes == ("1 steps were cut short; their times are in no row",)
    alone = phase_summary(records(steps[:1]))
    assert (alone.num_steps, alone.step_mean_ns, alone.left_out) == (1, 1000, {})


def test_without_steps_nothing_is_measured():
    found = phase_summary(PhaseRecords(measured=[(0, 0, "forward", None)]))
    assert (found.num_steps, found.coverage, found.step_mean_ns) == (0, None, None)
    assert found.table["mean_ns"].null_count() == found.table.height


def test_what_came_to_nothing_and_skipped_updates_are_said():
    found = phase_summary(
        records(
            [{"ns": 1, "flags": ("update_skipped",)}, {"ns": 1}], dropped=[(2, (4, 5), 2, "zeroed")], num_unreadable=3
        )
    )
    assert found.notes == (
        "1 steps ended without their update (update_skipped)",
        "batches 4, 5 before step 2 came to nothing: zeroed",
        "3 lines of the phase file cannot be read",
    )


PARTS = st.dictionaries(st.sampled_from(("forward", "backward", "mine", *BETWEEN)), st.integers(0, 50), max_size=4)
STEPS = st.lists(st.tuples(PARTS, PARTS, st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(STEPS)
def test_the_same_as_plain_python(found):
    steps = [
        {"ns": sum(inside.values()) + rest, "gap": sum(gap.values()) + other, "phases": inside, "gap_phases": gap}
        for inside, gap, rest, other in found
    ]
    summary = phase_summary(records(steps))
    rows = {(row["place"], row["phase"]): row for row in summary.table.iter_rows(named=True)}
    for name in ("forward", "backward", "mine"):
        times = [inside.get(name, 0) for inside, _, _, _ in found]
        if any(name in inside for inside, *_ in found):
            assert rows["step", name]["mean_ns"] == pytest.approx(statistics.fmean(times))
            assert rows["step", name]["median_ns"] == statistics.median(times)
            assert rows["step", name]["p90_ns"] == min(
                t for t in times if sum(x <= t for x in times) * 10 >= 9 * len(times)
            )
    for name in BETWEEN:
        times = [inside.get(name, 0) + gap.get(name, 0) for inside, gap, _, _ in found]
        if any(name in inside or name in gap for inside, gap, *_ in found):
            assert rows["between", name]["mean_ns"] == pytest.approx(statistics.fmean(times))
    assert rows["step", "residual"]["mean_ns"] == pytest.approx(statistics.fmean(rest for *_, rest, _ in found))
    assert rows["between", "other"]["mean_ns"] == pytest.approx(statistics.fmean(other for *_, other in found))
    wall = sum(step["ns"] + step["gap"] for step in steps)
    assert summary.wall_ns == wall
    total = sum(row["mean_ns"] for row in rows.values()) * len(steps)
    assert total == pytest.approx(wall)
    if wall:
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)


def test_steps_left_out_are_stated_beside_those_that_count():
    steps = [
        {"ns": 900, "flags": ("first",), "phases": {"validation": 100}},
        *({"ns": ns, "gap": 50} for ns in (100, 200, 300)),
        *({"ns": ns, "flags": ("profiled",), "phases": {"checkpoint": 10}} for ns in (410, 610, 5010)),
        {"ns": 7, "flags": ("profiled", "partial")},
    ]
    found = phase_summary(records(steps))
    assert (found.step_median_ns, found.profiled_median_ns, found.first_ns) == (200, 600, 800)
    assert found.steps_per_s == pytest.approx(3 / 750 * 1e9)
    assert found.rss_bytes is None


def with_batches(*sizes: int | None, calls: int = 3) -> list[dict[str, Any]]:
    return [{"ns": 80, "gap": 20, "phases": {"forward": 10}, "calls": calls, "size": size} for size in sizes]


def test_rates_by_step_batch_and_sample():
    found = phase_summary(records(with_batches(8, None, None, 8)))
    # 4 steps of 3 batches of 8 samples in 400 ns.
    assert (found.steps_per_s, found.batches_per_s, found.samples_per_s) == pytest.approx((1e7, 3e7, 24e7))


@pytest.mark.parametrize(
    ("steps", "batches_per_s", "batch_size"),
    [
        (with_batches(8, None, 3), 3e7, (3, 8)),  # the last batch of a set, say
        (with_batches(None, None), 3e7, None),
        ([{"ns": 80, "gap": 20, "phases": {"mine": 10}, "size": 8}], None, (8, 8)),  # how many, nothing tells
    ],
)
def test_samples_are_not_stated_where_it_is_not_known_how_many(steps, batches_per_s, batch_size):
    found = phase_summary(records(steps))
    assert (found.batches_per_s, found.samples_per_s, found.batch_size) == (batches_per_s, None, batch_size)


def test_profiled_steps_alone_are_compared_with_nothing():
    found = phase_summary(records([{"ns": 100, "flags": ("profiled",)}]))
    assert (found.step_median_ns, found.profiled_median_ns, found.first_ns) == (100, None, None)
    nothing = phase_summary(records([]))
    assert (nothing.steps_per_s, nothing.first_ns, nothing.step_median_ns) == (None, None, None)
