"""Device activities of one rank as the analyses count them, read without the texts that make up most of the table."""

import polars as pl

from chakra_capture.trace.merged import MergedTrace

KINDS = ("kernel", "memcpy", "memset")
_NEEDED = ("window", "node_id", "kind", "launch_id", "ts_ns", "dur_ns", "self_dur_ns", "pid", "device", "stream",
           "collective")  # fmt: skip


def device_activities(trace: MergedTrace, *more: str) -> pl.DataFrame:
    """Kernels, copies and memsets that have a time, in order of their start.

    Args:
        trace: one rank.
        more: further columns of nodes.

    Returns:
        columns of nodes, with ``device`` as Kineto writes it where the arguments do not say it, ``end_ns`` (of what
        reaches past the next start on its stream: that) and ``part``: compute, communication or memory.
    """
    is_kernel = pl.col("kind") == "kernel"
    rows = trace.some_of_nodes(*_NEEDED, *(name for name in more if name not in _NEEDED))
    return (
        rows.filter(pl.col("kind").is_in(KINDS) & pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null())
        .with_columns(
            pl.coalesce("device", "pid").alias("device"),
            end_ns=pl.col("ts_ns") + pl.col("self_dur_ns"),
            part=pl.when(~is_kernel)
            .then(pl.lit("memory"))
            .when(pl.col("collective").is_not_null())
            .then(pl.lit("communication"))
            .otherwise(pl.lit("compute")),
        )
        .sort("window", "ts_ns", "node_id")
    )
