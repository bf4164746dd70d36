"""One list from the phases of all steps and from recorded windows: nothing twice, the larger prize first."""

import json

import pytest
from builder import TraceBuilder
from commands import run

from analysis.series import found, pair, plain, step
from analysis.test_device_findings import (
    LOADER,
    STEP,
    US,
    busy,
    drained,
    laid_out,
    pageable,
    python_between,
    slow_host,
    waiting_for_input,
)
from chakra_capture.analysis.findings import Finding, Prize, Severity
from chakra_capture.analysis.run_findings import SCHEMA, run_findings
from chakra_capture.cli.findings import print_findings
from chakra_capture.cli.output import console
from chakra_capture.trace.merged import MergedRun


def together(trace, folder, diagnosis=None):
    merged = trace.merged(folder)
    series = () if diagnosis is None else diagnosis.series
    return run_findings([merged], MergedRun(folder / "out"), series=series, diagnosis=diagnosis)


def kinds(findings):
    return [finding.kind for finding in findings]


def fast(ms, **changes):
    """A step as short as those recorded, so that the profiler adds nothing."""
    return plain(ms, **changes)


def of_input(percent):
    """Steps of 1 ms that wait for data for so much of it."""
    return [step(0.02, input_wait=percent / 100, forward=0.5, backward=0.48 - percent / 100)] * 30


def test_input_seen_in_all_steps_and_in_the_window_is_one_finding_with_the_prize_of_the_window(tmp_path):
    diagnosis = found(of_input(30))
    both = together(laid_out(waiting_for_input), tmp_path, diagnosis)
    assert kinds(both.problems) == ["INPUT_BOUND"]
    (finding,) = both.problems
    assert finding.summary == (
        "Training waits for its input 30.0 % of each step (0.300 ms). The device idles 0.300 ms of each step (30.0 %) "
        "while the loop waits for data."
    )
    assert finding.prize.most_ns == pytest.approx(300 * US, rel=0.02)
    assert finding.evidence["recorded_steps"]["idle_ns"] == 300 * US
    assert finding.evidence["num_steps"] == 30
    # The diagnosis itself, which stands in final_summary.json, is as it was.
    assert diagnosis.problems[0].prize is None


def test_input_of_which_only_the_window_speaks_stays(tmp_path):
    both = together(laid_out(waiting_for_input), tmp_path, found([plain(1)] * 30))
    assert kinds(both.problems) == ["DEVICE_WAITS_FOR_INPUT"]


def test_slow_input_of_one_rank_is_told_of_that_rank_alone(tmp_path):
    diagnosis = pair(20)
    assert kinds(diagnosis.problems) == ["INPUT_STRAGGLER"]
    assert kinds(together(laid_out(waiting_for_input), tmp_path, diagnosis).problems) == ["INPUT_STRAGGLER"]


def test_rest_of_the_step_gets_the_place_that_the_window_names(tmp_path):
    def in_no_phase(trace: TraceBuilder, at: int, number: int) -> None:
        python_between(pause=150)(trace, at, number)

    steps = [step(0.3, input_wait=0.01, forward=0.39, backward=0.3)] * 30
    both = together(laid_out(in_no_phase), tmp_path, found(steps))
    assert kinds(both.problems) == ["RESIDUAL_HEAVY"]
    assert "is in no phase" in both.problems[0].summary
    assert "the longest under train after aten::first, before aten::second" in both.problems[0].summary


def test_copies_to_the_device_get_their_reason_from_the_window(tmp_path):
    times = {"step": 1.0, "input_wait": 0.01, "h2d": 0.2, "forward": 0.4, "backward": 0.3, "optimizer": 0.05}
    copying = step(0.04, input_wait=0.01, h2d=0.2, forward=0.4, backward=0.3, optimizer=0.05)
    diagnosis = found([copying | {"device": times}] * 30)
    assert kinds(diagnosis.problems) == ["H2D_BOUND"]
    both = together(laid_out(pageable("Pageable", late=118)), tmp_path, diagnosis)
    assert kinds(both.problems) == ["H2D_BOUND"]
    assert "Copies from or to pageable memory cost 0.118 ms per step" in both.problems[0].summary


def test_problems_come_by_what_they_would_save(tmp_path):
    # Validation takes 40 % of the wall, input 30 % of a step; a call drains 10 % of it.
    steps = [{**each, "gap": {"validation": 0.67}} for each in of_input(30)]
    both = together(laid_out(waiting_for_input), tmp_path, found(steps))
    assert kinds(both.problems) == ["VALIDATION_HEAVY", "INPUT_BOUND"]
    both = together(laid_out(drained(op="aten::item")), tmp_path / "b", found(of_input(12)))
    assert kinds(both.problems) == ["INPUT_BOUND", "QUEUE_DRAINED"]


