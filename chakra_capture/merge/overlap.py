"""Device activities that run past the next start on their stream: how much of each counts.

Some devices report ends beyond the starts of later work on the same stream (ROCm by orders of magnitude; kernels with
programmatic launch overlap by design). Counted whole, the activities of a stream would sum past its wall time.
"""

import numpy as np

from chakra_capture.trace.columns import Bool, Int64


def within_stream(device: Int64, stream: Int64, ts_ns: Int64, dur_ns: Int64) -> Int64:
    """Durations cut at the next start on the same stream; of rows with one start the longest keeps its time."""
    same = (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    gap = ts_ns[1:] - ts_ns[:-1]
    if _is_sorted(device, stream, same, gap):
        if not (same & (dur_ns[:-1] > gap)).any():
            return dur_ns
        if not (same & (gap == 0) & (dur_ns[1:] > dur_ns[:-1])).any():
            return _cut(device, stream, ts_ns, dur_ns)
    order = np.lexsort((-dur_ns, ts_ns, stream, device))
    counted = np.empty_like(dur_ns)
    counted[order] = _cut(device[order], stream[order], ts_ns[order], dur_ns[order])
    return counted


def _is_sorted(device: Int64, stream: Int64, same: Bool, gap: Int64) -> bool:
    """Rows of a merged table mostly are, since Kineto numbers processes and threads by device and stream."""
    if not ((gap >= 0) | ~same).all():
        return False
    last = np.flatnonzero(~same)
    first = last + 1
    rising = (device[first] > device[last]) | ((device[first] == device[last]) & (stream[first] > stream[last]))
    return bool(rising.all())


def _cut(device: Int64, stream: Int64, ts_ns: Int64, dur_ns: Int64) -> Int64:
    same = (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    twin = np.append(False, same & (ts_ns[1:] == ts_ns[:-1]))[: len(ts_ns)]
    first = np.flatnonzero(~twin)
    row, following = first[:-1], first[1:]
    on_stream = (device[row] == device[following]) & (stream[row] == stream[following])
    row, following = row[on_stream], following[on_stream]
    counted = np.where(twin, 0, dur_ns)
    counted[row] = np.minimum(dur_ns[row], ts_ns[following] - ts_ns[row])
    return counted
