"""The gaps of one device, and what each of them is as far as launches tell: the rest is the host's.

For a gap between the end of one activity and the start of the next, whose launch call is known:

* the launch began before the gap: work was queued. A copy from or to pageable memory whose call is still open is being
  staged; a short gap is the hand-over from one activity to the next; a longer one is not explained.
* the launch began in the gap: until then the host decides (``idle_host``); then comes the launch call, and from its
  end to the start of the activity the latency of the launch, which is not explained where it is long.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.host_threads import HostThreads
from chakra_capture.trace.columns import Bool, Int64

NOT_RECORDED = "launch not recorded"
IN_GRAPH = "inside a graph"
STAGING = "copy staging"
SAME_STREAM, OTHER_STREAM = "hand-over on the stream", "hand-over to another stream"
QUEUED = "unexplained: queued, not started"
HOST = "host"
LAUNCHING, LATENCY = "inside launch call", "launch latency"
LAUNCHED = "unexplained: launched, not started"
CAUSES = (NOT_RECORDED, IN_GRAPH, STAGING, SAME_STREAM, OTHER_STREAM, QUEUED, HOST, LAUNCHING, LATENCY, LAUNCHED)
LEAD, INNER, TAIL = "lead", "inner", "tail"
POSITIONS = (LEAD, INNER, TAIL)

_US = 1_000
HAND_OVER_NS, HAND_OVER_ROCM_NS = 10 * _US, 25 * _US
_LATENCY_NS = 100 * _US


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of one device on the host's clock, ascending.

    Attributes:
        call, call_before: row of the launch call of the activity that ends it, and of the one before it; -1: none.
        position: index into ``POSITIONS``.
    """

    start: Int64
    end: Int64
    call: Int64
    call_before: Int64
    is_same_stream: Bool
    is_pageable: Bool
    position: Int64


@dataclass(frozen=True, slots=True)
class Stretches:
    """Parts of gaps, each of one cause (index into ``CAUSES``)."""

    gap: Int64
    start: Int64
    end: Int64
    cause: Int64


def find_gaps(activities: pl.DataFrame, threads: HostThreads, offset_ns: int, bounds: tuple[int, int] | None) -> Gaps:
    """Find where no activity runs.

    Args:
        activities: of one device, as ``device_activities`` gives them, with ``name``.
        threads: of the same window.
        offset_ns: how far the device's clock is behind.
        bounds: first start and last end of the steps, on the device's clock; None where none is marked.
    """
    # What has no length neither begins nor ends a gap, but may be first or last.
    begins, ends = pl.col("ts_ns"), pl.col("end_ns")
    rows = activities.filter((ends > begins) | (begins == begins.min()) | (ends == ends.max()))
    call = threads.place(rows["launch_id"].fill_null(-1).to_numpy())
    never = np.iinfo(np.int64).max
    launched = np.where(call >= 0, threads.start[np.maximum(call, 0)], never) if len(threads.ids) else call
    order = np.lexsort((launched, rows["ts_ns"].to_numpy()))
    rows, call = rows[order], call[order]
    start, end = rows["ts_ns"].to_numpy() + offset_ns, rows["end_ns"].to_numpy() + offset_ns
    until = np.maximum.accumulate(end)
    # The last to end before each activity.
    last = np.maximum.accumulate(np.where(end == until, np.arange(len(end)), 0))
    after = np.flatnonzero(start[1:] > until[:-1]) + 1
    before = last[after - 1]
    gap = [until[after - 1], start[after], call[after], call[before]]
    stream = rows["stream"].fill_null(-1).to_numpy()
    same = stream[after] == stream[before]
    pageable = rows["name"].fill_null("").str.contains("Pageable").to_numpy()[after]
    position = np.full(len(after), POSITIONS.index(INNER))
    if bounds is not None and bounds[0] + offset_ns < start[0]:
        ahead = [bounds[0] + offset_ns, start[0], call[0], -1]
        gap = [np.append(value, column) for value, column in zip(ahead, gap, strict=True)]
        same, position = np.append(False, same), np.append(POSITIONS.index(LEAD), position)
        pageable = np.append("Pageable" in (rows["name"][0] or ""), pageable)
    if bounds is not None and bounds[1] + offset_ns > until[-1]:
        behind = [until[-1], bounds[1] + offset_ns, -1, call[last[-1]]]
        gap = [np.append(column, value) for value, column in zip(behind, gap, strict=True)]
        same, pageable = np.append(same, False), np.append(pageable, False)
        position = np.append(position, POSITIONS.index(TAIL))
    return Gaps(gap[0], gap[1], gap[2], gap[3], same, pageable, position)


