"""Phases joined to the steps of the traces: by number and time, null where nothing was timed."""

import polars as pl
import pytest
from commands import run
from recording.loops import work
from recording.recorded import settings
from recording.test_step_phases import lines

from chakra_capture import capture
from chakra_capture.merge.phases import join_phases
from chakra_capture.trace.phase_records import PHASES_SCHEMA, STEPS_SCHEMA, PhaseRecords
from chakra_capture.trace.schema import STEPS

SECOND = 1_000_000_000


def steps(*rows: tuple[int | None, int]) -> pl.DataFrame:
    """Steps of (number, ts_ns)."""
    table = pl.DataFrame({"step": [r[0] for r in rows], "ts_ns": [r[1] for r in rows]})
    missing = [pl.lit(None, dtype).alias(name) for name, dtype in STEPS.schema.items() if name not in table.columns]
    return table.with_columns(missing).select(STEPS.schema.names()).cast(dict(STEPS.schema))


def recorded(*rows: tuple[int, int, dict[str, int]], measured: dict[str, str | None]) -> PhaseRecords:
    """Recorded steps of (number, ts_ns, phases); each takes 100 ns."""
    flags = (True, False, False, True)
    table = [(0, number, 0, ts, 100, 5, *flags, None, None, None) for number, ts, _ in rows]
    phases = [(row, False, name, ns, 1, None) for row, (_, _, found) in enumerate(rows) for name, ns in found.items()]
    phases += [(row, True, "forward", 1000, 1, None) for row in range(len(rows))]  # in the gap: not the step's
    return PhaseRecords(
        steps=pl.DataFrame(table, schema=STEPS_SCHEMA, orient="row"),
        phases=pl.DataFrame(phases, schema=PHASES_SCHEMA, orient="row"),
        measured=[(0, 0, name, why) for name, why in measured.items()],
    )


def test_of_two_trainings_with_the_same_numbers_the_one_of_that_time_is_joined():
    records = recorded(
        (0, 50, {"forward": 30, "callbacks": 10}),
        (0, 500 * SECOND, {"forward": 60}),
        (1, 600 * SECOND, {}),
        measured={"forward": None, "optimizer": None, "h2d": "no device"},
    )
    found = join_phases(steps((0, 500 * SECOND + 3000), (1, 0), (7, 0), (None, 50), (0, 40)), records)
    columns = ["forward_ns", "optimizer_ns", "h2d_ns", "backward_ns", "residual_ns", "coverage", "update_skipped"]
    assert found.select(columns).rows() == [
        (60, 0, None, None, 40, 0.6, True),
        (None,) * 7,  # begun at another time
        (None,) * 7,
        (None,) * 7,
        (30, 0, None, None, 60, 0.4, True),
    ]
    assert found.schema == STEPS.schema


def test_a_recorded_run_has_the_phases_of_its_file_in_the_table_of_steps(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        for _ in session.steps(range(4)):
            with session.phase("forward"):
                work()
    assert run("merge", tmp_path).code == 0
    table = pl.read_parquet(tmp_path / "0_merged/rank=0/steps.parquet")
    wanted = [line for line in lines(tmp_path, "step") if "profiled" in line.get("flags", [])]
    assert table["step"].to_list() == [1, 2]
    assert table["forward_ns"].to_list() == [line["phases"]["forward"][0] for line in wanted]
    assert table["input_wait_ns"].to_list() == [line["phases"]["input_wait"][0] for line in wanted]
    assert table["backward_ns"].to_list() == [None, None]
    named = [sum(ns for ns, _ in line["phases"].values()) for line in wanted]
    assert table["residual_ns"].to_list() == [line["ns"] - ns for line, ns in zip(wanted, named, strict=True)]
    assert table["coverage"].to_list() == pytest.approx(
        [ns / line["ns"] for line, ns in zip(wanted, named, strict=True)]
    )
    assert table["update_skipped"].to_list() == [False, False]
