"""The joins: host op with CPU op, device activity with its launch. Nothing is guessed by name or time."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.pairing import Evidence
from chakra_capture.trace.columns import MISSING, Bool, Int64
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace


def match_keys(left: Int64, right: Int64) -> Int64:
    """Row of ``right`` whose key equals each key of ``left``; the first one if several, -1 if none.

    ``MISSING`` matches nothing.
    """
    order = np.argsort(right, kind="stable")
    keys = right[order]
    at = np.searchsorted(keys, left, side="left")
    at_safe = np.minimum(at, max(len(keys) - 1, 0))
    if not len(keys):
        return np.full(len(left), -1, dtype=np.int64)
    hit = (keys[at_safe] == left) & (at < len(keys)) & (left != MISSING)
    return np.where(hit, order[at_safe], -1)


@dataclass(frozen=True, slots=True)
class HostLink:
    """Join of host nodes with device rows by record-function id, names checked.

    Attributes:
        device_row: per host node its row in the device trace, -1 for none.
        num_name_mismatch: ids in both files under different names (left unlinked).
        num_duplicate_ids: device rows beyond the first with the same id.
    """

    device_row: Int64
    num_name_mismatch: int
    num_duplicate_ids: int


def link_host_ops(host: HostTrace, device: DeviceTrace, is_cpu_op: Bool) -> tuple[HostLink, Evidence]:
    """Join host nodes with the CPU ops and annotations of the device trace.

    Args:
        is_cpu_op: device rows of kind host_op or annotation.
    """
    host_ids = host.attrs["rf_id"]
    rows = np.flatnonzero(is_cpu_op)
    device_ids = device.ids["record_function_id"][rows]
    hit = match_keys(host_ids, device_ids)
    found = hit >= 0
    row = np.where(found, rows[np.maximum(hit, 0)] if len(rows) else -1, -1)
    equal = found & _same_names(host, device, row)
    both_sequence = equal & (host.attrs["seq_id"] != MISSING) & (device.ids["sequence_number"][row] != MISSING)
    same_sequence = both_sequence & (host.attrs["seq_id"] == device.ids["sequence_number"][row])
    known = device_ids[device_ids != MISSING]
    cpu_pids = device.pid[rows]
    evidence = Evidence(
        host_pid=host.pid,
        device_pids=tuple(int(p) for p in np.unique(cpu_pids[cpu_pids != MISSING])),
        device_rank=device.rank,
        expected_rank=None,
        num_host_ids=int(np.count_nonzero(host_ids != MISSING)),
        num_device_ids=len(known),
        num_ids_common=int(np.count_nonzero(found)),
        num_names_equal=int(np.count_nonzero(equal)),
        num_sequence_common=int(np.count_nonzero(both_sequence)),
        num_sequence_equal=int(np.count_nonzero(same_sequence)),
    )
    link = HostLink(
        device_row=np.where(equal, row, -1),
        num_name_mismatch=int(np.count_nonzero(found & ~equal)),
        num_duplicate_ids=len(known) - len(np.unique(known)),
    )
    return link, evidence


def _same_names(host: HostTrace, device: DeviceTrace, row: Int64) -> Bool:
    code_of = {name: code for code, name in enumerate(device.name.values)}
    host_code = np.array([code_of.get(name, -2) for name in host.name.values], dtype=np.int64)
    if not len(device.name.codes):
        return np.zeros(len(row), dtype=bool)
    return np.asarray(host_code[host.name.codes] == device.name.codes[row])


def link_launches(correlation: Int64, ts_ns: Int64, dur_ns: Int64, is_runtime: Bool, is_activity: Bool) -> Int64:
    """Row of the launch of each device activity, -1 for none and for every other row.

    A runtime call and the driver call nested in it share one correlation id: the outermost, which
    starts first and lasts longest, is the launch.
    """
    launch = np.full(len(correlation), -1, dtype=np.int64)
    calls = np.flatnonzero(is_runtime & (correlation != MISSING))
    calls = calls[np.lexsort((-dur_ns[calls], ts_ns[calls]))]
    activities = np.flatnonzero(is_activity)
    hit = match_keys(correlation[activities], correlation[calls])
    if len(calls):
        launch[activities] = np.where(hit >= 0, calls[np.maximum(hit, 0)], -1)
    return launch
