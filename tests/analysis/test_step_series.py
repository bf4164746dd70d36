"""The parts of steps against plain Python that goes through them one by one: sums, nulls, and one clock for all."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.series import MS, NAMES, plain, records, step
from chakra_capture.analysis.diagnosis import diagnose

ALWAYS = ("input_wait", "forward", "backward")
BETWEEN = ("validation", "checkpoint")
MORE = (*NAMES, *BETWEEN, "mine")


def parts(made: Mapping[str, Any], untimed: set[str], clock: str) -> dict[str, int | None]:
    """One step by the rules in words: what is known of it in ms."""
    device = made.get("device") or {}
    times = made["phases"] if clock == "cpu" else {name: device.get(name) for name in made["phases"]}

    def of(name: str) -> int | None:
        if name in made["phases"]:
            return times[name]
        return None if name in untimed or name in ALWAYS else 0

    between = [times[name] for name in BETWEEN if name in made["phases"]]
    whole = made["ms"] if clock == "cpu" else device.get("step")
    is_known = whole is not None and None not in between and whole >= sum(between)
    whole = whole - sum(between) if is_known else None
    found = {"step_time": whole, **{name: of(name) for name in NAMES}}
    waited, compute = found["input_wait"], [found[name] for name in ("forward", "backward", "optimizer")]
    traced = None if whole is None or waited is None else max(0, whole - waited)
    found |= {"traced": traced, "compute": None if None in compute else sum(compute)}
    known = traced is not None and found["compute"] is not None
    return found | {"rest": max(0, traced - found["compute"] - (found["h2d"] or 0)) if known else None}


def mean(values: list[int | None]) -> float | None:
    known = [value * MS for value in values if value is not None]
    return sum(known) / len(known) if known else None


TIMES = st.dictionaries(st.sampled_from(MORE), st.integers(0, 30), max_size=7)
# On the device's time line phases may overlap, so that they are longer than the step; and any may be missing.
DEVICE = st.builds(dict, st.dictionaries(st.sampled_from(MORE), st.integers(0, 60)), step=st.integers(0, 60))
STEPS = st.lists(st.tuples(TIMES, st.integers(0, 30), st.none() | DEVICE, st.booleans()), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), st.sets(st.sampled_from(NAMES)))
def test_every_part_of_every_rank_is_what_plain_python_says(ranks: Any, untimed: set[str]) -> None:
    made = []
    for steps in ranks:
        made.append([])
        for phases, rest, device, is_whole in steps:
            each = step(rest, **phases)
            if is_whole:  # a device that has every part of the step
                device = {**{name: ms + 1 for name, ms in phases.items()}, "step": 40} | (device or {})
            made[-1].append(each | {"device": device})
    window = diagnose({rank: records(each, dict.fromkeys(untimed, "no")) for rank, each in enumerate(made)}).window
    used = [made[rank][: window.num_steps] for rank in window.ranks]
    tables = {clock: [[parts(each, untimed, clock) for each in steps] for steps in used] for clock in ("cpu", "gpu")}
    on_device = all(
        gpu[name] is not None or cpu[name] is None
        for cpus, gpus in zip(tables["cpu"], tables["gpu"], strict=True)
        for cpu, gpu in zip(cpus, gpus, strict=True)
        for name in ("step_time", *NAMES)
    )
    assert window.clock == ("gpu" if on_device else "cpu")
    for name in ("step_time", "traced", *NAMES, "compute", "rest"):
        wanted = [mean([each[name] for each in steps]) for steps in tables[window.clock]]
        found = [None if value != value else value for value in window.mean(name).tolist()]
        assert found == pytest.approx(wanted), name
        shares = []
        for steps in tables[window.clock]:
            known = [each for each in steps if each[name] is not None and each["step_time"] is not None]
            total = sum(each["step_time"] for each in known)
            shares.append(sum(each[name] for each in known) / total if total > 0 else None)
        assert [None if value != value else value for value in window.share(name).tolist()] == pytest.approx(shares)


def test_residual_below_0_is_0_in_its_step_and_takes_nothing_from_others() -> None:
    # On the device's time line the phases of every second step take longer than the step.
    steps = [plain() | {"device": {"step": 100 - 90 * odd, "input_wait": 5 + 10 * odd, "forward": 30,
                                   "backward": 20, "optimizer": 5}} for odd in (0, 1) * 10]  # fmt: skip
    window = diagnose({0: records(steps)}).window
    assert window.clock == "gpu"
    assert window.mean("rest").tolist() == [(40 + 0) / 2 * MS]
    assert window.mean("traced").tolist() == [(95 + 0) / 2 * MS]


@pytest.mark.parametrize(("gap", "known"), [({}, 0), ({"h2d": 20.0}, None)])
def test_copy_before_the_step_that_needs_it_is_not_known_to_take_no_time_in_it(gap: Any, known: int | None) -> None:
    window = diagnose({0: records([plain() | {"gap": gap}] * 10)}).window
    assert [None if value != value else value for value in window.mean("h2d").tolist()] == [known]


def test_time_between_steps_is_unknown_where_it_was_not_timed_and_0_where_there_was_none() -> None:
    for untimed, null_count in (({}, 0), ({"validation": "no hook"}, 10)):
        (series,) = diagnose({0: records([plain(gap={"validation": 5.0}), *[plain()] * 10], untimed)}).series
        # A step that has it was timed, whatever is said.
        assert series.cpu["validation"].null_count() == null_count
        assert series.cpu["validation"].sum() == 5 * MS
