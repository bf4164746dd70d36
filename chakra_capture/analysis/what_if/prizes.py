"""What would help most: presets, and the operators and kernels on the critical path, each tried alone."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from chakra_capture.analysis.critical_path import Paths
from chakra_capture.analysis.what_if.changes import SCALABLE, ChangeError, Changes, Scale, Switch
from chakra_capture.analysis.what_if.predict import Prediction, WindowModel
from chakra_capture.trace.schema import Column

# By name: what is changed, and what that means.
PRESETS = {
    "no_input_wait": (Changes(switches=frozenset({Switch.NO_INPUT_WAIT})), "batches are there when asked for"),
    "no_exposed_comm": (Changes(switches=frozenset({Switch.OVERLAP_COMM})), "nothing waits for a collective"),
    "infinite_network": (Changes((Scale("comm", 0.0),)), "transfers take no time; ranks wait for each other as before"),
    "perfect_balance": (Changes(balanced=True), "the same work spread evenly over the ranks, none waits for another"),
    "fused_kernels": (
        Changes(switches=frozenset({Switch.FUSE_SHORT})),
        "runs of kernels under 20 us are launched at once; their operators cost what they did",
    ),
    "device_2x": (Changes((Scale("kernel", 0.5), Scale("memory", 0.5))), "kernels and copies take half as long"),
    "cpu_2x": (Changes((Scale("cpu", 0.5),)), "all CPU time is half as long"),
}
_TOP = 4
# What is halved of a path's parts, as --scale names it.
_SCALED = {"op": "self", "runtime": "self", "kernel": "kernel"}
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")

SCHEMA = (
    Column("name", pl.String, "preset, or the change as --scale takes it"),
    Column("meaning", pl.String, "what would be different"),
    Column("measured_ns", pl.Int64, "mean step, device work after the last one included (a window's time by its "
           "number of steps); mean of the ranks", "ns"),
    Column("fastest_ns", pl.Int64, "the same after the change, if all that the trace cannot tell turns out well", "ns"),
    Column("slowest_ns", pl.Int64, "the same, if it turns out badly", "ns"),
    Column("saved_ns", pl.Int64, "measured_ns less fastest_ns", "ns"),
    Column("share", pl.Float64, "saved_ns as a part of measured_ns"),
    Column("at_most", pl.Boolean, "the trace cannot tell it all, so it saves saved_ns at most"),
    Column("replay_error", pl.Float64, "largest of what a replay without a change is off by, as a part of a window"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Trial:
    name: str
    meaning: str
    changes: Changes


def prizes(windows: list[WindowModel]) -> pl.DataFrame:
    """Try what might help, each alone; what saves most comes first, what saves nothing is left out.

    What does not occur in a trace (a wait for input, another rank) is left out, too.
    """
    rows = []
    for trial in [*_presets(), *_of_path(windows)]:
        try:
            found = [one.predict(trial.changes) for one in windows]
        except ChangeError:
            continue
        row = _row(trial, found)
        if row is not None and row["measured_ns"] > row["fastest_ns"]:
            rows.append(row)
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    return pl.DataFrame(rows, schema=schema).sort(["saved_ns", "name"], descending=[True, False])


def _presets() -> Iterator[_Trial]:
    for name, (changes, meaning) in PRESETS.items():
        yield _Trial(name, meaning, changes)


def _of_path(windows: list[WindowModel]) -> Iterator[_Trial]:
    """What the critical paths spend most time in, halved."""
    times: dict[str, Counter[str]] = {"self": Counter(), "kernel": Counter()}
    for window in windows:
        paths = Paths(window.model)
        for rank in window.model.ranks:
            named = paths.whole(rank).sums.filter(pl.col("name").is_not_null())
            for category, name, took in named.select("category", "name", "total_ns").iter_rows():
                if category in _SCALED:
                    times[_SCALED[category]][name] += took
    for what, of_name in times.items():
        for name, _ in of_name.most_common(_TOP):
            pattern = "^" + _SPECIAL.sub(r"\\\g<0>", name) + "$"
            yield _Trial(
                f"{what}~{pattern}=0.5",
                f"half of: {SCALABLE[what]}, {name}",
                Changes((Scale(what, 0.5, re.compile(pattern)),)),
            )


def _row(trial: _Trial, found: list[list[Prediction]]) -> dict[str, Any] | None:
    spans = [one for window in found for one in window if one.span.step is None]
    if not spans:
        return None
    num_steps = max(sum(one.span.step is not None for window in found for one in window), len(spans))
    measured, fastest, slowest = (
        round(sum(times) / num_steps)
        for times in (
            [one.span.measured_ns for one in spans],
            [one.fastest_ns for one in spans],
            [one.slowest_ns for one in spans],
        )
    )
    return {
        "name": trial.name,
        "meaning": trial.meaning,
        "measured_ns": measured,
        "fastest_ns": fastest,
        "slowest_ns": slowest,
        "saved_ns": measured - fastest,
        "share": (measured - fastest) / measured if measured else 0.0,
        "at_most": fastest != slowest,
        "replay_error": max((abs(one.span.replay_error) for one in spans), default=0.0),
    }
