"""Notes what a loop does when it does it, and has it summed up later, many steps at once.

Between two computations of a training none of our code is in a cache, where it costs several times as much: so no more
is done there than must be, which is to read the clock.
"""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from chakra_capture.recording.shapes import BEGIN, END, END_STEP, Moves, Shapes, follow
from chakra_capture.recording.spans import Spans, Stretch

# Entries, three to a move: of some tens of steps, a fraction of a millisecond. A loop that enters phases without end in
# one step is summed up in between.
MOST_MOVES = 3 * 4096
MOVES_AT_ONCE = 3 * 256


class Journal:
    """Stands before ``spans`` and replays into them.

    Args:
        clock: monotonic ns.
        when_full: called where the journal grows too long inside a step; has to replay it.

    Attributes:
        moves: kind, what, ns of each, and always the same list. Who knows that this thread is the one followed, and
            looks at ``MOST_MOVES``, may add to it: where nothing is in a cache a call in between takes a microsecond.
        notes: what else there is to know of each step, one for each ``END_STEP``.
        thread: the one that is followed; 0 where that is not known yet.
    """

    def __init__(self, clock: Callable[[], int], when_full: Callable[[], None]) -> None:
        self._clock, self._when_full = clock, when_full
        self.moves: Moves = []
        self.notes: list[Any] = []
        self.thread = 0
        self.spans = Spans(clock)
        # The moves begin with the end of the last step that was given, and the spans know nothing of what came after.
        self._is_whole = False

    def begin(self, name: str) -> None:
        """Enter a phase."""
        if get_ident() != self.thread and not self._is_here():
            return
        self.moves += BEGIN, name, self._clock()
        if len(self.moves) >= MOST_MOVES:
            self._when_full()

    def end(self, name: str) -> None:
        """Leave a phase."""
        if get_ident() != self.thread and not self._is_here():
            return
        self.moves += END, name, self._clock()

    def take(self, shapes: Shapes | None) -> Iterator[tuple[Any, str | tuple[Stretch | None, Stretch]]]:
        """Give the steps that have ended: what was noted of each, and its text, or else (time before it, step)."""
        moves, is_whole, notes = self.moves, self._is_whole, self.notes[:]
        ends = [3 * at for at, kind in enumerate(moves[::3]) if kind == END_STEP][is_whole:]
        if not ends:
            return
        # No step is given twice, whoever comes in between.
        moves = moves[: ends[-1] + 3]
        del self.moves[: ends[-1]], self.notes[: len(ends)]
        self._is_whole = True
        begin = 0
        for note, end in zip(notes, ends, strict=False):
            part = moves[begin : end + 3]
            text = shapes.text(part) if shapes is not None and is_whole else None
            yield note, text or self._spell_out(part, is_whole=is_whole)
            begin, is_whole = end, True

    def _spell_out(self, moves: Moves, *, is_whole: bool) -> tuple[Stretch | None, Stretch]:
        if is_whole:
            self.spans.stretch = Stretch(moves[2])
            del moves[:3]
        (found,) = follow(self.spans, moves)
        return found

    def catch_up(self) -> None:
        """Tell the spans what has been noted of a step, or of the time between two, that has not ended."""
        moves = self.moves[:]
        del self.moves[: len(moves)]
        if self._is_whole:
            self._is_whole = False
            self.spans.stretch = Stretch(moves[2])
            del moves[:3]
        for _ in follow(self.spans, moves):
            pass

    def _is_here(self) -> bool:
        me = get_ident()
        if not self.thread:
            self.thread = me
        return self.thread == me
