"""Real runs: their sums hold, and ``compare`` tells a slower loop from one that is run again."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from commands import run
from recording.loops import work
from recording.recorded import settings

from chakra_capture import capture
from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.analysis.rest_parts import rest_parts
from chakra_capture.trace.merged import MergedTrace

PAIRS, STEPS, STEP_S = 5, 30, 0.008


def sleeping(folder: Path, seconds: float) -> Path:
    """A run whose steps sleep, so that hardly anything but the sleep makes them longer."""
    with capture(settings(folder, None, None)) as session:
        for _ in session.steps(range(STEPS)):
            with session.phase("forward"):
                time.sleep(seconds)
            with session.phase("optimizer"):
                pass
        with session.phase("validation"):
            pass
    return folder


def compared(*args: Any) -> tuple[int, dict[str, Any]]:
    done = run("compare", *args, "--json")
    assert done.err == ""
    return done.code, json.loads(done.out)


def test_five_interleaved_pairs_of_runs_that_mostly_sleep(tmp_path: Path) -> None:
    kinds = {"a": STEP_S, "again": STEP_S, "slower": 1.25 * STEP_S}
    runs: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for number in range(PAIRS):
        for kind, seconds in kinds.items():
            runs[kind].append(sleeping(tmp_path / f"{kind}{number}", seconds))
    code, found = compared("--runs", *runs["a"], "--vs", *runs["again"], "--max-regression", 5)
    assert (code, found["verdict"]) in ((0, "same"), (3, "inconclusive"))
    code, found = compared("--runs", *runs["a"], "--vs", *runs["slower"], "--max-regression", 5)
    assert (code, found["verdict"], found["dominant"]) == (4, "slower", "forward")
    assert 0.15 < found["change"] < 0.35
    code, found = compared("--runs", *runs["slower"], "--vs", *runs["a"], "--max-regression", 5)
    assert (code, found["verdict"]) == (0, "faster")
    # One run of them: the parts of a step sum to it, and all parts to the time of training.
    (phases,) = json.loads(run("summary", runs["a"][0], "--json").out)["phases"].values()
    assert phases["num_steps"] == STEPS - 1  # the first does not count
    means = {(row["place"], row["phase"]): row["mean_ns"] for row in phases["table"] if row["mean_ns"] is not None}
    in_step = [mean for (place, _), mean in means.items() if place == "step"]
    assert sum(in_step) == pytest.approx(phases["step_mean_ns"], rel=1e-9)
    assert sum(means.values()) * phases["num_steps"] == pytest.approx(phases["wall_ns"], rel=1e-9)
    assert means["step", "forward"] >= STEP_S * 1e9


def test_recorded_steps_sum_over_phases_and_parts_of_the_rest(tmp_path: Path) -> None:
    with capture(settings(tmp_path, 1, 2)) as session:
        for _ in session.steps(range(4)):
            with session.phase("forward"):
                work()
            work()
            with session.phase("optimizer"):
                work()
    assert run("merge", tmp_path).code == 0
    trace = MergedTrace(0, tmp_path / "0_merged" / "rank=0")
    times, parts = phase_times(trace), rest_parts(trace)
    for step, dur in trace.steps.select("step", "dur_ns").iter_rows():
        mine = times.filter(step=step)
        assert mine["wall_ns"].sum() == dur
        assert {"forward", "optimizer", None} <= set(mine["phase"])
        (rest,) = mine.filter(mine["phase"].is_null())["wall_ns"]
        assert parts.filter(step=step)["wall_ns"].sum() == rest
        assert mine["compute_ns"].null_count() == mine.height  # no device was seen
    assert times["step"].n_unique() == 2
