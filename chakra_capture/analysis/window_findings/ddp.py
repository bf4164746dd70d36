"""Rules on DistributedDataParallel: what it does beside its all_reduces."""

import numpy as np
import polars as pl

from chakra_capture.analysis import idle_host
from chakra_capture.analysis.findings import Finding, written_ms
from chakra_capture.analysis.what_if.changes import parse_changes
from chakra_capture.analysis.window_findings.recorded import HostRows, Recorded
from chakra_capture.analysis.window_findings.speaking import BAR, speak
from chakra_capture.trace.columns import Bool

BUFFER_OPS = ("aten::flatten_dense_tensors", "aten::unflatten_dense_tensors", "c10d::broadcast_")
_FORWARD = "DistributedDataParallel.forward"
_BUCKETS = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def buffer_broadcast(recorded: Recorded) -> Finding | None:
    """Rank 0's buffers are sent to all before each forward."""
    host, idle, is_all = 0, 0, True
    for rows in recorded.hosts:
        in_forward = rows.mask(pl.col("name") == _FORWARD)
        named = rows.mask(pl.col("name").is_in(BUFFER_OPS))
        inside = named.copy()
        inside[named] = rows.is_under(np.flatnonzero(named), in_forward)
        broadcast = inside & rows.mask(pl.col("name") == "c10d::broadcast_")
        if not broadcast.any():
            continue
        is_all &= bool((inside == named).all())
        host += _host_ns(recorded, rows, inside)
    if not host:
        return None
    idle = _idle_in(recorded, BUFFER_OPS)
    if recorded.share(host) < BAR:
        return None
    changes = parse_changes([], [f"op~^({'|'.join(BUFFER_OPS)})$"], overlap_comm=False)
    prize = recorded.prize(changes if is_all else None, idle if recorded.has_device else host, of_host=True)
    meanwhile = f", the device idle in {written_ms(recorded.per_step(idle))} of it" if recorded.has_device else ""
    return speak(
        recorded,
        "DDP_BUFFER_BROADCAST",
        f"DistributedDataParallel broadcasts its buffers before each forward: {written_ms(recorded.per_step(host))} "
        f"of host time per step{meanwhile}.",
        "Set broadcast_buffers=False, if the buffers (BatchNorm's statistics) may differ between ranks.",
        prize,
        phase="forward",
        host_ns=recorded.per_step(host),
        idle_ns=recorded.per_step(idle) if recorded.has_device else None,
    )


def bucket_copies(recorded: Recorded) -> Finding | None:
    """Reduced gradients are copied from DDP's buckets back into the gradients."""
    host = sum(_host_ns(recorded, rows, rows.mask(pl.col("name") == _BUCKETS)) for rows in recorded.hosts)
    total = _idle_in(recorded, (_BUCKETS,)) if recorded.has_device else host
    if not total:
        return None
    return speak(
        recorded,
        "BUCKET_COPIES",
        f"DistributedDataParallel copies reduced gradients from its buckets: {written_ms(recorded.per_step(host))} "
        "of host time per step.",
        "Set gradient_as_bucket_view=True, so that gradients are views of the buckets.",
        recorded.prize(parse_changes([], [f"op~^{_BUCKETS}$"], overlap_comm=False), total, of_host=True),
        phase="backward",
        host_ns=recorded.per_step(host),
        idle_ns=recorded.per_step(total) if recorded.has_device else None,
    )


def _host_ns(recorded: Recorded, rows: HostRows, accepted: Bool) -> int:
    """Time of the outermost accepted rows in the steps that count."""
    return int(recorded.within(rows.table[rows.outer(accepted)])["dur_ns"].sum())


def _idle_in(recorded: Recorded, names: tuple[str, ...]) -> int:
    if not recorded.has_device:
        return 0
    in_op = recorded.idle.filter((pl.col("cause") == idle_host.OP) & pl.col("name").is_in(names))
    return int(in_op["dur_ns"].sum())
