"""The rules of the diagnosis, each on both sides of its limits, on steps made by hand."""

from typing import Any

import pytest

from analysis.series import found, of_kind, pair, plain, said, step


def split(part: str, percent: float) -> dict[str, Any]:
    """A step of 100 ms with so much of a part, and forward for the rest of it."""
    small = {"input_wait": 0.0, "backward": 1.0, "optimizer": 1.0}
    if part == "rest":
        return step(percent, forward=98 - percent, **small)
    return step(forward=98 - percent, **{**small, part: percent})


@pytest.mark.parametrize(("part", "kind"), [("input_wait", "INPUT_BOUND"), ("rest", "RESIDUAL_HEAVY")])
@pytest.mark.parametrize(("percent", "severity"), [(9.9, None), (10, "warn"), (19.9, "warn"), (20, "crit")])
def test_share_of_a_step_speaks_from_10_and_is_critical_from_20_percent(part, kind, percent, severity):
    diagnosis = found([split(part, percent)] * 20)
    finding = of_kind(diagnosis, kind)
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert (finding.share, finding.score) == (pytest.approx(percent / 100), pytest.approx(percent / 100))
        assert f"{percent:.1f} %" in finding.summary
        assert finding.action


@pytest.mark.parametrize(("percent", "is_said"), [(89.9, False), (90, True)])
def test_compute_bound_is_said_from_90_percent_without_a_score(percent, is_said):
    # What is no compute is spread over input and rest, each below its own limit.
    other = (100 - percent) / 2
    steps = [step(other, input_wait=other, forward=10, backward=percent - 20, optimizer=10)] * 20
    finding = of_kind(found(steps), "COMPUTE_BOUND")
    assert (finding is not None) == is_said
    if finding is not None:
        assert (finding.severity.name, finding.score, finding.phase) == ("info", None, "backward")
    if not is_said:
        assert said(found(steps)) == [("BALANCED", "info")]


@pytest.mark.parametrize(("num_steps", "expected"), [(0, "NO_DATA"), (1, "WARMUP"), (2, "INPUT_BOUND")])
def test_a_verdict_needs_two_steps(num_steps, expected):
    diagnosis = found([split("input_wait", 50)] * num_steps)
    assert diagnosis.step_time[0].kind == expected
    assert diagnosis.as_json()["verdict"] == expected


@pytest.mark.parametrize(("num_steps", "severity"), [(19, "warn"), (20, "crit")])
def test_nothing_is_critical_below_20_steps(num_steps, severity):
    assert said(found([split("input_wait", 50)] * num_steps)) == [("INPUT_BOUND", severity)]
    between = [plain(gap={"validation": 100.0})] * num_steps
    assert ("VALIDATION_HEAVY", severity) in said(found(between))


def test_profiled_first_and_cut_steps_do_not_count():
    odd = [step(input_wait=900, forward=1, backward=1, optimizer=1) | {"flags": [flag]}
           for flag in ("profiled", "first", "partial")]  # fmt: skip
    assert said(found(odd)) == [("NO_DATA", "info")]
    assert said(found([*odd, *[plain()] * 20])) == [("COMPUTE_BOUND", "info")]


def test_forward_unseen_in_one_step_of_100_is_left_out_there_and_counted():
    unseen = step(80, input_wait=5, backward=5, optimizer=10)
    diagnosis = found([*[plain()] * 99, unseen])
    assert said(diagnosis) == [("COMPUTE_BOUND", "info")]
    assert diagnosis.coverage["forward"] == {"ranks": "1/1", "steps": "99/100"}
    assert diagnosis.window.mean("forward").tolist() == [30e6]
    assert diagnosis.window.mean("rest").tolist() == [5e6]  # the 80 ms of the other step are not known to be rest


def test_a_signal_that_no_rule_can_do_without_makes_the_data_incomplete_not_balanced():
    steps = [step(60, input_wait=5, backward=35)] * 20
    diagnosis = found(steps, untimed={"forward": "not wrapped", "optimizer": "not wrapped"})
    assert said(diagnosis) == [("INCOMPLETE_DATA", "info")]
    assert diagnosis.step_time[0].evidence == {
        "missing_signals": ["forward", "optimizer"],
        "signal_coverage": {"forward": "0/1", "optimizer": "0/1"},
    }
    # A rule that has its parts speaks all the same.
    loud = [step(60, input_wait=35, backward=5)] * 20
    assert said(found(loud, untimed={"forward": "not wrapped"})) == [("INPUT_BOUND", "crit")]


def test_update_missing_in_some_steps_takes_no_time_there_and_is_null_where_it_was_not_timed():
    steps = [*[plain()] * 10, *[step(15, input_wait=5, forward=30, backward=50)] * 10]
    assert found(steps).window.mean("optimizer").tolist() == [5e6]
    assert str(found(steps[10:], untimed={"optimizer": "no"}).window.mean("optimizer").tolist()) == "[nan]"


def on_device(h2d: float, **changes: Any) -> dict[str, Any]:
    parts = {"input_wait": 0.0, "h2d": h2d, "forward": 40.0, "backward": 50 - h2d, "optimizer": 5.0}
    made = step(5, **parts)
    return made | {"device": {**parts, "step": 100.0} | changes}


@pytest.mark.parametrize(("percent", "severity"), [(9.9, None), (10, "warn"), (19.9, "warn"), (20, "crit")])
def test_copies_count_on_the_device_clock_alone(percent, severity):
    diagnosis = found([on_device(percent)] * 20)
    assert diagnosis.window.clock == "gpu"
    finding = of_kind(diagnosis, "H2D_BOUND")
    assert (finding and finding.severity.name) == severity
    on_cpu = [each | {"device": None} for each in [on_device(50)] * 20]
    assert of_kind(found(on_cpu), "H2D_BOUND") is None


