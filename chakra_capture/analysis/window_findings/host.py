"""Rules on the host that keeps the device waiting, and on runs without a device on the host itself."""

import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.findings import Finding, written, written_ms
from chakra_capture.analysis.shares import quantile_of
from chakra_capture.analysis.what_if.changes import Changes, Switch
from chakra_capture.analysis.window_findings.ddp import BUFFER_OPS
from chakra_capture.analysis.window_findings.recorded import Recorded
from chakra_capture.analysis.window_findings.speaking import BAR, listed, speak
from chakra_capture.annotations import STEP_PREFIX

_LAUNCH = (idle_gaps.LAUNCHING, idle_gaps.LATENCY)
_IDLE, _OF_IDLE = 0.20, 0.70
_NAMED = 3
_SHORT, _MANY_LAUNCHES = 2, 200
_BETWEEN = 0.05
# A rank that has so much of what all ranks have is the one it is about.
_ALONE = 0.80
_OF_STEPS = 0.5
_IN_STEPS = 0.80
_SLOWED = 1.2
_ALLOCATING, _ALLOCATING_STEPS = 0.01, 2
_CALLS = r"^(cuda|hip)(Malloc|Free)(Managed|Async)?$|^cu(Mem(Alloc|Create|Map|Unmap|Release)|MemFree)"
_FASTER = "Compile the model or use CUDA graphs, or give each launch more work with a larger batch."


def is_host_bound(recorded: Recorded) -> bool:
    """Whether the device is idle for long and the host is why, in most of that time."""
    of_host = int(recorded.host_idle["dur_ns"].sum())
    return recorded.share(recorded.idle_ns) >= _IDLE and of_host >= _OF_IDLE * recorded.idle_ns > 0


def host_bound(recorded: Recorded) -> Finding | None:
    """The device is idle because the host cannot launch fast enough."""
    if not is_host_bound(recorded):
        return None
    rows = recorded.host_idle
    ops = rows.filter(pl.col("cause") == idle_host.OP).group_by("name").agg(pl.col("dur_ns").sum())
    top = ops.sort("dur_ns", "name", descending=[True, False]).head(_NAMED).rows()
    most = listed([f"{_said(name)} ({written_ms(recorded.per_step(ns))})" for name, ns in top])
    idle = recorded.per_step(recorded.idle_ns)
    where = f"; most in {most}" if top else ""
    return speak(
        recorded,
        "HOST_BOUND",
        f"The device is idle {written(idle / recorded.step_ns)} of a step ({written_ms(idle)} of "
        f"{written_ms(recorded.step_ns)}) because the host cannot launch fast enough{where}.",
        _FASTER,
        recorded.less_profiler(int(rows["dur_ns"].sum())),
        idle_ns=idle,
        host_ns=recorded.per_step(int(rows["dur_ns"].sum())),
        ops={name: recorded.per_step(ns) for name, ns in top},
    )


def _said(name: str | None) -> str:
    return f"{name} of DDP's buffer broadcast" if name in BUFFER_OPS else str(name)


def short_kernels(recorded: Recorded) -> Finding | None:
    """Kernels are so short that launching them takes as long; only where the host is why the device is idle."""
    if not is_host_bound(recorded):
        return None
    parts = [_kernels(recorded, number) for number in range(len(recorded.traces))]
    kernels = pl.concat(parts)
    num, kernel, call = kernels.select(
        pl.len(), quantile_of("self_dur_ns", 1, 2).alias("kernel"), quantile_of("call_ns", 1, 2).alias("call")
    ).row(0)
    per_step = recorded.per_step(num)
    if per_step < _MANY_LAUNCHES or kernel is None or call is None or kernel >= _SHORT * call:
        return None
    rows = recorded.host_idle.filter(pl.col("cause").is_in(_LAUNCH))
    total = int(rows["dur_ns"].sum())
    return speak(
        recorded,
        "SHORT_KERNELS",
        f"Kernels are too short for their launches: the median kernel takes {kernel / 1e3:.1f} us, its launch call "
        f"{call / 1e3:.1f} us, {per_step:.0f} kernels per step.",
        "Fuse operators with torch.compile, or use CUDA graphs.",
        recorded.prize(Changes(switches=frozenset({Switch.FUSE_SHORT})), total, of_host=True),
        kernel_p50_ns=kernel,
        call_p50_ns=call,
        num_kernels=per_step,
        launching_ns=recorded.per_step(total),
    )


def _kernels(recorded: Recorded, number: int) -> pl.DataFrame:
    """Kernels of one rank that compute, in the steps that count, with the time of their launch call."""
    trace = recorded.traces[number]
    mine = recorded.activities.filter((pl.col("rank") == trace.rank) & (pl.col("part") == "compute"))
    calls = trace.some_of_nodes("kind", "node_id", "dur_ns").filter(pl.col("kind") == "runtime")
    calls = calls.select(launch_id="node_id", call_ns="dur_ns")
    return mine.join(calls, on="launch_id", how="left", validate="m:1").select("self_dur_ns", "call_ns")


