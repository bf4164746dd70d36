"""Rules on what a device loses, each on a small built trace where it must speak and on one where it must not.

No handed trace shows these, so they are laid out by hand: steps of 1000 us, all alike, times in us.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.analysis.findings import Finding
from chakra_capture.analysis.window_findings.recorded import Pace, Recorded
from chakra_capture.analysis.window_findings.rules import window_findings
from chakra_capture.trace.merged import MergedRun

US = 1000
STEP = 1000
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKER = 55
_Step = Callable[[TraceBuilder, int, int], None]


def laid_out(make: _Step, num_steps: int = 4) -> TraceBuilder:
    """Steps of which ``make`` adds what is in them, given their start and number."""
    trace = TraceBuilder()
    for number in range(num_steps):
        trace.step(number, number * STEP, STEP)
        make(trace, number * STEP, number)
    return trace


def said(trace: TraceBuilder, folder: Path, pace: Pace | None = None) -> dict[str, Finding]:
    """What the rules say of one rank, by kind."""
    merged = trace.merged(folder)
    found = window_findings(Recorded([merged], MergedRun(folder / "out"), pace=pace))
    assert len({finding.kind for finding in found}) == len(found)
    return {finding.kind: finding for finding in found}


def busy(trace: TraceBuilder, at: int, number: int) -> None:
    """A kernel that fills the step but for 20 us."""
    trace.op("aten::mm", at, 14).launched("gemm", at + 20, 980, 100 + number, at=at + 4)


def test_of_a_busy_device_nothing_is_said(tmp_path):
    assert said(laid_out(busy), tmp_path) == {}


def waiting_for_input(trace: TraceBuilder, at: int, number: int) -> None:
    """The loader takes 300, then 700 are computed."""
    trace.annotation(LOADER, at, 300).op("aten::mm", at + 300, 10)
    trace.launched("gemm", at + 305, 695, 100 + number, at=at + 303)


def test_device_that_idles_while_the_loop_waits_for_data(tmp_path):
    found = said(laid_out(waiting_for_input), tmp_path)
    finding = found["DEVICE_WAITS_FOR_INPUT"]
    assert (finding.severity.name, finding.evidence["idle_ns"]) == ("crit", 300 * US)
    assert "The device idles 0.300 ms of each step (30.0 %) while the loop waits for data." in finding.summary
    # The replay: 4 steps without 300 of 1000 each.
    assert finding.prize.is_predicted
    assert finding.prize.most_ns == pytest.approx(300 * US, rel=0.02)


def hidden_input(trace: TraceBuilder, at: int, number: int) -> None:
    """The same wait, while what was launched before runs on."""
    trace.annotation(LOADER, at + 10, 300).op("aten::mm", at, 8)
    trace.launched("gemm", at + 5, 990, 100 + number, at=at + 2)


def test_wait_for_data_under_queued_work_costs_nothing(tmp_path):
    assert "DEVICE_WAITS_FOR_INPUT" not in said(laid_out(hidden_input), tmp_path)


def pageable(kind: str, *, late: int) -> _Step:
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.op("aten::copy_", at, 120).runtime("cudaMemcpyAsync", at + 2, late, 500 + number)
        trace.kernel(f"Memcpy HtoD ({kind} -> Device)", at + 20, 100, 500 + number, cat="gpu_memcpy")
        trace.op("aten::mm", at + 121, 5).launched("gemm", at + 124, 876, 100 + number, at=at + 122)

    return make


def test_copies_from_pageable_memory_that_nothing_hides(tmp_path):
    finding = said(laid_out(pageable("Pageable", late=118)), tmp_path)["PAGEABLE_COPIES"]
    # 100 of the copy, and before it 18 from the call on, in which the host stages.
    assert (finding.evidence["exposed_ns"], finding.evidence["staging_ns"]) == (100 * US, 18 * US)
    assert finding.prize.share <= 0.118
    assert (finding.severity.name, finding.evidence["num_copies"]) == ("warn", 1)


def test_copies_from_pinned_memory_are_no_finding(tmp_path):
    assert "PAGEABLE_COPIES" not in said(laid_out(pageable("Pinned", late=5)), tmp_path)


def test_little_from_pageable_memory_beside_much_from_pinned_is_no_finding(tmp_path):
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        pageable("Pinned", late=5)(trace, at, number)
        trace.op("aten::copy_", at + 128, 6).runtime("cudaMemcpyAsync", at + 129, 4, 700 + number)
        trace.kernel("Memcpy HtoD (Pageable -> Device)", at + 130, 2, 700 + number, cat="gpu_memcpy", stream=9)

    assert "PAGEABLE_COPIES" not in said(laid_out(make), tmp_path)


def slow_host(*, gap: int, ops: int = 4, dur: int = 100) -> _Step:
    """Ops of which each launches a kernel of 100 after ``gap`` of host time."""

    def make(trace: TraceBuilder, at: int, number: int) -> None:
        for place in range(ops):
            begin = at + place * (gap + dur)
            trace.op(f"aten::op{place}", begin, gap).launched(
                "k", begin + gap, dur, 100 * number + place + 1, at=begin + gap - 2
            )

    return make


def test_host_that_launches_too_slowly_names_its_ops(tmp_path):
    finding = said(laid_out(slow_host(gap=150)), tmp_path)["HOST_BOUND"]
    # 4 x 100 computed; of the 600 idle 4 x 148 are in ops, 4 x 2 in launches and their latency.
    assert finding.evidence["idle_ns"] == 600 * US
    assert finding.evidence["ops"] == {f"aten::op{place}": 148 * US for place in range(3)}
    assert finding.severity.name == "crit"
    assert finding.prize.doubt == "less what the profiler adds (unknown: no unprofiled steps)"
    assert (finding.prize.least_ns, finding.prize.most_ns) == (None, 600 * US)


def test_what_the_profiler_adds_is_taken_off_the_prize_of_a_slow_host(tmp_path):
    finding = said(laid_out(slow_host(gap=150)), tmp_path, Pace(900.0 * US, 30))["HOST_BOUND"]
    assert (finding.prize.most_ns, finding.prize.step_ns) == (500 * US, 900 * US)
    # All of it may be the profiler's: then it is no problem any more.
    found = said(laid_out(slow_host(gap=150)), tmp_path / "b", Pace(400.0 * US, 30))
    assert found["HOST_BOUND"].prize.most_ns == 0
    assert found["HOST_BOUND"].severity.name == "info"
    assert found["PROFILER_SLOWS"].evidence["factor"] == 2.5


def test_recorded_steps_that_are_hardly_slower_are_not_worth_a_word(tmp_path):
    assert "PROFILER_SLOWS" in said(laid_out(busy), tmp_path, Pace(833.0 * US, 30))
    assert "PROFILER_SLOWS" not in said(laid_out(busy), tmp_path / "b", Pace(840.0 * US, 30))


def test_host_is_not_to_blame_below_a_fifth_of_the_step_idle(tmp_path):
    # 8 x 100 computed, 25 before each: 20 % idle; 8 less of that is less than a fifth.
    assert "HOST_BOUND" in said(laid_out(slow_host(gap=25, ops=8)), tmp_path)
    assert "HOST_BOUND" not in said(laid_out(slow_host(gap=24, ops=8, dur=101)), tmp_path / "b")


def test_host_is_not_to_blame_where_it_is_the_smaller_part_of_idle_time(tmp_path):
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.annotation(LOADER, at, 300).op("aten::mm", at + 300, 101)
        trace.launched("gemm", at + 401, 599, 100 + number, at=at + 400)

    found = said(laid_out(make), tmp_path)
    assert "DEVICE_WAITS_FOR_INPUT" in found
    assert "HOST_BOUND" not in found


def test_two_steps_are_too_few_to_say_why_a_device_idles(tmp_path):
    found = said(laid_out(slow_host(gap=150), num_steps=2), tmp_path)
    assert [*found] == ["CAPTURE_QUALITY"]
    assert found["CAPTURE_QUALITY"].summary == "The device is idle 60.0 % of a step; to say why takes 3 recorded steps."


def many_kernels(*, dur: float, call: float = 2.0, count: int = 250) -> _Step:
    """Kernels, each launched within an op of its own."""

    def make(trace: TraceBuilder, at: int, number: int) -> None:
        for place in range(count):
            begin = at + 4 * place
            trace.op("aten::add", begin, 3).runtime("cudaLaunchKernel", begin + 0.5, call, 1000 * number + place + 1)
            trace.kernel("add", begin + 3, dur, 1000 * number + place + 1)

    return make


def test_kernels_as_short_as_their_launches(tmp_path):
    finding = said(laid_out(many_kernels(dur=1.0)), tmp_path)["SHORT_KERNELS"]
    shown = {name: finding.evidence[name] for name in ("kernel_p50_ns", "call_p50_ns", "num_kernels")}
    assert shown == {"kernel_p50_ns": 1 * US, "call_p50_ns": 2 * US, "num_kernels": 250}
    assert finding.evidence["part_of"] == "HOST_BOUND"


def test_kernels_that_take_twice_their_launch_or_are_few_are_not_short(tmp_path):
    # The host is why the device idles in both, so that is not the reason.
    for name, make in (("long", many_kernels(dur=1.0, call=0.5)), ("few", many_kernels(dur=1.0, count=199))):
        found = said(laid_out(make), tmp_path / name)
        assert "HOST_BOUND" in found
        assert "SHORT_KERNELS" not in found


def test_short_kernels_that_the_host_keeps_ahead_of_are_no_finding(tmp_path):
    found = said(laid_out(many_kernels(dur=3.9, call=2.0)), tmp_path)
    assert found.keys().isdisjoint({"HOST_BOUND", "SHORT_KERNELS"})


def python_between(*, pause: int) -> _Step:
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.annotation("train", at, STEP - 1).op("aten::first", at + 1, 9)
        trace.launched("a", at + 10, 400, 10 * number + 1, at=at + 8)
        trace.op("aten::second", at + 410 + pause, 10)
        trace.launched("b", at + 420 + pause, 580 - pause, 10 * number + 2, at=at + 418 + pause)

    return make


def test_python_between_two_operators_is_named_by_both(tmp_path):
    finding = said(laid_out(python_between(pause=100)), tmp_path)["BETWEEN_OPS"]
    assert finding.evidence["under"] == "train"
    assert finding.evidence["place"] == "after aten::first, before aten::second"
    # The pause, and 1 at the start of each step.
    assert finding.evidence["between_ns"] == 101 * US
    assert (
        "0.101 ms per step (10.1 %) pass in Python between operators while the device is idle, the longest under train"
        in finding.summary
    )


def test_little_python_between_operators_is_not_worth_a_word(tmp_path):
    assert "BETWEEN_OPS" not in said(laid_out(python_between(pause=40)), tmp_path)


def test_long_in_one_step_is_who_lost_the_core_and_a_little_everywhere_the_profiler(tmp_path):
    def once(trace: TraceBuilder, at: int, number: int) -> None:
        python_between(pause=300 if number == 2 else 0)(trace, at, number)

    def everywhere(trace: TraceBuilder, at: int, number: int) -> None:
        trace.annotation("train", at, STEP - 1)
        for place in range(8):
            begin = at + 100 * place
            trace.op(f"aten::op{place}", begin, 8)
            trace.launched("k", begin + 8, 80, 10 * number + place + 1, at=begin + 6)
        trace.op("aten::last", at + 800, 8).launched("k", at + 808, 192, 10 * number + 9, at=at + 806)

    assert "BETWEEN_OPS" not in said(laid_out(once, num_steps=5), tmp_path)
    assert "BETWEEN_OPS" not in said(laid_out(everywhere), tmp_path / "b")


def drained(*, op: str | None, every: int = 1, phase: bool = True) -> _Step:
    """A call waits until the device is done at 500; the next kernel comes 100 later."""

    def make(trace: TraceBuilder, at: int, number: int) -> None:
        if phase:
            trace.annotation("forward", at, STEP - 1)
        trace.op("aten::first", at + 1, 9).launched("a", at + 10, 490, 10 * number + 1, at=at + 8)
        if number % every == 0:
            if op is not None:
                trace.op(op, at + 50, 452)
            trace.runtime("cudaStreamSynchronize", at + 52, 449, 10 * number + 5)
            trace.op("aten::second", at + 560, 40)
            trace.launched("b", at + 600, 400, 10 * number + 2, at=at + 598)
        else:
            trace.op("aten::second", at + 60, 40).launched("b", at + 500, 500, 10 * number + 2, at=at + 98)

    return make


def test_call_that_drains_the_queue_in_each_step(tmp_path):
    finding = said(laid_out(drained(op="aten::item")), tmp_path)["QUEUE_DRAINED"]
    assert finding.evidence["call"] == "aten::item (cudaStreamSynchronize)"
    assert (finding.evidence["num_per_step"], finding.evidence["idle_ns"]) == (1, 100 * US)
    assert (finding.phase, finding.severity.name) == ("forward", "warn")


def test_call_that_drains_the_queue_in_every_other_step_only_is_no_finding(tmp_path):
    assert "QUEUE_DRAINED" not in said(laid_out(drained(op="aten::item", every=2)), tmp_path)


def test_synchronisation_outside_ops_and_phases_is_how_benchmarks_end(tmp_path):
    assert "QUEUE_DRAINED" in said(laid_out(drained(op=None)), tmp_path)
    assert "QUEUE_DRAINED" in said(laid_out(drained(op="aten::item", phase=False)), tmp_path / "b")
    assert "QUEUE_DRAINED" not in said(laid_out(drained(op=None, phase=False)), tmp_path / "c")


def allocating(*steps: int, dur: int = 50) -> _Step:
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        busy(trace, at, number)
        if number in steps:
            trace.op("aten::empty", at + 100, 60).runtime("cudaMalloc", at + 105, dur, 900 + number)

    return make


def test_memory_that_is_allocated_in_steady_state(tmp_path):
    finding = said(laid_out(allocating(1, 2, 3)), tmp_path)["DEVICE_ALLOCATIONS"]
    assert (finding.evidence["num_calls"], finding.evidence["call_ns"]) == (0.75, 37.5 * US)


def test_memory_that_is_allocated_at_the_start_or_once_is_no_finding(tmp_path):
    assert "DEVICE_ALLOCATIONS" not in said(laid_out(allocating(0, 1)), tmp_path)
    assert "DEVICE_ALLOCATIONS" not in said(laid_out(allocating(2)), tmp_path / "b")
    # 3 x 12 us of 4000: less than 1 %.
    assert "DEVICE_ALLOCATIONS" not in said(laid_out(allocating(1, 2, 3, dur=12)), tmp_path / "c")


def test_step_that_takes_three_times_as_long_is_left_out(tmp_path):
    trace = TraceBuilder().step(0, 0, 5000).op("aten::start_up", 0, 4990)
    trace.launched("k", 4992, 5, 99, at=4990)
    for number in range(1, 4):
        trace.step(number, 4000 + number * STEP, STEP)
        busy(trace, 4000 + number * STEP, number)
    assert said(trace, tmp_path) == {}


def layouts(*, share: int, conv: str = "aten::conv2d") -> _Step:
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.op(conv, at, 8).launched("nchwToNhwcKernel<float>", at + 5, share, 10 * number + 1, at=at + 1)
        trace.launched("implicit_gemm", at + 5 + share, 990 - share, 10 * number + 2, at=at + 3)
        trace.runtime("cudaDeviceSynchronize", at + 20, 977, 10 * number + 3)

    return make


def test_layout_conversions_beside_convolutions(tmp_path):
    finding = said(laid_out(layouts(share=100)), tmp_path)["LAYOUT_CONVERSIONS"]
    assert finding.evidence["kernel_ns"] == 100 * US
    assert "(10.1 % of compute)" in finding.summary  # 100 of 990
    assert finding.prize.is_predicted
    assert finding.prize.most_ns == pytest.approx(100 * US, rel=0.05)


def test_few_layout_conversions_or_without_convolutions_are_no_finding(tmp_path):
    assert "LAYOUT_CONVERSIONS" not in said(laid_out(layouts(share=45)), tmp_path)
    assert "LAYOUT_CONVERSIONS" not in said(laid_out(layouts(share=100, conv="aten::transpose")), tmp_path / "b")


def collective(*, dur: int, launch: int) -> _Step:
    """An all_reduce of ``dur``, alone from 100 on; what comes after it is launched at ``launch``."""

    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.op("aten::first", at, 9).launched("a", at + 10, 90, 10 * number + 1, at=at + 5)
        trace.op("c10d::allreduce_", at + 20, 10)
        more = {"Collective name": "allreduce", "stream": 8}
        trace.launched("ncclDevKernel_AllReduce", at + 100, dur, 10 * number + 2, at=at + 22, **more)
        trace.op("aten::second", at + launch - 2, 6)
        trace.launched("b", at + 100 + dur, 900 - dur, 10 * number + 3, at=at + launch)

    return make


def test_work_that_was_launched_waits_for_a_collective(tmp_path):
    finding = said(laid_out(collective(dur=200, launch=120)), tmp_path)["WAITS_FOR_COMMUNICATION"]
    assert finding.evidence["waited_ns"] == 180 * US  # from the launch to the end of the transfer
    assert (finding.evidence["waiting_op"], finding.evidence["collective"]) == ("aten::second", "all_reduce")


def test_collective_that_is_seen_only_because_the_host_is_late_is_a_note_without_a_prize(tmp_path):
    found = said(laid_out(collective(dur=200, launch=280)), tmp_path)
    assert found["COMMUNICATION_HOST_LATE"].evidence == {
        "num_steps": 4, "num_ranks": 1, "exposed_ns": 200 * US, "late_ns": 180 * US,
    }  # fmt: skip
    assert found["COMMUNICATION_HOST_LATE"].prize is None
    assert "WAITS_FOR_COMMUNICATION" not in found


def test_late_host_is_no_note_where_it_is_half_of_what_is_exposed(tmp_path):
    assert "COMMUNICATION_HOST_LATE" not in said(laid_out(collective(dur=200, launch=220)), tmp_path)
    assert "COMMUNICATION_HOST_LATE" in said(laid_out(collective(dur=200, launch=250)), tmp_path / "b")


def test_short_collectives_are_neither(tmp_path):
    found = said(laid_out(collective(dur=40, launch=101)), tmp_path)
    assert found.keys().isdisjoint({"WAITS_FOR_COMMUNICATION", "COMMUNICATION_HOST_LATE"})
    found = said(laid_out(collective(dur=40, launch=138)), tmp_path / "b")
    assert found.keys().isdisjoint({"WAITS_FOR_COMMUNICATION", "COMMUNICATION_HOST_LATE"})


def unexplained(*, gap: int, unlinked: int = 0) -> _Step:
    """A kernel is queued from the start, and begins ``gap`` after the one before it: nothing says why."""

    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.op("aten::mm", at, 20).launched("a", at + 5, 400, 10 * number + 1, at=at + 2)
        trace.launched("b", at + 405 + gap, 540 - gap, 10 * number + 2, at=at + 10)
        for place in range(unlinked):
            trace.kernel("lost", at + 950 + place, 1)

    return make


def test_idle_time_without_a_reason_silences_the_rules_on_idle_time(tmp_path):
    found = said(laid_out(unexplained(gap=300)), tmp_path)
    assert [*found] == ["CAPTURE_QUALITY"]
    assert "has no recorded reason, so nothing is said of why it idles" in found["CAPTURE_QUALITY"].summary


def test_activities_without_a_launch_silence_them_too(tmp_path):
    found = said(laid_out(unexplained(gap=300, unlinked=1)), tmp_path)
    assert "33.3 % of what ran on the device cannot be linked" in found["CAPTURE_QUALITY"].summary


def test_hardly_any_idle_time_needs_no_reason(tmp_path):
    def make(trace: TraceBuilder, at: int, number: int) -> None:
        trace.op("aten::mm", at, 4).launched("a", at + 2, 483, 10 * number + 1, at=at)
        trace.launched("b", at + 500, 500, 10 * number + 2, at=at + 2)

    assert said(laid_out(make), tmp_path) == {}
