"""Where the time of a training loop goes: spans with a begin and an end, summed to one record per step.

Pure: told what happens and when it is asked to, it reads the one clock it was given. The definitions of the phases,
and that a step includes the wait for its input, follow TraceML 0.5 (``step_time = input_wait + traced_step``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from chakra_capture.annotations import BACKWARD, BETWEEN_STEPS, FORWARD

# So many spans of one step, or of one gap, keep their bounds; the sums count all.
_MOST_SPANS = 256
# So many phases of one step are timed on the device; each takes two events of the driver's.
_MOST_MARKS = 2048
_NO_NAMES: frozenset[str] = frozenset()
# So many names may there be; what has a further one is counted under the last.
_MOST_NAMES = 64
_OTHER_NAMES = "(other names)"


class DeviceClock(Protocol):
    """Marks on the device's own time line, read later without waiting for the device."""

    def mark(self) -> Any:
        """Put a mark behind the work queued so far; None where that cannot be done now."""

    def has_passed(self, mark: Any) -> bool:
        """Say whether the device is past the mark."""

    def elapsed_ns(self, first: Any, last: Any) -> int | None:
        """Time between two marks that have passed; None where they cannot be compared."""

    def release(self, mark: Any) -> None:
        """Let a mark be used again."""

    def memory(self) -> dict[str, int] | None:
        """Memory in use on the device, in bytes; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A phase on the device's time line; ``name`` is None for the whole step, ``outer`` is the phase around it."""

    name: str | None
    first: Any
    last: Any
    outer: str | None = None


class Total:
    """Time of one phase less that of phases inside it, and how often it was entered."""

    __slots__ = ("calls", "ns")

    def __init__(self, ns: int = 0, calls: int = 0) -> None:
        self.ns, self.calls = ns, calls


class Stretch:
    """A step, or the time between two steps.

    Attributes:
        begin_ns, end_ns: on the monotonic clock.
        totals: by phase, exclusive of phases inside it.
        spans: (phase, begin, end) of each, inclusive, ns after ``begin_ns``; the first ones.
        num_spans_left_out: spans beyond those.
        marks: of its phases and of itself on the device's time line.
        unmarked: phases of which the device knows a part alone: their time there is not known.
    """

    __slots__ = ("begin_ns", "end_ns", "marks", "num_spans_left_out", "spans", "totals", "unmarked")

    def __init__(self, begin_ns: int, totals: dict[str, Total] | None = None) -> None:
        self.begin_ns = begin_ns
        self.end_ns = self.num_spans_left_out = 0
        self.totals: dict[str, Total] = {} if totals is None else totals
        self.spans: list[tuple[str, int, int]] = []
        self.marks: list[Marks] = []
        self.unmarked = _NO_NAMES

    @property
    def work_ns(self) -> int:
        """Time without what comes between two steps: a step that accumulates may hold some."""
        between = sum(total.ns for name, total in self.totals.items() if name in BETWEEN_STEPS)
        return self.end_ns - self.begin_ns - between


class _Open:
    __slots__ = ("begin_ns", "inner_ns", "mark", "name")

    def __init__(self, name: str, begin_ns: int, mark: Any) -> None:
        self.name, self.begin_ns, self.inner_ns, self.mark = name, begin_ns, 0, mark


