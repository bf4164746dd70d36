"""Waiting for data, step by step: how long the loop waits, how long its device has nothing to do meanwhile, and what
the other ranks wait for it in the collectives that follow.

Those wait for whoever comes last, for whatever reason. So much of a peer's waiting is put down to the input of the last
rank as that one waited longer for its input than the peer did.
"""

from collections.abc import Sequence

import polars as pl

from chakra_capture import layout
from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.analysis.slow_transfers import LINKS
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("window", pl.Int32, "recorded window"),
    Column("step", pl.Int64, "global step number"),
    Column("dur_ns", pl.Int64, "duration of the step", "ns"),
    Column("input_wait_ns", pl.Int64, "time of the loop's thread in input_wait; null: the trace marks no such phase in "
           "any step", "ns"),
    Column("share", pl.Float64, "input_wait_ns of the step; null like it"),
    Column("device_idle_ns", pl.Int64, "time of it in which the device has nothing to do; null = not measured", "ns"),
    Column("peers_wait_ns", pl.Int64, "what the other ranks together wait for this one in collectives of the step, of "
           "each at most by how much its own input_wait is shorter; what they compute meanwhile is not taken off. "
           "null: the ranks are not matched, or no input_wait is known", "ns"),
    Column("num_peers", pl.Int64, "ranks that wait so; null like peers_wait_ns"),
)  # fmt: skip
_KEYS = ("window", "step", "rank")


def input_waits(
    traces: Sequence[MergedTrace], run: MergedRun | None = None, *, steps: Sequence[int] | None = None
) -> pl.DataFrame:
    """A row per step and rank, in order.

    Args:
        traces: ranks.
        run: all that there are of them; None: nothing is known of the others.
        steps: only these.
    """
    collectives = None if run is None else run.collectives
    chosen = [trace.rank for trace in traces]
    used = [*traces, *_others(run, collectives, chosen)]
    table = pl.concat([_empty(), *map(_of_rank, used)])
    table = table.join(_peers(collectives, table), on=_KEYS, how="left", validate="1:1")
    table = table.filter(pl.col("rank").is_in(chosen)).sort(_KEYS)
    return table if steps is None else table.filter(pl.col("step").is_in(list(steps)))


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA[:-2]})


def _others(run: MergedRun | None, collectives: pl.DataFrame | None, chosen: Sequence[int]) -> list[MergedTrace]:
    """The ranks that may wait for those chosen."""
    if run is None or collectives is None:
        return []
    ranks = collectives.filter(~pl.col("rank").is_in(list(chosen)))["rank"].unique().sort()
    return [MergedTrace(rank, run.folder / layout.rank_folder_name(rank)) for rank in ranks]


def _of_rank(trace: MergedTrace) -> pl.DataFrame:
    times = phase_times(trace)
    waits = times.filter(pl.col("phase") == INPUT_WAIT)
    whole = times.group_by("window", "step").agg(
        dur_ns=pl.col("wall_ns").sum(), measured=pl.col("device_idle_ns").is_not_null().all()
    )
    rows = whole.join(waits, on=["window", "step"], how="left", validate="1:1")
    # Where the phase is marked at all, a step without it did not wait.
    wait, idle = pl.col("wall_ns"), pl.col("device_idle_ns")
    if waits.height:
        wait, idle = wait.fill_null(0), pl.when("measured").then(idle.fill_null(0))
    rows = rows.with_columns(rank=pl.lit(trace.rank), input_wait_ns=wait, device_idle_ns=idle)
    rows = rows.with_columns(share=pl.col("input_wait_ns") / pl.when(pl.col("dur_ns") > 0).then("dur_ns"))
    return rows.select(pl.col(name).cast(dtype) for name, dtype in _empty().schema.items())


def _peers(collectives: pl.DataFrame | None, table: pl.DataFrame) -> pl.DataFrame:
    """By window, step and rank what its peers wait for it because of its input, and how many do."""
    if collectives is None:
        keys = {name: table.schema[name] for name in _KEYS}
        return pl.DataFrame(schema={**keys, "peers_wait_ns": pl.Int64, "num_peers": pl.Int64})
    inputs = table.select(*_KEYS, input="input_wait_ns").drop_nulls().unique(_KEYS, keep="first")
    # Ranks number their windows each for itself: a row is in what the rank that came last says.
    ops = collectives.filter(~pl.col("collective").is_in(LINKS) & pl.col("wait_ns").is_not_null())
    last = ops.filter(pl.col("rank") == pl.col("last_rank")).select("collective_id", *_KEYS, "arrival_ns")
    waits = (
        ops.filter(pl.col("rank") != pl.col("last_rank"))
        .select("collective_id", peer="rank", peer_window="window", peer_step="step", ns="wait_ns", came="arrival_ns")
        .join(last, on="collective_id", validate="m:1")
        .sort("came")
    )
    # Operations overlap: a stretch of time counts once.
    before = pl.col("arrival_ns").cum_max().shift().over(*_KEYS, "peer")
    waits = waits.with_columns(ns=pl.min_horizontal("ns", pl.col("arrival_ns") - pl.max_horizontal("came", before)))
    mine = ["peer_window", "peer_step", "peer"]
    caused = (
        waits.group_by(*_KEYS, *mine)
        .agg(pl.col("ns").clip(lower_bound=0).sum())
        .join(inputs, on=_KEYS, validate="m:1")
        .join(inputs.rename({"input": "of_peer"}), left_on=mine, right_on=_KEYS, validate="m:1")
        .with_columns(pl.min_horizontal("ns", pl.col("input") - pl.col("of_peer")).clip(lower_bound=0))
        .group_by(_KEYS)
        .agg(peers_wait_ns=pl.col("ns").sum(), num_peers=(pl.col("ns") > 0).sum().cast(pl.Int64))
    )
    # Nobody waits for who is not last; of a step without operations that are matched nothing is known.
    matched = ops.select(_KEYS).unique().join(inputs, on=_KEYS, how="semi")
    return matched.join(caused, on=_KEYS, how="left", validate="1:1").with_columns(
        pl.col("peers_wait_ns", "num_peers").fill_null(0)
    )