def test_profiler_that_slows_steps_is_a_note_and_no_problem(tmp_path):
    both = together(laid_out(busy), tmp_path, found([plain(0.8)] * 30))
    assert (both.problems, kinds(both.notes)) == ((), ["PROFILER_SLOWS"])
    assert "1.2 times as long as others (1.0 ms, else 0.800 ms)" in both.notes[0].summary


@pytest.mark.parametrize(("num_steps", "is_known"), [(19, False), (20, True)])
def test_what_the_profiler_adds_is_known_from_20_other_steps(num_steps, is_known, tmp_path):
    both = together(laid_out(slow_host(gap=150)), tmp_path, found([plain(0.9)] * num_steps))
    (finding,) = [each for each in both.problems if each.kind == "HOST_BOUND"]
    assert ("unknown" in finding.prize.sentence) != is_known
    assert finding.prize.step_ns == (900 * US if is_known else 1000 * US)


def test_table_has_a_row_per_finding_in_their_order(tmp_path):
    both = together(laid_out(slow_host(gap=150)), tmp_path)
    table = both.table(with_minor=True)
    assert table.columns == [column.name for column in SCHEMA]
    assert table["place"].to_list() == [1]
    assert table.row(0, named=True)["most_ns"] == both.problems[0].prize.most_ns


def prized(share, **changes):
    prize = Prize(least_ns=None, most_ns=share * 1e8, step_ns=1e8)
    return Finding(kind="X", severity=Severity.warn, summary="It is.", action="Do.", prize=prize, **changes)


def test_prizes_are_told_as_what_is_known_of_them():
    ms = {"step_ns": 100e6}
    said = [
        Prize(least_ns=None, most_ns=30e6, **ms),
        Prize(least_ns=10e6, most_ns=30e6, is_predicted=True, **ms),
        Prize(least_ns=30e6, most_ns=30e6, is_predicted=True, doubt="perhaps", **ms),
        Prize(least_ns=0, most_ns=0, is_predicted=True, **ms),
    ]
    assert [prize.sentence for prize in said] == [
        "at most 30.0 ms of 100.0 ms per step (30.0 %).",
        "10.0 ms to 30.0 ms of 100.0 ms per step (30.0 %), by a replay without it.",
        "about 30.0 ms of 100.0 ms per step (30.0 %), by a replay without it; perhaps.",
        "none of 100.0 ms per step (0.0 %), by a replay without it.",
    ]
    assert said[1].as_json() == {
        "least_ns": 10e6, "most_ns": 30e6, "step_ns": 100e6, "is_predicted": True, "doubt": None, "share": 0.3,
    }  # fmt: skip


def test_five_problems_are_shown_and_the_part_of_another_says_so(tmp_path, capsys):
    both = together(laid_out(busy), tmp_path)
    whole = prized(0.9, evidence={})
    parts = [prized(0.1, evidence={"part_of": "X"}) for _ in range(6)]
    print_findings(console(), None, type(both)((whole, *parts), (), (), 4, (0,)))
    shown = capsys.readouterr().out
    assert "What is wrong (from 4 recorded steps; the first 5 of 7, --json has all)" in shown
    assert shown.count("Next: Do.") == 5


def test_summary_without_steps_or_times_says_nothing_of_findings(tmp_path):
    TraceBuilder().op("aten::mm", 0, 5).write(tmp_path)
    for file in (tmp_path / "0_kineto").iterdir():
        file.unlink()
    assert "wrong" not in run("summary", tmp_path).out
    shown = json.loads(run("summary", tmp_path, "--json").out)["findings"]
    assert shown == {"problems": [], "notes": [], "minor": [], "num_steps": 0, "ranks": [0]}
    assert run("analyze", "findings", tmp_path).out == "No step with a time was recorded: nothing to say.\n"


def test_steps_are_chosen(tmp_path):
    def only_later(trace: TraceBuilder, at: int, number: int) -> None:
        (waiting_for_input if number > 3 else busy)(trace, at, number)

    laid_out(only_later, num_steps=8).write(tmp_path)
    chosen = {
        steps: [
            row["kind"]
            for row in json.loads(run("analyze", "findings", tmp_path, "--step", steps, "--json").out)["rows"]
        ]
        for steps in ("0-3", "4-7")
    }
    assert chosen == {"0-3": [], "4-7": ["DEVICE_WAITS_FOR_INPUT"]}
    assert LOADER.endswith("__next__")
    assert STEP == 1000
