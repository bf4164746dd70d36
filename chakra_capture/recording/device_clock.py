"""Times on the device's own time line: CUDA events, made once, put behind queued work and read when they have passed.

Nothing here waits for the device, and nothing touches a stream that a CUDA graph is being captured from.
"""

from typing import Any


class CudaClock:
    """The ``DeviceClock`` of a process that uses CUDA (or HIP, which torch calls by the same names).

    Args:
        cuda: ``torch.cuda``, or what a test puts in its place.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: list[Any] = []

    def mark(self) -> Any:
        """Put an event behind what the current stream has to do; None where that cannot be done."""
        cuda = self._cuda
        # Asking the device for anything would initialise it, which the job may want to do after forking.
        if not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Say whether the device is past the mark; a query during a capture would spoil the capture."""
        return not self._cuda.is_current_stream_capturing() and bool(mark.query())

    def elapsed_ns(self, first: Any, last: Any) -> int | None:
        """Time between two marks that have passed, in steps of half a microsecond; None across two devices."""
        try:
            return round(float(first.elapsed_time(last)) * 1e6)
        except (RuntimeError, ValueError):
            return None

    def release(self, mark: Any) -> None:
        """Keep the event for the next mark."""
        self._free.append(mark)

    def memory(self) -> dict[str, int] | None:
        """Memory of the current device in bytes.

        Peaks are those since the process began or the job reset them: resetting them here would change what the job
        reads from ``torch.cuda.max_memory_allocated``.
        """
        cuda = self._cuda
        if not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        found = cuda.memory_stats_as_nested_dict()
        capacity = int(cuda.get_device_properties(cuda.current_device()).total_memory)
        return {"capacity_bytes": capacity} | {
            f"{word}{kind}_bytes": int(found[f"{kind}_bytes"]["all"][which])
            for kind in ("allocated", "reserved")
            for word, which in (("", "current"), ("peak_", "peak"))
        }


def device_clock() -> CudaClock | None:
    """Make the clock of this process; None where torch was built without CUDA."""
    import torch

    return CudaClock(torch.cuda) if torch.version.cuda or torch.version.hip else None
