"""One line on the terminal while a job trains: how long a step takes, what of, and what that says so far."""

import contextlib
import shutil
import sys
from typing import TextIO

from chakra_capture.annotations import BETWEEN_STEPS, H2D, INPUT_WAIT, PHASE_NAMES
from chakra_capture.recording.spans import Stretch

# TraceML's limit for what is worth a word (0.5.0: INPUT_BOUND, H2D_BOUND, RESIDUAL_HEAVY warn from 10 % on).
_MUCH = 0.10
_REST = "rest"
_VERDICTS = {INPUT_WAIT: "input-bound", H2D: "copy-bound", _REST: "much outside phases"}


class LiveLine:
    """Sums up the steps since the line was last drawn; drawn anew at most once a second, by whoever writes phases."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._forget()

    @classmethod
    def on_terminal(cls, rank: int) -> "LiveLine | None":
        """A line on stderr; None for other ranks than 0 and where stderr is no terminal."""
        stream = sys.stderr
        try:
            return cls(stream) if rank == 0 and stream.isatty() else None
        except (AttributeError, ValueError):  # None, closed, or something of the job's that only looks like a file
            return None

    def add(self, step: int, done: Stretch) -> None:
        """Take a step that has ended."""
        self._step = step
        self._count += 1
        self._ns += done.work_ns
        for name, total in done.totals.items():
            if name not in BETWEEN_STEPS:
                self._phases[name] = self._phases.get(name, 0) + total.ns

    def draw(self) -> None:
        """Draw the line over the one before, if any step ended since; a terminal that is gone ends it."""
        if self._stream is None or not self._count or self._ns <= 0:
            return
        width = shutil.get_terminal_size().columns - 1
        text = self._text()
        try:
            self._stream.write("\r" + text[:width].ljust(width))
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
        self._forget()

    def close(self) -> None:
        """Leave the last line where it is and go on below it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write("\n")
                stream.flush()

    def _forget(self) -> None:
        self._step = self._count = self._ns = 0
        self._phases: dict[str, int] = {}

    def _text(self) -> str:
        order = {name: at for at, name in enumerate(PHASE_NAMES)}
        times = dict(sorted(self._phases.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
        if times:
            times[_REST] = max(self._ns - sum(times.values()), 0)
        parts = ", ".join(f"{name} {100 * ns / self._ns:.0f} %" for name, ns in times.items())
        much = [name for name in _VERDICTS if times.get(name, 0) >= _MUCH * self._ns]
        verdict = _VERDICTS[max(much, key=lambda name: times[name])] if much else ""
        return "  ".join(filter(None, (f"step {self._step}: {self._ns / self._count / 1e6:.2f} ms", parts, verdict)))
