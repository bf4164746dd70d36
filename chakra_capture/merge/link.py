"""The joins: host op with CPU op, device activity with its launch. Nothing is guessed by name or time."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.pairing import Evidence
from chakra_capture.merge.rows import distinct_pairs
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
        num_host_duplicates: host nodes that repeat id and name of one that is linked (left unlinked).
    """

    device_row: Int64
    num_name_mismatch: int
    num_duplicate_ids: int
    num_host_duplicates: int


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
    known = device_ids[device_ids != MISSING]
    num_duplicates = len(known) - len(np.unique(known))
    row = _same_id_and_name(host, device, rows, num_duplicates)
    equal = row >= 0
    both_sequence = equal & (host.attrs["seq_id"] != MISSING) & (device.ids["sequence_number"][row] != MISSING)
    same_sequence = both_sequence & (host.attrs["seq_id"] == device.ids["sequence_number"][row])
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
    once = _each_row_once(row)
    link = HostLink(
        device_row=once,
        num_name_mismatch=int(np.count_nonzero(found & ~equal)),
        num_duplicate_ids=num_duplicates,
        num_host_duplicates=int(np.count_nonzero(equal & (once < 0))),
    )
    return link, evidence


def _same_id_and_name(host: HostTrace, device: DeviceTrace, rows: Int64, num_duplicates: int) -> Int64:
    """Device row of each host node with its record-function id and its name, -1 for none; the first of several."""
    code_of = {_as_kineto_writes(name): code for code, name in enumerate(device.name.values)}
    names = [code_of.get(_as_kineto_writes(name), -1) for name in host.name.values]
    host_code = np.array(names, dtype=np.int64)[host.name.codes]
    device_ids = device.ids["record_function_id"][rows]
    hit = match_keys(host.attrs["rf_id"], device_ids)
    if len(rows) and not num_duplicates:
        row = np.where(hit >= 0, rows[np.maximum(hit, 0)], -1)
        return np.where((hit >= 0) & (device.name.codes[row] == host_code), row, -1)
    ids, number = np.unique(device.ids["record_function_id"][rows], return_inverse=True)
    at = match_keys(host.attrs["rf_id"], ids)
    width = len(code_of) + 1
    left = np.where((at >= 0) & (host_code >= 0), at * width + host_code, MISSING)
    hit = match_keys(left, number.reshape(-1).astype(np.int64) * width + device.name.codes[rows])
    return np.where(hit >= 0, rows[np.maximum(hit, 0)], -1) if len(rows) else hit


def _as_kineto_writes(name: str) -> str:
    """Kineto writes a slash for a backslash and leaves control characters out; the observer keeps both (torch 2.13)."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(c for c in name.replace("\\", "/") if c >= " " and c != "\x7f")


def _each_row_once(row: Int64) -> Int64:
    """Keep the first node that claims a device row; the others are linked to none."""
    _, first = np.unique(row, return_index=True)
    once = np.full(len(row), -1, dtype=np.int64)
    once[first] = row[first]
    return once


def ambiguous_correlations(correlation: Int64, pid: Int64, is_runtime: Bool) -> Int64:
    """Correlation ids under which calls of several processes stand: which of them launched, the file does not say."""
    calls = np.flatnonzero(is_runtime & (correlation != MISSING))
    if not len(calls) or (pid[calls] == pid[calls[0]]).all():
        return calls[:0]
    ids, _, _ = distinct_pairs(correlation[calls], pid[calls])
    ids, count = np.unique(ids, return_counts=True)
    return ids[count > 1]


def link_launches(
    correlation: Int64, ts_ns: Int64, dur_ns: Int64, *, pid: Int64, is_runtime: Bool, is_activity: Bool
) -> Int64:
    """Row of the launch of each device activity, -1 for none and for every other row.

    A runtime call and the driver call nested in it share one correlation id: the outermost, which
    starts first and lasts longest, is the launch.
    """
    launch = np.full(len(correlation), -1, dtype=np.int64)
    ambiguous = ambiguous_correlations(correlation, pid, is_runtime)
    calls = np.flatnonzero(is_runtime & (correlation != MISSING) & ~np.isin(correlation, ambiguous))
    # A call whose time was lost is the launch only if there is no other.
    calls = calls[np.lexsort((-dur_ns[calls], ts_ns[calls], ts_ns[calls] == MISSING))]
    activities = np.flatnonzero(is_activity)
    hit = match_keys(correlation[activities], correlation[calls])
    if len(calls):
        launch[activities] = np.where(hit >= 0, calls[np.maximum(hit, 0)], -1)
    return launch
