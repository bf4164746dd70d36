"""Notes what a loop does when it does it, and has it summed up later, many steps at once.

Between two computations of a training none of our code is in a cache, where it costs several times as much: so no more
is done there than must be, which is to read the clock.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from chakra_capture.recording.spans import Spans, Stretch

_BEGIN, _END, _START_STEP, _END_STEP = range(4)
# Some tens of steps, a fraction of a millisecond; a loop that enters phases without end in one step is summed up in
# between.
_MOST_MOVES = 4096
_MOVES_AT_ONCE = 256


class Journal:
    """Stands before ``spans`` and replays into them.

    Args:
        clock: monotonic ns.
        when_full: called where the journal grows too long inside a step; has to replay it.
    """

    def __init__(self, clock: Callable[[], int], when_full: Callable[[], None]) -> None:
        self._clock, self._when_full = clock, when_full
        self._moves: list[tuple[int, Any, int]] = []
        self._thread = 0
        self._now = clock()
        self._gap: Stretch | None = None
        # Whichever thread replays, what it replays is of the one thread that is followed.
        self.spans = Spans(lambda: self._now, thread=lambda: 1)

    def begin(self, name: str) -> None:
        """Enter a phase."""
        if get_ident() != self._thread and not self._is_here():
            return
        self._moves.append((_BEGIN, name, self._clock()))
        if len(self._moves) >= _MOST_MOVES:
            self._when_full()

    def end(self, name: str) -> None:
        """Leave a phase."""
        if get_ident() != self._thread and not self._is_here():
            return
        self._moves.append((_END, name, self._clock()))

    def start_step(self, step: int) -> None:
        """Begin a step."""
        self._thread = get_ident()
        self._moves.append((_START_STEP, step, self._clock()))

    def end_step(self, note: Any, now: int) -> bool:
        """End the step; ``note`` comes back with it. Says whether it is time to replay."""
        self._moves.append((_END_STEP, note, now))
        return len(self._moves) >= _MOVES_AT_ONCE

    def replay(self) -> Iterator[tuple[Any, Stretch, Stretch | None]]:
        """Give the steps that have ended: (note, step, time before it); then the spans are at the present."""
        moves, self._moves, spans = self._moves, [], self.spans
        for kind, what, self._now in moves:
            if kind == _BEGIN:
                spans.begin(what)
            elif kind == _END:
                spans.end(what)
            elif kind == _START_STEP:
                self._gap = spans.start_step(what)
            else:
                yield what, spans.end_step(), self.take_gap()
        self._now = self._clock()

    def take_gap(self) -> Stretch | None:
        """The time before the step that runs, once."""
        gap, self._gap = self._gap, None
        return gap

    def _is_here(self) -> bool:
        me = get_ident()
        if not self._thread:
            self._thread = me
        return self._thread == me
