"""The rules of the diagnosis, each on both sides of its limits, on steps made by hand."""

import random
from typing import Any

import polars as pl
import pytest

from analysis.series import plain, records, step
from chakra_capture.analysis.diagnosis import Diagnosis, diagnose
from chakra_capture.analysis.findings import Finding
from chakra_capture.analysis.stragglers import SCHEMA, Stragglers

GIB = 1 << 30


def found(*ranks: list[dict[str, Any]], untimed: dict[str, str] | None = None, **more: Any) -> Diagnosis:
    return diagnose({rank: records(steps, untimed) for rank, steps in enumerate(ranks)}, **more)


def said(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(each.kind, each.severity.name) for each in diagnosis.findings]


def of_kind(diagnosis: Diagnosis, kind: str) -> Finding | None:
    return next((each for each in diagnosis.findings if each.kind == kind), None)


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


# Slow ranks.


def pair(excess: float, phase: str = "input_wait", num: int = 20, good: int | None = None) -> Diagnosis:
    """Two ranks; rank 1 takes more in a phase, rank 0 waits for it in backward. In steps past ``good``, reversed."""
    slow = {"input_wait": 2.0, "h2d": 2.0, "forward": 30.0, "backward": 20.0, "optimizer": 5.0}
    # All steps take 100 ms: what rank 1 takes longer it lacks in backward.
    late = step(3, **{**slow, phase: slow[phase] + excess, "backward": 60 - excess})
    early = step(3, **{**slow, "backward": 60.0})
    late["ms"] = early["ms"] = 102
    num_good = num if good is None else good
    ranks = [early] * num_good + [late] * (num - num_good), [late] * num_good + [early] * (num - num_good)
    return found(*ranks)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("input_wait", "INPUT_STRAGGLER"), ("h2d", "H2D_STRAGGLER"), ("forward", "COMPUTE_STRAGGLER")],
)
@pytest.mark.parametrize(("excess", "severity"), [(10.1, None), (10.2, "warn"), (20.3, "warn"), (20.4, "crit")])
def test_rank_that_takes_longer_in_a_phase_of_its_own_is_named_from_10_percent_of_a_step(phase, kind, excess, severity):
    finding = of_kind(pair(excess, phase), kind)
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert (finding.ranks, finding.phase) == ((1,), phase)
        assert "Rank 1 " in finding.summary
        assert finding.score == pytest.approx(excess / 102)


@pytest.mark.parametrize(("good", "is_named"), [(79, False), (80, True)])
def test_rank_is_named_if_it_is_the_slower_one_in_80_of_100_steps(good, is_named):
    assert (of_kind(pair(30, num=100, good=good), "INPUT_STRAGGLER") is not None) == is_named


@pytest.mark.parametrize(("num", "is_named"), [(9, False), (10, True)])
def test_rank_is_named_from_10_common_steps_on(num, is_named):
    finding = of_kind(pair(30, num=num), "INPUT_STRAGGLER")
    assert (finding and finding.severity.name) == ("warn" if is_named else None)


def test_rank_that_waits_in_forward_for_buffers_is_not_named():
    # DistributedDataParallel broadcasts buffers at the start of forward: there rank 0 waits for rank 1's slow loader.
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(4, input_wait=28, forward=30, backward=30, optimizer=2)
    diagnosis = found([waiting] * 20, [late] * 20)
    assert [(each.kind, each.ranks) for each in diagnosis.problems] == [("INPUT_STRAGGLER", (1,))]


def test_rank_that_waits_in_forward_for_what_is_in_no_phase_is_not_named_either():
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(31, input_wait=1, forward=30, backward=30, optimizer=2)
    assert not [each for each in found([waiting] * 20, [late] * 20).findings if each.ranks == (0,)]


def test_rest_of_a_step_names_no_rank():
    apart = [step(40, input_wait=5, forward=30, backward=50, optimizer=10)] * 20
    assert not [each for each in found([plain()] * 20, apart).findings if "STRAGGLER" in each.kind]


@pytest.mark.parametrize(("lost", "severity"), [(9.9, None), (10, "warn"), (19.9, "warn"), (20, "crit")])
def test_rank_the_others_wait_for_in_backward_without_a_measured_cause_is_a_straggler(lost, severity):
    waiting = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    late = step(4 + lost, input_wait=1, forward=30, backward=63 - lost, optimizer=2)
    finding = of_kind(found([waiting] * 20, [late] * 20), "STRAGGLER")
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert (finding.ranks, finding.phase) == ((1,), "sync")


@pytest.mark.parametrize(("excess", "kind"), [(7.9, "STRAGGLER"), (8, "INPUT_STRAGGLER")])
def test_a_cause_is_named_if_it_explains_80_percent_of_what_the_others_lose(excess, kind):
    waiting = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    late = step(4 + 10 - excess, input_wait=1 + excess, forward=30, backward=53, optimizer=2)
    assert found([waiting] * 20, [late] * 20).step_time[0].kind == kind


def test_ranks_that_do_not_keep_step_do_not_wait_for_the_one_that_has_less_to_do():
    busy = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    idle = step(4, input_wait=1, forward=30, backward=13, optimizer=2)
    diagnosis = found([busy] * 20, [idle] * 20)
    assert not [each for each in diagnosis.findings if each.ranks == (1,) and "STRAGGLER" in each.kind]
    assert [(each.kind, each.ranks) for each in diagnosis.problems] == [("COMPUTE_STRAGGLER", (0,))]


def test_one_of_eight_ranks_is_named_and_input_is_not_blamed_on_all():
    ranks = [[plain()] * 20 for _ in range(8)]
    ranks[5] = [step(5, input_wait=35, forward=30, backward=20, optimizer=10)] * 20
    assert [(each.kind, each.ranks) for each in found(*ranks).problems] == [("INPUT_STRAGGLER", (5,))]


