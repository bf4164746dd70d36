"""What ran on a stream, or was launched by a thread, in the order of the launches."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.rows import ACTIVITY_KINDS, by_number, group_numbers
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Int64, pick


class Launches:
    """Activities of each (device, stream), and of each launching thread, in the order of their launches."""

    def __init__(self, columns: Columns) -> None:
        rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (columns.launch >= 0) & (columns.ts_ns != MISSING))
        launched = columns.ts_ns[columns.launch[rows]]
        rows, launched = rows[launched != MISSING], launched[launched != MISSING]
        order = np.lexsort((columns.ts_ns[rows], launched))
        rows, launched = rows[order], launched[order]
        self._thread_of_row = columns.track
        device, stream = columns.integers("device", rows), columns.integers("stream", rows)
        thread = self._thread_of_row[columns.launch[rows]]
        at, number = np.arange(len(rows)), group_numbers(device, stream)
        self._by_stream = {
            (int(device[mine[0]]), int(stream[mine[0]])): _Queue(launched[mine], rows[mine])
            for mine in by_number(at, number)
        }
        self._by_thread = {int(thread[mine[0]]): _Queue(launched[mine], rows[mine]) for mine in by_number(at, thread)}

    def last_of_streams(self, device: int, times: Int64) -> Iterator[Int64]:
        """Of each stream the last activity launched before each time, -1 for none; ``MISSING`` for all devices."""
        for key, queue in self._by_stream.items():
            if device in (MISSING, key[0]):
                yield pick(queue.rows, np.searchsorted(queue.launched_ns, times, side="left") - 1, -1)

    def last_before(self, device: int, stream: int, time: int) -> int | None:
        """Last activity launched on a stream before ``time``."""
        queue = self._by_stream.get((device, stream))
        return queue.last_before(time) if queue else None

    def first_after(self, device: int, stream: int, time: int) -> int | None:
        """First activity launched on a stream at or after ``time``."""
        queue = self._by_stream.get((device, stream))
        return queue.first_after(time) if queue else None

    def last_of_thread(self, call: int, time: int) -> int | None:
        """Last activity that the thread of ``call`` launched on any stream before ``time``."""
        queue = self._by_thread.get(int(self._thread_of_row[call]))
        return queue.last_before(time) if queue else None


@dataclass(frozen=True, slots=True)
class _Queue:
    launched_ns: Int64
    rows: Int64

    def last_before(self, time: int) -> int | None:
        at = int(np.searchsorted(self.launched_ns, time, side="left"))
        return int(self.rows[at - 1]) if at else None

    def first_after(self, time: int) -> int | None:
        at = int(np.searchsorted(self.launched_ns, time, side="left"))
        return int(self.rows[at]) if at < len(self.rows) else None
