"""Notes what a loop does when it does it, and has it summed up later, many steps at once.

Between two computations of a training none of our code is in a cache, where it costs several times as much: so no more
is done there than must be, which is to read the clock.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from chakra_capture.recording.spans import Spans, Stretch

BEGIN, END, START_STEP, END_STEP = range(4)
# Some tens of steps, a fraction of a millisecond; a loop that enters phases without end in one step is summed up in
# between.
MOST_MOVES = 4096
MOVES_AT_ONCE = 256
Moves = list[tuple[int, Any, int]]


class Journal:
    """Stands before ``spans`` and replays into them.

    Args:
        clock: monotonic ns.
        when_full: called where the journal grows too long inside a step; has to replay it.

    Attributes:
        moves: (kind, what, ns) of each, and always the same list. Who knows that this thread is the one followed, and
            looks at ``MOST_MOVES``, may add to it: where nothing is in a cache a call in between takes a microsecond.
        thread: the one that is followed; 0 where that is not known yet.
    """

    def __init__(self, clock: Callable[[], int], when_full: Callable[[], None]) -> None:
        self._clock, self._when_full = clock, when_full
        self.moves: Moves = []
        self.thread = 0
        self._gap: Stretch | None = None
        self.spans = Spans(clock)

    def begin(self, name: str) -> None:
        """Enter a phase."""
        if get_ident() != self.thread and not self._is_here():
            return
        self.moves.append((BEGIN, name, self._clock()))
        if len(self.moves) >= MOST_MOVES:
            self._when_full()

    def end(self, name: str) -> None:
        """Leave a phase."""
        if get_ident() != self.thread and not self._is_here():
            return
        self.moves.append((END, name, self._clock()))

    def replay(self) -> Iterator[tuple[Any, Stretch, Stretch | None]]:
        """Give the steps that have ended: (what was noted at their end, step, time before it)."""
        moves, spans = self.moves[:], self.spans
        del self.moves[: len(moves)]
        # Whichever thread replays, what it replays is of the one thread that is followed.
        enter, leave, turn = spans.enter, spans.leave, spans.turn
        for kind, what, now in moves:
            if kind == BEGIN:
                enter(what, now)
            elif kind == END:
                leave(what, now)
            elif kind == START_STEP:
                self._gap = turn(now)
            else:
                yield what, turn(now), self.take_gap()

    def take_gap(self) -> Stretch | None:
        """The time before the step that runs, once."""
        gap, self._gap = self._gap, None
        return gap

    def _is_here(self) -> bool:
        me = get_ident()
        if not self.thread:
            self.thread = me
        return self.thread == me