def between_ops(recorded: Recorded) -> Finding | None:
    """Time passes between operators, in Python: of the device idle, of a run without one that of the loop."""
    pieces = recorded.loop if recorded.is_cpu_only else recorded.host_idle
    rows = pieces.filter(pl.col("cause") == idle_host.BETWEEN)
    total = int(rows["dur_ns"].sum())
    if not total or recorded.share(total) < _BETWEEN:
        return None
    place = _place_between(recorded, rows)
    if place is None:
        return None
    name, detail, most, phase = place
    ranks = rows.group_by("rank").agg(pl.col("dur_ns").sum()).sort("dur_ns", descending=True)
    is_alone = len(recorded.traces) > 1 and ranks["dur_ns"][0] >= _ALONE * total
    under = f" under {name}" if name else ""
    where = f"{under} {detail or ''}".rstrip()
    meanwhile = "" if recorded.is_cpu_only else " while the device is idle"
    return speak(
        recorded,
        "BETWEEN_OPS",
        f"{written_ms(recorded.per_step(total))} per step ({written(recorded.share(total))}) pass in Python between "
        f"operators{meanwhile}, the longest{where} ({written_ms(recorded.per_step(most))}).",
        "Profile this code: record a window with_stack, or name its parts with session.phase(...).",
        recorded.less_profiler(total),
        phase=phase,
        ranks=(ranks["rank"][0],) if is_alone else (),
        between_ns=recorded.per_step(total),
        under=name,
        place=detail,
    )


def _place_between(recorded: Recorded, rows: pl.DataFrame) -> tuple[str | None, str | None, int, str | None] | None:
    """The annotation and the ops beside it, the time and the phase of the longest place; None where no place is long.

    A little between every two operators is what the profiler makes of any loop, and long in one step is who lost the
    core: it has to be long in half of the steps.
    """
    # Directly in a step: each has a name of its own.
    in_step = pl.col("name").cast(pl.String).str.starts_with(STEP_PREFIX)
    rows = rows.with_columns(pl.when(~in_step).then("name").alias("name"))
    keys = ["name", "detail"]
    of_step = rows.group_by(*keys, "rank", "window", "step").agg(pl.col("dur_ns").sum(), pl.col("phase").first())
    is_long = pl.col("dur_ns") >= BAR * recorded.step_ns
    places = of_step.group_by(keys).agg(pl.col("dur_ns").sum(), pl.col("phase").first(), num_long=is_long.sum())
    places = places.filter(pl.col("num_long") >= _OF_STEPS * recorded.units.height)
    if places.is_empty():
        return None
    name, detail, most, phase, _ = places.sort("dur_ns", *keys, descending=[True, False, False]).row(0)
    return name, detail, most, phase


def drained(recorded: Recorded) -> Finding | None:
    """A call waits for the device in each step, so that nothing is queued when it goes on.

    One that no op makes, outside the phases, is how benchmarks end: that is no finding.
    """
    is_op = pl.col("drained_by").cast(pl.String).str.contains(" (", literal=True)
    rows = recorded.idle.filter(pl.col("drained_by").is_not_null()).filter(pl.col("phase").is_not_null() | is_op)
    unit = ["rank", "window", "step"]
    calls = rows.group_by("drained_by", *unit).agg(pl.col("dur_ns").sum(), pl.col("gap").n_unique())
    sums = calls.group_by("drained_by").agg(
        pl.col("dur_ns").sum(), pl.col("gap").sum(), in_steps=pl.len() / max(recorded.units.height, 1)
    )
    sums = sums.filter(pl.col("in_steps") >= _IN_STEPS).sort("dur_ns", "drained_by", descending=[True, False])
    if sums.is_empty():
        return None
    name, total, times, _ = sums.row(0)
    phases = rows.filter(pl.col("drained_by") == name).group_by("phase").agg(pl.col("dur_ns").sum())
    phase = phases.sort("dur_ns", descending=True)["phase"][0]
    where = f" in {phase}" if phase else ""
    return speak(
        recorded,
        "QUEUE_DRAINED",
        f"{name}{where} waits for the device {recorded.per_step(times):.1f} times per step; then nothing is queued "
        f"and the device idles {written_ms(recorded.per_step(total))} per step.",
        "Keep the value on the device, or read it every n steps only.",
        recorded.at_most(total),
        phase=phase,
        call=name,
        num_per_step=recorded.per_step(times),
        idle_ns=recorded.per_step(total),
    )


def allocation(recorded: Recorded) -> Finding | None:
    """Device memory is allocated or freed when training has long begun: the cache of the allocator does not hold."""
    first = pl.col("step") > 0
    rows = pl.concat(
        [
            recorded.within(rows.table.filter(first & (pl.col("kind") == "runtime")))
            .filter(pl.col("name").str.contains(_CALLS))
            .select("rank", "window", "step", "dur_ns")
            for rows in recorded.hosts
        ]
    )
    total = int(rows["dur_ns"].sum())
    if rows.n_unique(["window", "step"]) < _ALLOCATING_STEPS or recorded.share(total) < _ALLOCATING:
        return None
    return speak(
        recorded,
        "DEVICE_ALLOCATIONS",
        f"Device memory is still allocated and freed in every step: {recorded.per_step(rows.height):.1f} calls take "
        f"{written_ms(recorded.per_step(total))} per step.",
        "Use expandable segments (PYTORCH_CUDA_ALLOC_CONF), and give batches the same shapes.",
        recorded.at_most(total, of_host=True),
        num_calls=recorded.per_step(rows.height),
        call_ns=recorded.per_step(total),
    )


def profiler_slows(recorded: Recorded) -> Finding | None:
    """Recorded steps take longer than others: their times are to be read as shares."""
    if recorded.pace is None or not recorded.step_ns:
        return None
    usual = recorded.pace.step_ns + (recorded.inflation_ns or 0.0)
    factor = usual / recorded.pace.step_ns if recorded.pace.step_ns else 0.0
    if factor < _SLOWED:
        return None
    return speak(
        recorded,
        "PROFILER_SLOWS",
        f"Recorded steps take {factor:.1f} times as long as others ({written_ms(usual)}, else "
        f"{written_ms(recorded.pace.step_ns)}).",
        "Read times of recorded steps as shares of a step.",
        None,
        factor=factor,
        unprofiled_ns=recorded.pace.step_ns,
    )