def test_all_ranks_with_a_slow_loader_are_input_bound_and_nobody_is_named():
    ranks = [[split("input_wait", 30)] * 20] * 2
    assert said(found(*ranks)) == [("INPUT_BOUND", "crit")]


def test_no_rank_is_named_among_ranks_that_are_all_alike():
    alarms = 0
    for seed in range(20):
        rng = random.Random(seed)
        ranks = [
            [plain(100) | {"phases": {name: ms * rng.uniform(0.8, 1.6) for name, ms in plain()["phases"].items()}}
             for _ in range(40)]
            for _ in range(2)
        ]  # fmt: skip
        for steps in ranks:
            for each in steps:
                each["ms"] = sum(each["phases"].values()) + 5
        alarms += any("STRAGGLER" in each.kind for each in found(*ranks).findings)
    assert alarms == 0


def test_rank_with_few_steps_is_left_out_and_counted():
    steps = [plain()] * 20
    diagnosis = found(steps, steps, [plain()] * 9)
    assert (diagnosis.window.ranks, diagnosis.window.num_steps) == ((0, 1), 20)
    assert diagnosis.coverage["forward"]["ranks"] == "2/3"
    assert found(steps, [plain()] * 10).window.num_steps == 10


@pytest.mark.parametrize(("share", "severity"), [(0.099, None), (0.10, "warn"), (0.20, "crit")])
def test_rank_that_only_collectives_show_to_be_late_is_named(share, severity):
    table = pl.DataFrame(
        [(0, 30, 0, -1e6, 9e6, -share, False), (1, 30, 30, share * 1e8, 0.0, share, True)],
        schema={column.name: column.dtype for column in SCHEMA},
        orient="row",
    )
    late = Stragglers(table, (1,), None, 30, True, 1e8)
    finding = of_kind(found([plain()] * 20, [plain()] * 20, collectives=late), "STRAGGLER")
    assert (finding and finding.severity.name) == severity


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


# Memory.


def with_memory(values: list[int], capacity: int | None = None, peak: int | None = None) -> list[dict[str, Any]]:
    return [plain() | {"memory": (value, None, peak, capacity)} for value in values]


def growing(grown: float, num: int = 100, first: int = GIB) -> list[int]:
    """The bands at 15-25, 45-55 and 90-100 of 100 hold first, half way and first + grown."""
    return [first + round(grown * (0 if at < 0.4 * num else 0.5 if at < 0.8 * num else 1)) for at in range(num)]


@pytest.mark.parametrize(("used", "severity"), [(0.919, None), (0.92, "warn"), (0.969, "warn"), (0.97, "crit")])
def test_memory_near_the_capacity_of_the_device(used, severity):
    finding = of_kind(found(with_memory([0] * 50, 100_000, round(used * 100_000))), "HIGH_PRESSURE")
    assert (finding and finding.severity.name) == severity
    assert of_kind(found(with_memory([0] * 49, 100_000, 99_999)), "HIGH_PRESSURE") is None


@pytest.mark.parametrize(
    ("skew", "used", "severity"),
    [(0.19, 0.9, None), (0.2, 0.3, "warn"), (0.2, 0.29, None), (0.3, 0.49, "warn"), (0.29, 0.5, "warn"),
     (0.3, 0.5, "crit")],
)  # fmt: skip
def test_memory_apart_between_ranks_counts_where_it_is_short(skew, used, severity):
    peaks = [1000, 1000, round(1000 * (1 + skew))]
    capacity = round(peaks[2] / used)
    finding = of_kind(found(*[with_memory([0] * 50, capacity, peak) for peak in peaks]), "IMBALANCE")
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert finding.ranks == (2,)


@pytest.mark.parametrize(
    ("grown", "expected"), [(0, None), (2, "CREEP_EARLY"), (GIB - 2, "CREEP_EARLY"), (GIB, "CREEP_CONFIRMED")]
)
def test_device_memory_that_grows_is_a_creep_from_1_gib(grown, expected):
    kinds = [each.kind for each in found(with_memory(growing(grown))).memory]
    assert kinds == ([] if expected is None else [expected])


def test_memory_that_comes_back_or_grows_on_one_rank_alone_is_no_creep():
    up_and_down = [GIB + (3 * GIB if 40 <= at < 60 else 0) for at in range(100)]
    assert found(with_memory(up_and_down)).memory == ()
    flat = with_memory([GIB] * 100)
    assert found(flat, flat, with_memory(growing(2 * GIB))).memory == ()


@pytest.mark.parametrize(("grown", "expected"), [(0.059, None), (0.061, "CREEP_EARLY"), (1.01, "CREEP_CONFIRMED")])
def test_process_memory_is_said_from_6_percent(grown, expected):
    steps = [plain() | {"rss": value} for value in growing(grown * GIB)]
    assert [each.kind for each in found(steps).memory] == ([] if expected is None else [expected])
    if expected:
        assert found(steps[::5]).memory == ()  # 20 steps are too few


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


def test_longer_forward_of_a_rank_is_not_its_own_where_another_rank_is_late_by_as_much():
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(4, input_wait=31, forward=30, backward=52, optimizer=2)
    diagnosis = found([waiting] * 20, [late] * 20)
    assert [each.ranks for each in diagnosis.problems if "STRAGGLER" in each.kind] == [(1,)]


def test_one_of_three_ranks_with_less_to_do_is_not_waited_for():
    busy, idle = (step(4, input_wait=1, forward=30, backward=ms, optimizer=2) for ms in (63, 50))
    assert not [each for each in found([busy] * 20, [busy] * 20, [idle] * 20).findings if "STRAGGLER" in each.kind]
