"""The phases of every step of one rank, as lines of ``<job>_phases/rank-<R>.jsonl``.

A line is one JSON object. ``kind`` is ``open`` (who writes, and both clocks), ``measures``, ``step``, ``dropped``,
``anchor`` (both clocks at a window's start or end) or ``close``. Of a step: ``step``, ``begin_ns`` and ``ns`` on the
monotonic clock, ``phases`` ({phase: [ns, calls]}, exclusive of phases inside it), ``spans`` ([phase, begin, end], ns
after the step's begin), ``gap`` (the time since the step before: ``ns`` and its ``phases``), ``flags``, ``device_ns``
where the device was timed (exclusive, too; ``(step)`` is all of it), and once a second ``rss_bytes``, ``device_bytes``
and ``batch_size`` (samples of one batch of the step). What is in no phase of a step is its residual. ``validation``,
``checkpoint`` and ``callbacks`` come between two steps, or between the batches of a step that accumulates: there they
are no work of the step.

``measures`` says which phases are timed (null) or why not (a text): a phase that is timed and not in a step took no
time there. ``dropped`` names batches whose gradients came to nothing; their time is in the gap.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any

from chakra_capture.annotations import FIRST, PARTIAL, WHOLE_STEP
from chakra_capture.layout import part_path
from chakra_capture.recording.journal import MOVES_AT_ONCE, Journal
from chakra_capture.recording.live_line import LiveLine
from chakra_capture.recording.manifest import ClockAnchor, Manifest
from chakra_capture.recording.phase_file import PhaseFile
from chakra_capture.recording.shapes import END_STEP, START_STEP, Shapes
from chakra_capture.recording.spans import DeviceClock, Spans, Stretch, Total

SCHEMA_VERSION = 1
# Steps whose device times may be open; of an older one they are not measured.
_MOST_PENDING = 64


class StepPhases:
    """Times the steps of one fit.

    Args:
        path: final name of the file; it is written as ``.part`` and gets its name when the fit has ended.
        manifest: of the run; the first line repeats who writes.
        goes_on: an earlier fit of this run has begun the file.
        max_steps: stop after so many steps.
        device: times phases on the device, too.
        live: shows what the steps take.
        watch: told number and time (ns) of each step that nothing disturbed.
        guard: calls what may fail where nothing else would catch it, in the middle of a step.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        goes_on: bool = False,
        max_steps: int | None = None,
        device: DeviceClock | None = None,
        live: LiveLine | None = None,
        watch: Callable[[int, int], None] | None = None,
        guard: Callable[[Callable[[], None]], None] = lambda action: action(),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._path, self._device, self._live, self._watch, self._clock = path, device, live, watch, clock
        part = part_path(path)
        if goes_on and path.exists():
            os.replace(path, part)
        self._file = PhaseFile(part, is_continued=goes_on and part.exists(), clock=clock)
        # Marks of a device have to be put, and asked for, at the time: there nothing is noted for later.
        self._journal = Journal(clock, lambda: guard(self._catch_up)) if device is None else None
        self._spans = self._journal.spans if self._journal is not None else Spans(clock, device)
        # The hot path: entering a phase, or what the loop does between two steps, and leaving it. Where there is a list
        # of moves they raise nothing: all they do is take a note in it.
        self.moves = self._journal.moves if self._journal is not None else None
        noted = self._journal or self._spans
        self.begin, self.end = noted.begin, noted.end
        self.open_step: int | None = None
        # Once a second, as the memory; the loop asks before it shows a batch.
        self.wants_batch = True
        self._batch_size: int | None = None
        self._left = max_steps
        self._flags: set[str] = {FIRST}
        self._shapes = Shapes(self._spans)
        # Who looks at every step needs more than the text of its record.
        self._has_texts = live is None and watch is None
        # Steps, and lines that come after them.
        self._pending: deque[tuple[Stretch, str] | bytes] = deque()
        self._measures: dict[str, str | None] = {}
        self._is_measures_said = True
        who = {key: getattr(manifest, key) for key in ("run_id", "job", "rank", "world_size", "pid", "hostname")}
        self._add({"kind": "open", "schema_version": SCHEMA_VERSION, **who, **_anchor()})

    @property
    def is_due(self) -> bool:
        """Whether ``write`` should be called."""
        return self._file.is_due

    @property
    def is_finished(self) -> bool:
        """Whether as many steps are recorded as were asked for."""
        return self._left == 0

    def start_step(self, step: int) -> None:
        """Begin a step; a step that runs, and is another one, ends cut short."""
        if self.open_step is not None:
            if self.open_step == step and PARTIAL not in self._flags:
                return
            self.flag(PARTIAL)
            self.end_step()
        self.open_step, journal = step, self._journal
        if journal is not None:
            journal.thread = get_ident()
            journal.moves += START_STEP, None, self._clock()
        else:
            self._spans.gap = self._spans.start_step(step)

    def end_step(self) -> bool:
        """End the step and take its record; says whether there is more to do: to write, sum up or finish."""
        step, self.open_step = self.open_step, None
        if step is None:
            return False
        now, more = self._clock(), None
        is_due = now >= self._file.next_ns
        if self._flags or is_due or self._batch_size is not None or self._left is not None:
            more = self._more(is_due=is_due)
        journal = self._journal
        if journal is None:
            done = self._spans.end_step()
            self._take((step, more), done, self._spans.take_gap())
            return is_due or self._left == 0
        moves = journal.moves
        journal.notes.append((step, more))
        moves += END_STEP, None, now
        return len(moves) >= MOVES_AT_ONCE or is_due or self._left == 0

    def _more(self, *, is_due: bool) -> "_More":
        flags = sorted(self._flags)
        self._flags.clear()
        # Of the steps that end in one second the last says how much memory there was, the next how large a batch is.
        more = self._memory() if is_due else {}
        if self._batch_size is not None:
            more["batch_size"] = self._batch_size
            self._batch_size = None
        if is_due:
            self.wants_batch = True
        if self._left is not None:
            self._left -= 1
        return _More(flags, more)

    def sum_up(self) -> None:
        """Make records of what was noted so far."""
        if self._journal is None:
            return
        for note, found in self._journal.take(self._shapes if self._has_texts else None):
            if isinstance(found, str):
                if not self._is_measures_said:
                    self._say_measures()
                number, more = note
                self._file.add(_record(number, more, found).encode())
            else:
                gap, step = found
                self._take(note, step, gap)

    def _catch_up(self) -> None:
        """The same, and have the spans know what has been noted since."""
        self.sum_up()
        if self._journal is not None:
            self._journal.catch_up()

    def _take(self, note: "tuple[int, _More | None]", done: Stretch, gap: Stretch | None) -> None:
        if not self._is_measures_said:
            self._say_measures()
        number, more = note
        if self._live is not None:
            self._live.add(number, done)
        if self._watch is not None and not (more and more.flags):
            self._watch(number, done.work_ns)
        text = _record(number, more, self._shapes.text_of(done, gap))
        if done.marks or self._pending:
            self._pending.append((done, text))
            self._settle(at_most=_MOST_PENDING)
        else:
            self._file.add(text.encode())

    def abort_step(self, batches: Sequence[int] = (), why: str = "") -> None:
        """The step turned out to hold no work, or work for nothing: its time belongs to the time between the steps.

        Args:
            batches: numbers of the batches that came to nothing, as the framework counts.
            why: what became of them.
        """
        step, self.open_step = self.open_step, None
        if step is None:
            return
        self._catch_up()
        gap = self._spans.take_gap()
        lost = self._spans.end_step()
        self._release(lost)
        self._spans.stretch = _joined(gap, lost) if gap is not None else lost
        self._batch_size = None
        self._flags.discard(PARTIAL)
        if batches:
            self._add({"kind": "dropped", "step": step, "batches": list(batches), "why": why})

    def measures(self, name: str, why_not: str | None = None) -> None:
        """Note that a phase is timed from now on, or why it is not."""
        if name not in self._measures or self._measures[name] != why_not:
            self.sum_up()
            self._measures[name] = why_not
            self._is_measures_said = False

    def note_batch(self, size: int | None) -> None:
        """Note how many samples a batch of the running step holds."""
        self.wants_batch = False
        self._batch_size = size

    def flag(self, flag: str) -> None:
        """Mark the step that runs."""
        if self.open_step is not None:
            self._flags.add(flag)

    def anchor(self, event: str) -> None:
        """Note both clocks."""
        self.sum_up()
        self._add({"kind": "anchor", "event": event, **_anchor()})

    def write(self) -> None:
        """Write what is complete.

        Raises:
            OSError: it cannot be written.
        """
        self.sum_up()
        if self._live is not None:
            self._live.draw()
        self._file.flush()

    def close(self) -> None:
        """Write the rest and give the file its final name.

        Raises:
            OSError: it cannot be written.
        """
        if self.open_step is not None:
            self.flag(PARTIAL)
            self.end_step()
        self._catch_up()
        self._say_measures()
        self._settle(at_most=0)
        rest = self._spans.end_step()
        gap = {"ns": rest.end_ns - rest.begin_ns, "phases": {n: [t.ns, t.calls] for n, t in rest.totals.items()}}
        file = self._file
        lost = {"slow_writes": file.num_slow_writes, "bytes_lost": file.num_bytes_lost}
        self._add({"kind": "close", **_anchor(), "gap": gap, **lost})
        file.close()
        os.replace(file.path, self._path)
        if self._live is not None:
            self._live.close()

    def abandon(self) -> None:
        """Leave the file under its working name as it is: what was not written is lost."""
        self._file.abandon()

    def _settle(self, *, at_most: int) -> None:
        """Hand on the records whose device times are known, in order; the oldest without them if they are too many."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, bytes):
                self._file.add(first)
                self._pending.popleft()
                continue
            stretch, text = first
            marks = stretch.marks
            is_known = not marks or self._has_passed(stretch)
            if not is_known and len(self._pending) <= at_most:
                return
            self._pending.popleft()
            if marks:
                times = self._device_times(stretch) if is_known else None
                self._release(stretch)
                text = f'{text[:-1]},"device_ns":{json.dumps(times)}}}'
            self._file.add(text.encode())

    def _has_passed(self, stretch: Stretch) -> bool:
        assert self._device is not None
        return all(self._device.has_passed(marks.last) for marks in reversed(stretch.marks))

    def _release(self, stretch: Stretch) -> None:
        for marks in stretch.marks:
            assert self._device is not None
            self._device.release(marks.first)
            self._device.release(marks.last)

    def _device_times(self, stretch: Stretch) -> dict[str, int]:
        found: dict[str, int] = {}
        unknown: set[str | None] = {*stretch.unmarked}
        for marks in stretch.marks:
            assert self._device is not None
            elapsed = self._device.elapsed_ns(marks.first, marks.last)
            name = WHOLE_STEP if marks.name is None else marks.name
            if elapsed is None:
                unknown |= {name, marks.outer}
                continue
            found[name] = found.get(name, 0) + elapsed
            if marks.outer is not None:
                found[marks.outer] = found.get(marks.outer, 0) - elapsed
        return {name: elapsed for name, elapsed in found.items() if name not in unknown}

    def _memory(self) -> dict[str, Any]:
        found = {"rss_bytes": resident_bytes(), "device_bytes": self._device.memory() if self._device else None}
        return {name: value for name, value in found.items() if value is not None}

    def _say_measures(self) -> None:
        if not self._is_measures_said:
            self._add({"kind": "measures", "phases": dict(self._measures)})
            self._is_measures_said = True

    def _add(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode()
        if self._pending:
            self._pending.append(line)
        else:
            self._file.add(line)


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _anchor() -> dict[str, int]:
    now = ClockAnchor.now()
    return {"unix_ns": now.unix_ns, "monotonic_ns": now.monotonic_ns}


@dataclass(frozen=True, slots=True)
class _More:
    """What few steps have: flags, and what is noted once a second."""

    flags: list[str]
    values: dict[str, Any]


def _record(number: int, more: _More | None, times: str) -> str:
    """The record of a step as JSON: made by hand, for ``json.dumps`` costs as much as all the rest."""
    if more is not None:
        if more.flags:
            times += f',"flags":{json.dumps(more.flags)}'
        for name, value in more.values.items():
            times += f',"{name}":{json.dumps(value)}'
    return f'{{"kind":"step","step":{number},{times}}}'


def _joined(first: Stretch, second: Stretch) -> Stretch:
    totals = {name: Total(total.ns, total.calls) for name, total in first.totals.items()}
    for name, more in second.totals.items():
        total = totals.setdefault(name, Total())
        total.ns, total.calls = total.ns + more.ns, total.calls + more.calls
    return Stretch(first.begin_ns, totals=totals)