class Spans:
    """Follows one thread's loop: a step or the time between two, and the phases open in it, innermost last.

    ``enter``, ``leave`` and ``turn`` are told the time, and are of the thread that is followed; the others find out.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        device: DeviceClock | None = None,
        *,
        thread: Callable[[], int] = get_ident,
    ) -> None:
        self._clock, self._device, self._get_ident = clock, device, thread
        self._thread = 0
        self.names: set[str] = set()
        self._stack: list[_Open] = []
        self._mark: Any = None  # where the step began on the device
        self.step: int | None = None
        self.stretch = Stretch(clock())
        self.gap: Stretch | None = None  # the time before the step that runs, until it is taken

    def start_step(self, step: int) -> Stretch:
        """Begin a step; returns the time since the last one."""
        self._thread = self._get_ident()
        gap = self.turn(self._clock())
        self.step = step
        self._mark = self._device.mark() if self._device is not None else None
        return gap

    def end_step(self) -> Stretch:
        """End the step; returns it. What is still open in it ends with it."""
        done = self.turn(self._clock())
        self.step = None
        if self._mark is not None:
            self._note(done, None, self._mark, None)
            self._mark = None
        return done

    def begin(self, name: str) -> None:
        """Enter a phase."""
        if self._get_ident() != self._thread and not self._is_here():
            return
        mark = self._next_mark() if self._device is not None and self.step is not None else None
        self.enter(name, self._clock(), mark)

    def end(self, name: str) -> None:
        """Leave a phase, and what an exception has left open inside it; one that is not open is passed over."""
        if self._get_ident() != self._thread and not self._is_here():
            return
        self.leave(name, self._clock())

    def enter(self, name: str, now: int, mark: Any = None) -> None:
        """Enter a phase, with its mark on the device."""
        stack = self._stack
        if name not in self.names:
            if len(self.names) >= _MOST_NAMES:
                name = _OTHER_NAMES
            self.names.add(name)
        # Activation checkpointing runs forwards again inside backward: that is backward's time.
        if stack and name == FORWARD and any(each.name == BACKWARD for each in stack):
            name = BACKWARD
        stack.append(_Open(name, now, mark))

    def leave(self, name: str, now: int) -> None:
        """Leave a phase, as ``end``."""
        stack = self._stack
        if stack and stack[-1].name == name:
            self._close(now)
            return
        depth = next((at for at in reversed(range(len(stack))) if self._is(stack[at], name)), None)
        if depth is not None:
            while len(stack) > depth:
                self._close(now)

    def turn(self, now: int) -> Stretch:
        """End the step, or the time between two, with what is open in it, and begin the other; returns what ended."""
        while self._stack:
            self._close(now)
        done, self.stretch = self.stretch, Stretch(now)
        done.end_ns = now
        return done

    def take_gap(self) -> Stretch | None:
        """The time before the step that runs, once."""
        gap, self.gap = self.gap, None
        return gap

    def unused(self, begin_ns: int) -> "Spans":
        """Others that have followed nothing yet, from ``begin_ns`` on; the names are those of both."""
        found = Spans(lambda: begin_ns)
        found.names = self.names
        return found

    def _next_mark(self) -> Any:
        assert self._device is not None
        return self._device.mark() if len(self.stretch.marks) < _MOST_MARKS else None

    def _is_here(self) -> bool:
        """Whether the calling thread is the one that is followed: others (autograd's) run beside its phases."""
        me = self._get_ident()
        if not self._thread:
            self._thread = me
        return self._thread == me

    @staticmethod
    def _is(entry: _Open, name: str) -> bool:
        return entry.name in (name, _OTHER_NAMES) or (name == FORWARD and entry.name == BACKWARD)

    def _close(self, now: int) -> None:
        stack, stretch = self._stack, self.stretch
        entry = stack.pop()
        name, begin_ns = entry.name, entry.begin_ns
        lasted = now - begin_ns
        total = stretch.totals.get(name)
        if total is None:
            total = stretch.totals[name] = Total()
        total.ns += lasted - entry.inner_ns
        outer = stack[-1] if stack else None
        if outer is not None:
            outer.inner_ns += lasted
        if outer is None or outer.name != name:
            total.calls += 1
        if entry.mark is None:
            if self._device is not None and self.step is not None:
                self._leave_out(stretch, name)
        else:
            self._note(stretch, name, entry.mark, outer.name if outer is not None and outer.mark else None)
        if len(stretch.spans) < _MOST_SPANS:
            first = stretch.begin_ns
            stretch.spans.append((name, begin_ns - first, now - first))
        else:
            stretch.num_spans_left_out += 1

    def _note(self, stretch: Stretch, name: str | None, first: Any, outer: str | None) -> None:
        assert self._device is not None
        last = self._device.mark()
        if last is not None:
            stretch.marks.append(Marks(name, first, last, outer))
            return
        self._device.release(first)
        if name is not None:
            self._leave_out(stretch, name)

    def _leave_out(self, stretch: Stretch, name: str) -> None:
        # The phase around it cannot be told from it either.
        stretch.unmarked |= {name, self._stack[-1].name} if self._stack else {name}
