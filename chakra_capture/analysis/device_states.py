"""What a device does when: computing, communicating, copying, idle for a reason; stretches without a gap.

The definitions are those of ``device``: communication counts while nothing computes, a copy while nothing does either.
"""

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.idle import idle_pieces
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace

IDLE = "idle"
STATES = {"compute": "compute", "communication": "exposed communication", "memory": "copy"}
_CAUSES = ("cause", "name", "phase", "drained_by")
SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "window": pl.Int32, "device": pl.Int64, "state": pl.String, "begin_ns": pl.Int64, "end_ns": pl.Int64,
    **dict.fromkeys(_CAUSES, pl.String),
}  # fmt: skip


def device_states(trace: MergedTrace) -> pl.DataFrame:
    """States of each device of a rank, on the host's clock; of ``SCHEMA``, in order of time.

    They begin with the first step or activity and end with the last one. No row where the end of a device trace is
    lost: when the device was idle is not known.
    """
    activities = device_activities(trace)
    tables = [pl.DataFrame(schema=SCHEMA)]
    if trace.device_tail_lost or activities.is_empty():
        return tables[0]
    for (window, device), mine in activities.partition_by("window", "device", as_dict=True).items():
        keys = {"window": pl.lit(window, pl.Int32), "device": pl.lit(device, pl.Int64)}
        tables.append(_busy(mine).with_columns(**keys))
    idle = idle_pieces(trace, _CAUSES).filter(pl.col("dur_ns") > 0)
    ends = pl.col("ts_ns") + pl.col("dur_ns")
    tables.append(idle.select("window", "device", *_CAUSES, begin_ns="ts_ns", end_ns=ends, state=pl.lit(IDLE)))
    typed = [
        table.select(
            (pl.col(name) if name in table.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SCHEMA.items()
        )
        for table in tables
    ]
    offset = pl.col("window").cast(pl.Int64).replace_strict(trace.clock_offsets, default=0, return_dtype=pl.Int64)
    shifted = pl.col("begin_ns", "end_ns") + offset.fill_null(0)
    states = pl.concat(typed).with_columns(shifted).sort("window", "device", "begin_ns")
    # Without the innermost op many pieces of a gap are alike.
    alike = pl.struct(pl.exclude("begin_ns", "end_ns")).rle_id()
    return (
        states.group_by(alike.alias("stretch"), maintain_order=True)
        .agg(pl.exclude("begin_ns", "end_ns").first(), pl.col("begin_ns").first(), pl.col("end_ns").last())
        .select(*SCHEMA)
    )


def _busy(activities: pl.DataFrame) -> pl.DataFrame:
    """States of the time in which something runs on one device."""
    unions = [_union(activities.filter(pl.col("part") == part)) for part in STATES]
    bounds = np.unique(np.concatenate([side for union in unions for side in union]))
    state = np.full(len(bounds), -1, dtype=np.int64)
    for number, union in reversed([*enumerate(unions)]):
        state[intervals.holds(*union, bounds)] = number
    # Neighbours of one state are one stretch.
    begins = np.flatnonzero(np.append(True, state[1:] != state[:-1])) if len(bounds) else bounds
    ends = np.append(bounds[begins[1:]], bounds[-1:])
    some = state[begins] >= 0
    names = pl.Series([*STATES.values()]).gather(state[begins][some])
    return pl.DataFrame({"state": names, "begin_ns": bounds[begins][some], "end_ns": ends[some]})


def _union(rows: pl.DataFrame) -> tuple[Int64, Int64]:
    return intervals.union(rows["ts_ns"].to_numpy(), rows["end_ns"].to_numpy())
