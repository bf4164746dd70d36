"""The union of both files' rows as plain columns: what each row is, before anything is linked."""

import numpy as np

from chakra_capture.trace.columns import MISSING, Bool, Int64
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

CODE = {kind: code for code, kind in enumerate(KINDS)}
CPU_KINDS = ("annotation", "host_op", "python_function", "runtime", "memory", "instant")
ACTIVITY_KINDS = ("kernel", "memcpy", "memset")
DEVICE_KINDS = (*ACTIVITY_KINDS, "device_annotation", "sync")


def of_kind(kind: "np.typing.NDArray[np.int8]", kinds: tuple[str, ...]) -> Bool:
    """Rows whose kind code is one of ``kinds``."""
    return np.isin(kind, [CODE[k] for k in kinds])


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
    user = host.attrs["scope"] == USER_SCOPE
    kind = np.where(user, CODE["annotation"], CODE["host_op"]).astype(np.int8)
    kind[host.is_process] = CODE["process"]
    kind[host.is_thread] = CODE["thread"]
    return kind


def distinct_pairs(first: Int64, second: Int64) -> tuple[Int64, Int64, Int64]:
    """Distinct (first, second) pairs in order, and the number of each row's pair."""
    first_values, first_at = np.unique(first, return_inverse=True)
    second_values, second_at = np.unique(second, return_inverse=True)
    packed = first_at.reshape(-1).astype(np.int64) * max(len(second_values), 1) + second_at.reshape(-1)
    values, number = np.unique(packed, return_inverse=True)
    width = max(len(second_values), 1)
    return first_values[values // width], second_values[values % width], number.reshape(-1).astype(np.int64)


def tracks(pid: Int64, tid: Int64) -> Int64:
    """One number per (pid, tid), ascending in that order."""
    return distinct_pairs(pid, tid)[2]


def end_of(ts_ns: Int64, dur_ns: Int64) -> Int64:
    """Ends, ``MISSING`` where start or duration is."""
    known = (ts_ns != MISSING) & (dur_ns != MISSING)
    return np.where(known, np.where(known, ts_ns, 0) + np.where(known, dur_ns, 0), MISSING)
