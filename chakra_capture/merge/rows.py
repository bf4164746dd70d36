"""The union of both files' rows as plain columns: what each row is, before anything is linked."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.trace.columns import MISSING, Bool, Int64, Ints, Positions, is_one_of
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import USER_SCOPE, HostTrace
from chakra_capture.trace.schema import KINDS

_CATEGORY_KIND = {
    "cpu_op": "host_op",
    "operator": "host_op",
    "user_annotation": "annotation",
    "cpu_user_annotation": "annotation",
    "python_function": "python_function",
    "runtime": "runtime",
    "driver": "runtime",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "gpu_user_annotation": "device_annotation",
    "cuda_sync": "sync",
    "overhead": "overhead",
}
MEMORY_NAME = "[memory]"

# Rows climb so many levels one by one; of what is deeper, all are found at once.
_FEW_LEVELS = 64

CODE = {kind: code for code, kind in enumerate(KINDS)}
CPU_KINDS = ("annotation", "host_op", "python_function", "runtime", "memory", "instant")
ACTIVITY_KINDS = ("kernel", "memcpy", "memset")
DEVICE_KINDS = (*ACTIVITY_KINDS, "device_annotation", "sync")


def of_kind(kind: "np.typing.NDArray[np.int8]", kinds: tuple[str, ...]) -> Bool:
    """Rows whose kind code is one of ``kinds``."""
    return is_one_of(kind, [CODE[k] for k in kinds])


def device_kinds(device: DeviceTrace) -> "np.typing.NDArray[np.int8]":
    """Kind code of each row of a device trace, from its category."""
    per_category = np.array([CODE[_category_kind(c)] for c in device.category.values] or [0], dtype=np.int8)
    kind = np.where(device.category.codes >= 0, per_category[device.category.codes], CODE["other"]).astype(np.int8)
    instant = device.phase_type.mask(("i", "I"))
    kind[instant] = CODE["instant"]
    kind[instant & device.name.mask((MEMORY_NAME,))] = CODE["memory"]
    return kind


def _category_kind(category: str) -> str:
    key = category.lower()
    if key.endswith(("_runtime", "_driver")):
        return "runtime"
    return _CATEGORY_KIND.get(key, "other")


def host_kinds(host: HostTrace) -> "np.typing.NDArray[np.int8]":
    """Kind code of each node of a host trace, from its name and scope."""
    user = host.attrs["scope"][:] == USER_SCOPE
    kind = np.where(user, CODE["annotation"], CODE["host_op"]).astype(np.int8)
    kind[host.is_process] = CODE["process"]
    kind[host.is_thread] = CODE["thread"]
    return kind


@dataclass(frozen=True, slots=True)
class Tracks:
    """The (pid, tid) of each row: ``number`` counts the pairs, ascending; ``pid`` and ``tid`` are those of a number."""

    number: Positions
    pid: Int64
    tid: Int64

    def take(self, rows: Int64) -> "Tracks":
        return Tracks(self.number[rows], self.pid, self.tid)


def find_tracks(pid: Int64, tid: Int64) -> Tracks:
    """Number the (pid, tid) pairs."""
    pids, tids, number = distinct_pairs(pid, tid)
    return Tracks(number.astype(np.int32), pids, tids)


def distinct_pairs(first: Ints, second: Ints) -> tuple[Int64, Int64, Int64]:
    """Distinct (first, second) pairs in order, and the number of each row's pair."""
    # Rows of one thread or stream mostly stand one after the other: only the first of them is sorted.
    changes = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    starts = np.flatnonzero(np.append(True, changes)[: len(first)])
    first_values, first_at = np.unique(first[starts], return_inverse=True)
    second_values, second_at = np.unique(second[starts], return_inverse=True)
    width = max(len(second_values), 1)
    packed = first_at.reshape(-1).astype(np.int64) * width + second_at.reshape(-1)
    values, number = np.unique(packed, return_inverse=True)
    number = np.repeat(number.reshape(-1).astype(np.int64), np.diff(starts, append=len(first)))
    return first_values[values // width], second_values[values % width], number


def group_numbers(first: Ints, second: Ints) -> Int64:
    """One number per (first, second), ascending in that order."""
    return distinct_pairs(first, second)[2]


def by_number(rows: Int64, number: Ints) -> list[Int64]:
    """The rows of each number: numbers ascending, rows in the order in which they stand."""
    if not len(rows):
        return []
    order = np.argsort(number, kind="stable")
    rows, number = rows[order], number[order]
    return np.split(rows, np.flatnonzero(number[1:] != number[:-1]) + 1)


def climb(at: Positions, parent: Positions, accepted: Bool) -> Positions:
    """From each row up its parents to the first that is accepted, itself if it is; -1 where none is.

    Args:
        at: rows to begin at, -1 for none.
        parent: of every row, -1 for none.
        accepted: of every row.
    """
    at = at.copy()
    searching = np.flatnonzero((at >= 0) & ~accepted[at])
    for _ in range(_FEW_LEVELS):
        if not len(searching):
            return at
        at[searching] = parent[at[searching]]
        searching = searching[(at[searching] >= 0) & ~accepted[at[searching]]]
    at[searching] = _nearest(parent, accepted)[at[searching]]
    return at


def _nearest(parent: Positions, accepted: Bool) -> Positions:
    """The same of every row, for deep stacks: each round goes up twice as far as the one before."""
    none = len(parent)
    up = np.append(np.where(accepted, np.arange(none), np.where(parent >= 0, parent, none)), none)
    for _ in range(none.bit_length()):
        up = up[up]
    return np.where(up < none, up, -1).astype(np.int32)


def end_of(ts_ns: Int64, dur_ns: Int64) -> Int64:
    """Ends, ``MISSING`` where start or duration is."""
    known = (ts_ns != MISSING) & (dur_ns != MISSING)
    return np.where(known, np.where(known, ts_ns, 0) + np.where(known, dur_ns, 0), MISSING)
