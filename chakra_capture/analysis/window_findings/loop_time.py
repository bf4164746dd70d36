"""What the loop's thread does all through the recorded steps, by the rules by which idle time of a device is explained.

For runs without a device, where the time of the host is the time of the step.
"""

import numpy as np
import polars as pl

from chakra_capture.analysis import idle, idle_host
from chakra_capture.analysis.host_threads import NEEDED, HostThreads, ascending, picked
from chakra_capture.analysis.idle_gaps import CAUSES, HOST, Gaps, Stretches, cut_at
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace

_NOTHING_OPEN = (idle_host.BETWEEN, idle_host.IN_ENGINE)
_WANTED = ("name", "detail", "phase")


def loop_pieces(trace: MergedTrace) -> pl.DataFrame:
    """Every piece of every step that has a duration: ``rank``, ``window``, ``step``, ``cause``, ``name``, ``detail``,
    ``phase``, ``dur_ns``; those of a step sum to it.
    """
    texts = dict.fromkeys(("cause", "name", "detail", "phase"), pl.Categorical)
    found = [pl.DataFrame(schema={"rank": pl.Int64, "window": pl.Int32, "step": pl.Int64, **texts, "dur_ns": pl.Int64})]
    steps = trace.steps.filter(pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null())
    nodes = trace.some_of_nodes("window", *NEEDED)
    for (window,), mine in steps.partition_by("window", as_dict=True, maintain_order=True).items():
        threads = HostThreads(nodes.filter(pl.col("window") == window))
        keys = {"rank": trace.rank, "window": window}
        operations = trace.communication.filter((pl.col("window") == window) & (pl.col("dur_ns") > 0))
        begin = operations["ts_ns"].to_numpy()
        under_way = intervals.union(begin, begin + operations["dur_ns"].to_numpy())
        table = _of_steps(mine, threads, under_way).with_columns(
            pl.lit(value).alias(key) for key, value in keys.items()
        )
        found.append(table.select(found[0].columns))
    return pl.concat(found, how="vertical_relaxed")


def _of_steps(steps: pl.DataFrame, threads: HostThreads, under_way: tuple[Int64, Int64]) -> pl.DataFrame:
    low = steps["ts_ns"].to_numpy()
    high = low + steps["dur_ns"].to_numpy()
    phases = idle_host.PhaseRuns(threads)
    number = np.arange(len(low))
    whole = Stretches(number, low, high, np.full(len(low), CAUSES.index(HOST)))
    pieces = cut_at(whole, ascending(threads.changes, phases.bounds, *under_way))
    table = idle.of_host(pieces, _as_gaps(low, high), threads, phases, _WANTED)
    # Not all that waits for gloo has an event of its own: an operation is under way until its work is done.
    is_waiting = intervals.holds(*under_way, pieces.start) & table["cause"].is_in(_NOTHING_OPEN).to_numpy()
    table = table.with_columns(
        cause=pl.when(pl.Series(is_waiting)).then(pl.lit(idle_host.COMMUNICATION)).otherwise("cause")
    )
    return table.with_columns(
        pl.col("cause").cast(pl.Categorical),
        phases.at(pieces.start).alias("phase"),
        pl.Series("dur_ns", pieces.end - pieces.start),
        picked(steps["step"], pieces.gap).alias("step"),
    )


def _as_gaps(low: Int64, high: Int64) -> Gaps:
    """Steps as gaps that no launch ends: so the main thread is asked."""
    nobody, nothing = np.full(len(low), -1), np.zeros(len(low), dtype=bool)
    return Gaps(low, high, nobody, nobody, nothing, nothing, np.zeros(len(low), dtype=np.int64))
