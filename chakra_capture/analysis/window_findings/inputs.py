"""Rules on input and copies: what waits for data."""

import re

import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.copies import copy_statistics
from chakra_capture.analysis.findings import Finding, written, written_ms
from chakra_capture.analysis.what_if.changes import Changes, Scale, Switch
from chakra_capture.analysis.window_findings.recorded import Recorded
from chakra_capture.analysis.window_findings.speaking import BAR, speak
from chakra_capture.annotations import INPUT_WAIT

_INPUT = 0.10
_NO_INPUT_WAIT = Changes(switches=frozenset({Switch.NO_INPUT_WAIT}))
_LOAD = "Give the loader more workers, prefetch or cache, and take work out of its transforms."


def input_idle(recorded: Recorded) -> Finding | None:
    """The device is idle while the loop waits for data."""
    rows = recorded.idle.filter(pl.col("cause") == idle_host.INPUT)
    total = int(rows["dur_ns"].sum())
    if recorded.share(total) < BAR:
        return None
    return speak(
        recorded,
        "DEVICE_WAITS_FOR_INPUT",
        f"The device idles {written_ms(recorded.per_step(total))} of each step ({written(recorded.share(total))}) "
        "while the loop waits for data.",
        _LOAD,
        recorded.prize(_NO_INPUT_WAIT, total),
        phase=INPUT_WAIT,
        idle_ns=recorded.per_step(total),
    )


def input_wait(recorded: Recorded) -> Finding | None:
    """The loop waits for data: of runs without a device, where that is time lost."""
    if not recorded.is_cpu_only:
        return None
    waits = recorded.loop.filter(pl.col("cause") == idle_host.INPUT)
    of_rank = waits.group_by("rank").agg(pl.col("dur_ns").sum())
    whole = recorded.units.group_by("rank").agg(pl.col("dur_ns").sum().alias("whole"))
    shares = whole.join(of_rank, on="rank", how="left").select(pl.col("dur_ns").fill_null(0) / pl.col("whole"))
    share = float(shares.to_series().median())  # type: ignore[arg-type]
    if share < _INPUT:
        return None
    total = int(waits["dur_ns"].sum())
    return speak(
        recorded,
        "INPUT_BOUND",
        f"Training waits for its input {written(share)} of each recorded step "
        f"({written_ms(recorded.per_step(total))}).",
        _LOAD,
        recorded.prize(_NO_INPUT_WAIT, total),
        phase="input",
        input_ns=recorded.per_step(total),
    )


def pageable_copies(recorded: Recorded) -> Finding | None:
    """Copies from or to pageable memory: staged by the host, and hidden under nothing."""
    if not recorded.activities["name"].str.contains("Pageable").any():
        return None
    staging = int(recorded.idle.filter(pl.col("cause") == idle_gaps.STAGING)["dur_ns"].sum())
    copies = copy_statistics(recorded.traces, steps=recorded.numbers)
    pageable = copies.filter(pl.col("memory").str.contains("Pageable"))
    total = staging + int(pageable["exposed_ns"].sum())
    if recorded.share(total) < BAR:
        return None
    count = recorded.per_step(int(pageable["count"].sum()))
    return speak(
        recorded,
        "PAGEABLE_COPIES",
        f"Copies from or to pageable memory cost {written_ms(recorded.per_step(total))} per step: {count:.1f} copies, "
        "hidden under nothing.",
        "Pin the memory (pin_memory=True in the loader) and copy with non_blocking=True.",
        recorded.prize(Changes((Scale("memory", 0.0, re.compile("Pageable")),)), total),
        num_copies=count,
        staging_ns=recorded.per_step(staging),
        exposed_ns=recorded.per_step(total - staging),
    )