def cut(gaps: Gaps, threads: HostThreads, hand_over_ns: int) -> Stretches:
    """Cut each gap into stretches of one cause; together they are the gap."""
    known, tail = gaps.call >= 0, gaps.position == POSITIONS.index(TAIL)
    at = np.maximum(gaps.call, 0)
    begun, done = (
        (np.where(known, times[at], 0) if len(times) else np.zeros(len(at), np.int64))
        for times in (threads.start, threads.end)
    )
    queued = known & (begun < gaps.start)
    in_graph = known & (gaps.call == gaps.call_before)
    staged = queued & gaps.is_pageable & (done > gaps.end)
    rules = (
        (tail, HOST),
        (~known, NOT_RECORDED),
        (in_graph, IN_GRAPH),
        (staged, STAGING),
        (queued & (gaps.end - gaps.start > hand_over_ns), QUEUED),
        (queued & gaps.is_same_stream, SAME_STREAM),
        (queued, OTHER_STREAM),
    )
    whole = np.select([rule for rule, _ in rules], [CAUSES.index(cause) for _, cause in rules], default=-1)
    late = np.flatnonzero(whole < 0)
    # A launch that begins after what it launched, by a fault of the clocks, takes no time.
    begun, done = (np.clip(times[late], gaps.start[late], gaps.end[late]) for times in (begun, done))
    done = np.maximum(begun, done)
    pageable, ends = gaps.is_pageable[late], gaps.end[late]
    latency = np.where(ends - done <= _LATENCY_NS, CAUSES.index(LATENCY), CAUSES.index(LAUNCHED))
    staging = CAUSES.index(STAGING)
    all_at_once = np.flatnonzero(whole >= 0)
    found = Stretches(
        gap=np.concatenate([all_at_once, late, late, late]),
        start=np.concatenate([gaps.start[all_at_once], gaps.start[late], begun, done]),
        end=np.concatenate([gaps.end[all_at_once], begun, done, ends]),
        cause=np.concatenate(
            [
                whole[all_at_once],
                np.full(len(late), CAUSES.index(HOST)),
                np.where(pageable, staging, CAUSES.index(LAUNCHING)),
                np.where(pageable, staging, latency),
            ]
        ),
    )
    some = found.end > found.start
    return Stretches(found.gap[some], found.start[some], found.end[some], found.cause[some])


def cut_at(stretches: Stretches, times: Int64) -> Stretches:
    """The same cut at each of the times (ascending) that falls within."""
    first = np.searchsorted(times, stretches.start, side="right")
    count = np.searchsorted(times, stretches.end, side="left") - first + 1
    number = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    bound = np.append(times, 0)[np.minimum(first[number] + place, len(times))]
    before = np.append(times, 0)[np.minimum(first[number] + np.maximum(place - 1, 0), len(times))]
    return Stretches(
        gap=stretches.gap[number],
        start=np.where(place == 0, stretches.start[number], before),
        end=np.where(place == count[number] - 1, stretches.end[number], bound),
        cause=stretches.cause[number],
    )


def num_clock_faults(gaps: Gaps, threads: HostThreads) -> int:
    """Activities after a gap whose launch call begins after they do."""
    known = gaps.call >= 0
    return int((threads.start[gaps.call[known]] > gaps.end[known]).sum()) if known.any() else 0
