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
        end = operations["ts_ns"] + operations["dur_ns"]
        begin = operations["issued_ns"].zip_with(operations["issued_ns"].is_not_null(), operations["ts_ns"])
        under_way = intervals.union(begin.to_numpy(), end.to_numpy())
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
    is_waiting = pl.Series(intervals.holds(*under_way, pieces.start))
    return _with_waits(
        table.with_columns(is_waiting.alias("is_waiting"), pl.Series("number", pieces.gap))
    ).with_columns(
        pl.col("cause").cast(pl.Categorical),
        phases.at(pieces.start).alias("phase"),
        pl.Series("dur_ns", pieces.end - pieces.start),
        picked(steps["step"], pieces.gap).alias("step"),
    )


def _with_waits(pieces: pl.DataFrame) -> pl.DataFrame:
    """Pieces in which nothing is open while an operation is under way are waits, and so is what follows them.

    Not all that waits for gloo has an event of its own, and a thread that waited is woken some time after the end: it
    goes on waiting until it does something, if it does within the step.
    """
    is_communication = pl.col("cause") == idle_host.COMMUNICATION
    nothing = pl.col("cause").is_in(_NOTHING_OPEN)
    pieces = pieces.with_columns(
        waits=is_communication | (nothing & pl.col("is_waiting")),
        stretch=pl.struct("number", nothing | is_communication, "name").rle_id(),
    )
    is_followed = pl.col("stretch") < pl.col("stretch").max().over("number")
    waited = nothing & (pl.col("waits") | (pl.col("waits").cum_max().over("stretch") & is_followed))
    return pieces.with_columns(cause=pl.when(waited).then(pl.lit(idle_host.COMMUNICATION)).otherwise(pl.col("cause")))


def _as_gaps(low: Int64, high: Int64) -> Gaps:
    """Steps as gaps that no launch ends: so the main thread is asked."""
    nobody, nothing = np.full(len(low), -1), np.zeros(len(low), dtype=bool)
    return Gaps(low, high, nobody, nobody, nothing, nothing, np.zeros(len(low), dtype=np.int64))
