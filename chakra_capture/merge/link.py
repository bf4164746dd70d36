"""The joins: host op with CPU op, device activity with its launch. Nothing is guessed by name or time."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.pairing import Evidence
from chakra_capture.merge.rows import distinct_pairs
from chakra_capture.trace.columns import MISSING, Bool, Int64, Positions, pick
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace
from chakra_capture.trace.keys import match_keys, num_distinct


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
    host_ids = host.attrs["rf_id"][:]
    rows = np.flatnonzero(is_cpu_op)
    device_ids = device.ids["record_function_id"][rows]
    num_known = int(np.count_nonzero(device_ids != MISSING))
    num_duplicates = num_known - num_distinct(device_ids)
    hit = match_keys(host_ids, device_ids)
    row = _with_equal_name(host, device, rows, hit, num_duplicates)
    linked = np.flatnonzero(row >= 0)
    host_sequence = host.attrs["seq_id"][linked]
    device_sequence = device.ids["sequence_number"][row[linked]]
    both_sequence = (host_sequence != MISSING) & (device_sequence != MISSING)
    evidence = Evidence(
        host_pid=host.pid,
        device_pids=_distinct_pids(device.pid[rows]),
        device_rank=device.rank,
        expected_rank=None,
        num_host_ids=int(np.count_nonzero(host_ids != MISSING)),
        num_device_ids=num_known,
        num_ids_common=int(np.count_nonzero(hit >= 0)),
        num_names_equal=len(linked),
        num_sequence_common=int(np.count_nonzero(both_sequence)),
        num_sequence_equal=int(np.count_nonzero(both_sequence & (host_sequence == device_sequence))),
    )
    once = _each_row_once(row, device.num_rows)
    link = HostLink(
        device_row=once,
        num_name_mismatch=int(np.count_nonzero((hit >= 0) & (row < 0))),
        num_duplicate_ids=num_duplicates,
        num_host_duplicates=int(np.count_nonzero((row >= 0) & (once < 0))),
    )
    return link, evidence


def _distinct_pids(pid: Int64) -> tuple[int, ...]:
    """Every pid once, ascending; threads of one process mostly stand one after the other."""
    pid = pid[pid != MISSING]
    runs = pid[np.append(True, pid[1:] != pid[:-1])] if len(pid) else pid
    return tuple(np.unique(runs).tolist())


def _with_equal_name(host: HostTrace, device: DeviceTrace, rows: Int64, hit: Int64, num_duplicates: int) -> Int64:
    """Device row of each host node with its record-function id and its name, -1 for none; the first of several.

    Args:
        rows: CPU ops of the device trace.
        hit: position in ``rows`` of the first row with the id of each node, -1 for none.
        num_duplicates: rows that repeat an id; without any, ``hit`` is the only candidate.
    """
    if not len(rows):
        return hit
    code_of = {_as_kineto_writes(name): code for code, name in enumerate(device.name.values)}
    names = [code_of.get(_as_kineto_writes(name), -1) for name in host.name.values]
    host_code = np.array(names, dtype=np.int64)[host.name.codes]
    if not num_duplicates:
        row = rows[hit]
        return np.where((hit >= 0) & (device.name.codes[row] == host_code), row, -1)
    ids, number = np.unique(device.ids["record_function_id"][rows], return_inverse=True)
    at = match_keys(host.attrs["rf_id"][:], ids)
    width = len(code_of) + 1
    left = np.where((at >= 0) & (host_code >= 0), at * width + host_code, MISSING)
    hit = match_keys(left, number.reshape(-1).astype(np.int64) * width + device.name.codes[rows])
    return np.where(hit >= 0, rows[hit], -1)


def _as_kineto_writes(name: str) -> str:
    """Kineto writes a slash for a backslash and leaves control characters out; the observer keeps both (torch 2.13)."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(c for c in name.replace("\\", "/") if c >= " " and c != "\x7f")


def _each_row_once(row: Int64, num_rows: int) -> Int64:
    """Keep the first node that claims a device row; the others are linked to none."""
    nodes = np.flatnonzero(row >= 0)
    first = np.full(num_rows, len(row), dtype=np.int64)
    np.minimum.at(first, row[nodes], nodes)
    once = np.full(len(row), -1, dtype=np.int64)
    claimed = np.flatnonzero(first < len(row))
    once[first[claimed]] = claimed
    return once


def ambiguous_correlations(correlation: Int64, pid: Int64) -> Int64:
    """Correlation ids under which calls of several processes stand: which of them launched, the file does not say.

    Args:
        correlation: of each runtime call.
        pid: its process.
    """
    known = correlation != MISSING
    correlation, pid = correlation[known], pid[known]
    if not len(pid) or (pid == pid[0]).all():
        return correlation[:0]
    ids, _, _ = distinct_pairs(correlation, pid)
    ids, count = np.unique(ids, return_counts=True)
    return ids[count > 1]


def link_launches(
    correlation: Int64, ts_ns: Int64, dur_ns: Int64, *, pid: Int64, is_runtime: Bool, is_activity: Bool
) -> Positions:
    """Row of the launch of each device activity, -1 for none and for every other row.

    A runtime call and the driver call nested in it share one correlation id: the outermost, which
    starts first and lasts longest, is the launch.
    """
    launch = np.full(len(correlation), -1, dtype=np.int32)
    calls = np.flatnonzero(is_runtime & (correlation != MISSING))
    ambiguous = ambiguous_correlations(correlation[calls], pid[calls])
    if len(ambiguous):
        calls = calls[~np.isin(correlation[calls], ambiguous)]
    if num_distinct(correlation[calls]) < len(calls):
        # A call whose time was lost is the launch only if there is no other.
        calls = calls[np.lexsort((-dur_ns[calls], ts_ns[calls], ts_ns[calls] == MISSING))]
    activities = np.flatnonzero(is_activity)
    launch[activities] = pick(calls, match_keys(correlation[activities], correlation[calls]), -1)
    return launch