@pytest.mark.parametrize("missing", ["step", "input_wait", "h2d", "forward", "backward", "optimizer"])
def test_one_device_time_that_is_missing_puts_all_ranks_on_the_cpu_clock(missing):
    whole = [on_device(1)] * 20
    device = {name: ms for name, ms in whole[0]["device"].items() if name != missing}
    if missing == "step":
        broken = [*whole[:19], {**whole[19], "device": None}]
    else:
        broken = [*whole[:19], {**whole[19], "device": device}]
    assert found(whole, whole).window.clock == "gpu"
    assert found(whole, broken).window.clock == "cpu"


# Between steps, and over time.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("validation", "VALIDATION_HEAVY"),
        ("checkpoint", "CHECKPOINT_HEAVY"),
        ("callbacks", "CALLBACKS_HEAVY"),
        ("other", "BETWEEN_STEPS_HEAVY"),
    ],
)
@pytest.mark.parametrize(("percent", "severity"), [(9.9, None), (10, "warn"), (19.9, "warn"), (20, "crit")])
def test_what_comes_between_steps_speaks_from_10_percent_of_the_wall(name, kind, percent, severity):
    finding = of_kind(found([plain(100 - percent, gap={name: percent})] * 20), kind)
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert f"{percent:.1f} %" in finding.summary


def test_recording_is_no_part_of_the_wall_time():
    steps = [plain(90, gap={"validation": 10.0, "recording": 900.0})] * 20
    assert of_kind(found(steps), "VALIDATION_HEAVY").share == pytest.approx(0.1)


def test_checkpoint_of_one_rank_names_it():
    finding = of_kind(found([plain(gap={"checkpoint": 50.0})] * 20, [plain()] * 20), "CHECKPOINT_HEAVY")
    assert (finding.ranks, finding.share) == ((0,), pytest.approx(1 / 3))
    assert "on rank 0" in finding.summary


@pytest.mark.parametrize("waiting", ["callbacks", "other"])
def test_rank_that_waits_between_its_steps_for_the_checkpoint_of_another_one_is_not_named(waiting):
    diagnosis = found([plain(gap={"checkpoint": 50.0})] * 20, [plain(gap={waiting: 50.0})] * 20)
    assert {each.phase: each.ranks for each in diagnosis.problems} == {
        "checkpoint": (0,),
        {"other": "between_other"}.get(waiting, waiting): (),
    }
    alone = found([plain()] * 20, [plain(gap={waiting: 50.0})] * 20)
    assert [each.ranks for each in alone.problems] == [(1,)]


@pytest.mark.parametrize("waiting", ["forward", "backward"])
def test_rank_that_waits_in_its_step_for_the_checkpoint_of_another_one_is_not_named(waiting):
    busy = {"input_wait": 1.0, "forward": 30.0, "backward": 30.0, "optimizer": 2.0}
    late = step(4, **busy) | {"gap": {"checkpoint": 25.0}}
    diagnosis = found([late] * 20, [step(4, **{**busy, waiting: 55.0})] * 20)
    assert [(each.kind, each.ranks) for each in diagnosis.problems] == [("CHECKPOINT_HEAVY", (0,))]


def rising(growth: float, num: int = 104, wobble: int = 0) -> list[dict[str, Any]]:
    """Eight batches of steps, from 100 ms to 1 + growth times that; the first ``wobble`` batches come backwards."""
    batches = [100 * (1 + growth * at / 7) for at in range(8)]
    batches[:wobble] = reversed(batches[:wobble])
    return [plain(batches[at * 8 // num]) for at in range(num)]


@pytest.mark.parametrize(("growth", "is_said"), [(0.079, False), (0.081, True)])
def test_steps_that_take_longer_and_longer_are_said_from_8_percent(growth, is_said):
    finding = of_kind(found(rising(growth)), "STEPS_SLOW_DOWN")
    assert (finding is not None) == is_said
    if finding is not None:
        assert (finding.phase, finding.score) == ("backward", pytest.approx(growth))


@pytest.mark.parametrize(("num", "is_said"), [(96, False), (104, True)])
def test_a_trend_needs_100_steps(num, is_said):
    assert (of_kind(found(rising(0.5, num)), "STEPS_SLOW_DOWN") is not None) == is_said


def test_steps_that_only_go_up_and_down_are_no_trend():
    # Three batches backwards turn 3 of 28 pairs, four turn 6.
    assert of_kind(found(rising(0.5, wobble=3)), "STEPS_SLOW_DOWN") is not None
    assert of_kind(found(rising(0.5, wobble=4)), "STEPS_SLOW_DOWN") is None


def test_findings_come_in_order_of_severity_then_score():
    steps = [split("input_wait", 30) | {"gap": {"validation": 15.0}}] * 20
    assert said(found(steps)) == [("INPUT_BOUND", "crit"), ("VALIDATION_HEAVY", "warn")]
    both = [step(25, input_wait=30, forward=43, backward=1, optimizer=1)] * 20
    assert said(found(both)) == [("INPUT_BOUND", "crit"), ("RESIDUAL_HEAVY", "crit")]


def test_every_finding_says_what_to_do_in_one_sentence():
    everything = found([step(40, input_wait=40, forward=10, backward=5, optimizer=5) | {"gap": {"other": 90.0}}] * 20)
    for finding in [*everything.findings, *pair(30).findings, *found(rising(0.5)).findings]:
        assert [text[-1] for text in (finding.summary, finding.action)] == [".", "."]
        assert "\n" not in finding.summary + finding.action
