"""A what-if against steps in which the change is really made, recorded in turn in one training."""

import statistics
import time

import torch
from commands import run as command
from recording.recorded import settings

from analysis.test_replay import traces_of
from chakra_capture import capture
from chakra_capture.analysis.what_if.changes import parse_changes
from chakra_capture.analysis.what_if.predict import models
from chakra_capture.trace.merged import MergedRun

SLEEP_S, NUM_STEPS = 0.02, 24


def test_every_other_step_sleeps_and_without_its_sleep_it_takes_what_the_others_take(tmp_path):
    network = torch.nn.Linear(64, 64)
    chosen = settings(tmp_path, 2, NUM_STEPS - 1, phases=False)
    with capture(chosen) as session:
        for step in range(NUM_STEPS):
            with session.step(step):
                if step % 2:
                    with torch.profiler.record_function("late"):
                        time.sleep(SLEEP_S)
                network(torch.ones(8, 64)).sum().backward()
    assert command("merge", tmp_path).code == 0
    merged = next(path.parent for path in tmp_path.rglob("rank=0"))
    (found,) = models(MergedRun(merged), traces_of(merged))
    predicted = found.predict(parse_changes(["op~^late$=0"], [], overlap_comm=False))
    late, others = ([one for one in predicted if one.span.step and one.span.step % 2 == odd] for odd in (1, 0))

    measured = statistics.median(one.span.measured_ns for one in others)
    without = statistics.median(one.fastest_ns for one in late)
    before = statistics.median(one.span.measured_ns for one in late)
    assert all(one.fastest_ns == one.slowest_ns for one in late)
    # To a quarter of what the change is, however busy the machine; no change would be off by all of it.
    assert abs(without - measured) < (before - measured) / 4
    assert all(one.fastest_ns == one.span.measured_ns for one in others)
