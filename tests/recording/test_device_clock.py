"""Times of the device, with torch.cuda's calls replaced: there is no device here."""

from types import SimpleNamespace

import torch

from chakra_capture.recording.device_clock import CudaClock, device_clock


class Event:
    made = 0

    def __init__(self, cuda, enable_timing):
        assert enable_timing
        Event.made += 1
        self.cuda = cuda

    def record(self):
        self.at = self.cuda.now

    def query(self):
        assert not self.cuda.is_capturing, "a query ends a capture"
        return self.cuda.reached >= self.at

    def elapsed_time(self, last):
        if self.cuda.is_split:
            raise RuntimeError("different devices")
        return last.at - self.at


class Cuda:
    """What the clock uses of torch.cuda."""

    def __init__(self):
        self.now = self.reached = 0.0
        self.is_ready, self.is_capturing, self.is_split = True, False, False

    def is_initialized(self):
        return self.is_ready

    def is_current_stream_capturing(self):
        assert self.is_ready, "asking initialises the device"
        return self.is_capturing

    def Event(self, enable_timing):
        return Event(self, enable_timing)

    def current_device(self):
        return 1

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=(5, 9)[device])

    def memory_stats_as_nested_dict(self):
        kinds = {"allocated_bytes": (1, 2), "reserved_bytes": (3, 4)}
        return {kind: {"all": {"current": now, "peak": peak}} for kind, (now, peak) in kinds.items()}


def test_a_mark_has_passed_when_the_device_says_so_and_times_are_nanoseconds():
    cuda = Cuda()
    clock = CudaClock(cuda)
    first = clock.mark()
    cuda.now = 1.5
    last = clock.mark()
    assert (clock.has_passed(first), clock.has_passed(last)) == (True, False)
    cuda.reached = 2.0
    assert clock.has_passed(last)
    assert clock.elapsed_ns(first, last) == 1_500_000
    cuda.is_split = True
    assert clock.elapsed_ns(first, last) is None


def test_events_are_used_again():
    cuda, before = Cuda(), Event.made
    clock = CudaClock(cuda)
    for _ in range(5):
        first, last = clock.mark(), clock.mark()
        clock.release(first)
        clock.release(last)
    assert Event.made - before == 2


def test_nothing_is_asked_before_the_job_uses_the_device_or_while_it_captures():
    cuda = Cuda()
    cuda.is_ready = False
    clock = CudaClock(cuda)
    assert (clock.mark(), clock.memory()) == (None, None)
    cuda.is_ready = True
    mark = clock.mark()
    cuda.is_capturing = True
    assert (clock.mark(), clock.memory(), clock.has_passed(mark)) == (None, None, False)


def test_memory_is_what_is_used_and_the_peak():
    assert CudaClock(Cuda()).memory() == {
        "capacity_bytes": 9,
        "allocated_bytes": 1, "peak_allocated_bytes": 2, "reserved_bytes": 3, "peak_reserved_bytes": 4
    }  # fmt: skip


def test_only_a_torch_with_cuda_has_a_device_clock(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert device_clock() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert device_clock() is not None
