"""Linking by call order where the traces have no record-function ids in common (torch before 2.1).

On each thread both traces list the same ops in the order in which they began. A thread of the host trace is linked
to the thread of the device trace that holds its whole list of names as one run. Where that run occurs several times
(one iteration was recorded on the host side, many on the device side), autograd's sequence numbers tell which one it
is; where they do not, the first is taken and the number of places said.
"""

import numpy as np

from chakra_capture.merge.pairing import OrderEvidence
from chakra_capture.merge.rows import by_number, group_numbers
from chakra_capture.trace.columns import MISSING, Bool, Int64
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace

# pid and tid
_Thread = tuple[int, int]


def link_by_order(host: HostTrace, device: DeviceTrace, is_cpu_op: Bool) -> tuple[Int64, OrderEvidence]:
    """Match host nodes with the CPU ops and annotations of the device trace thread by thread.

    Args:
        host: the host trace.
        device: the device trace.
        is_cpu_op: device rows of kind host_op or annotation.

    Returns:
        per host node its row in the device trace, -1 for none; and how good the match is.
    """
    code_of = {name: code for code, name in enumerate(device.name.values)}
    host_code = np.array([code_of.get(name, -1) for name in host.name.values] or [-1], dtype=np.int64)
    nodes = np.flatnonzero(~host.is_process & ~host.is_thread)
    nodes = nodes[np.argsort(_opening(host, nodes), kind="stable")]
    device_threads = _device_threads(device, is_cpu_op)
    link = np.full(host.num_nodes, -1, dtype=np.int64)
    occurrences = []
    # What the device trace never names (process_group:init is recorded on the host side alone) breaks no run.
    named = nodes[host_code[host.name.codes[nodes]] >= 0]
    threads = by_number(named, host.attrs["tid"][named])
    holders = _threads_of_names(device, device_threads)
    # The longest list first: a short one fits in more places.
    for mine in sorted(threads, key=len, reverse=True):
        names = host_code[host.name.codes[mine]]
        # Whoever lacks the name that the fewest threads have cannot hold the list.
        keys = min((holders.get(code, []) for code in np.unique(names).tolist()), key=len, default=[])
        places, key = _fewest_places(names, device, {key: device_threads[key] for key in keys if key in device_threads})
        if key is not None:
            rows = device_threads.pop(key)
            spans = [rows[place : place + len(mine)] for place in places.tolist()]
            link[mine] = max(spans, key=lambda span: np.count_nonzero(_equal_sequence(host, device, mine, span)))
            occurrences.append(len(places))
    linked = np.flatnonzero(link >= 0)
    both = _both_sequences(host, device, linked, link[linked])
    equal = _equal_sequence(host, device, linked, link[linked])
    return link, OrderEvidence(
        num_compared=len(nodes),
        num_matched=len(linked),
        num_occurrences=max(occurrences, default=0),
        num_sequence_compared=int(np.count_nonzero(both)),
        num_sequence_equal=int(np.count_nonzero(equal)),
    )


def _threads_of_names(device: DeviceTrace, threads: dict[_Thread, Int64]) -> dict[int, list[_Thread]]:
    """Threads on which each name stands, by its code."""
    holders: dict[int, list[_Thread]] = {}
    for key, rows in threads.items():
        for code in np.unique(device.name.codes[rows]).tolist():
            holders.setdefault(code, []).append(key)
    return holders


def _fewest_places(names: Int64, device: DeviceTrace, threads: dict[_Thread, Int64]) -> tuple[Int64, _Thread | None]:
    """The thread that holds the list in the fewest places, the first of several; None if none holds it."""
    best: tuple[Int64, _Thread | None] = (np.zeros(0, dtype=np.int64), None)
    for key, rows in threads.items():
        places = _occurrences(names, device.name.codes[rows])
        if len(places) and (best[1] is None or len(places) < len(best[0])):
            best = places, key
        if len(best[0]) == 1:
            break
    return best


def _both_sequences(host: HostTrace, device: DeviceTrace, nodes: Int64, rows: Int64) -> Bool:
    known = (host.attrs["seq_id"][nodes] != MISSING) & (device.ids["sequence_number"][rows] != MISSING)
    return np.asarray(known)


def _equal_sequence(host: HostTrace, device: DeviceTrace, nodes: Int64, rows: Int64) -> Bool:
    same = host.attrs["seq_id"][nodes] == device.ids["sequence_number"][rows]
    return np.asarray(_both_sequences(host, device, nodes, rows) & same)


def _opening(host: HostTrace, nodes: Int64) -> Int64:
    """Numbers in the order in which the ops began: record-function ids are counted up then, node ids mostly."""
    ids = host.attrs["rf_id"][nodes]
    counted = len(np.unique(ids)) == len(ids) and not np.any(ids == MISSING)
    return ids if counted else host.node_id[nodes]


def _device_threads(device: DeviceTrace, is_cpu_op: Bool) -> dict[_Thread, Int64]:
    """CPU ops of each thread in the order in which they began.

    External ids are counted up as ops begin; times in whole microseconds leave ties open.
    """
    rows = np.flatnonzero(is_cpu_op)
    external = device.ids["external_id"][rows]
    counted = len(np.unique(external)) == len(external) and not np.any(external == MISSING)
    keys = (external,) if counted else (-device.dur_ns[rows], device.ts_ns[rows])
    rows = rows[np.lexsort((*keys, device.tid[rows], device.pid[rows]))]
    threads = by_number(rows, group_numbers(device.pid[rows], device.tid[rows]))
    return {(int(device.pid[mine[:1]][0]), int(device.tid[mine[:1]][0])): mine for mine in threads}


def _occurrences(wanted: Int64, within: "np.typing.NDArray[np.int32]") -> Int64:
    """Positions at which ``wanted`` stands as one run in ``within``, not overlapping; linear (Knuth, Morris, Pratt)."""
    size = len(wanted)
    if not size or size > len(within) or np.any(wanted < 0):
        return np.zeros(0, dtype=np.int64)
    pattern, text = wanted.tolist(), within.tolist()
    border = [0] * size
    length = 0
    for at in range(1, size):
        while length and pattern[at] != pattern[length]:
            length = border[length - 1]
        length += pattern[at] == pattern[length]
        border[at] = length
    found, length = [], 0
    for at, code in enumerate(text):
        while length and code != pattern[length]:
            length = border[length - 1]
        length += code == pattern[length]
        if length == size:
            found.append(at - size + 1)
            length = 0
    return np.array(found, dtype=np.int64)
