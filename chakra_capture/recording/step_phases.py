"""The phases of every step of one rank, as lines of ``<job>_phases/rank-<R>.jsonl``.

A line is one JSON object. ``kind`` is ``open`` (who writes, and both clocks), ``step``, ``anchor`` (both clocks at a
window's start or end) or ``close``. Of a step: ``step``, ``begin_ns`` and ``ns`` on the monotonic clock, ``phases``
({phase: [ns, calls]}, exclusive of phases inside it), ``spans`` ([phase, begin, end], ns after the step's begin),
``gap`` (the time since the step before: ``ns`` and its ``phases``), ``flags``, ``device_ns`` where the device was
timed, and once a second ``rss_bytes``. What is in no phase of a step is its residual.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_capture.layout import part_path
from chakra_capture.recording.manifest import ClockAnchor, Manifest
from chakra_capture.recording.phase_file import PhaseFile
from chakra_capture.recording.spans import DeviceClock, Spans, Stretch, Total

SCHEMA_VERSION = 1
PROFILED, FIRST, PARTIAL, UPDATE_SKIPPED = "profiled", "first", "partial", "update_skipped"
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
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        goes_on: bool = False,
        max_steps: int | None = None,
        device: DeviceClock | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._path, self._device = path, device
        part = part_path(path)
        if goes_on and path.exists():
            os.replace(path, part)
        self._file = PhaseFile(part, is_continued=goes_on and part.exists(), clock=clock)
        self._spans = spans = Spans(clock, device)
        # The hot path: entering a phase, or what the loop does between two steps, and leaving it.
        self.begin, self.end = spans.begin, spans.end
        self._left = max_steps
        self._flags: set[str] = {FIRST}
        self._gap: Stretch | None = None
        self._pending: deque[_Step] = deque()
        self._quoted = _Quoted()
        who = {key: getattr(manifest, key) for key in ("run_id", "job", "rank", "world_size", "pid", "hostname")}
        self._add({"kind": "open", "schema_version": SCHEMA_VERSION, **who, **_anchor()})

    @property
    def open_step(self) -> int | None:
        """The step that runs."""
        return self._spans.step

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
        if self._spans.step is not None:
            if self._spans.step == step and PARTIAL not in self._flags:
                return
            self.flag(PARTIAL)
            self.end_step()
        self._gap = self._spans.start_step(step)

    def end_step(self) -> None:
        """End the step and take its record."""
        step = self._spans.step
        if step is None:
            return
        done = self._spans.end_step()
        # Of the steps that end in one second the last one says how much memory there was.
        rss = resident_bytes() if self._file.is_due else None
        self._pending.append(_Step(step, done, self._gap, sorted(self._flags), rss))
        self._flags.clear()
        self._gap = None
        if self._left is not None:
            self._left -= 1
        self._settle(at_most=_MOST_PENDING)

    def abort_step(self) -> None:
        """The step turned out to hold no work: its time belongs to the time between the steps."""
        if self._spans.step is not None:
            lost, gap = self._spans.end_step(), self._gap
            self._release(lost)
            self._spans.stretch = _joined(gap, lost) if gap is not None else lost
            self._gap = None

    def flag(self, flag: str) -> None:
        """Mark the step that runs."""
        if self._spans.step is not None:
            self._flags.add(flag)

    def anchor(self, event: str) -> None:
        """Note both clocks."""
        self._add({"kind": "anchor", "event": event, **_anchor()})

    def write(self) -> None:
        """Write what is complete.

        Raises:
            OSError: it cannot be written.
        """
        self._file.flush()

    def close(self) -> None:
        """Write the rest and give the file its final name.

        Raises:
            OSError: it cannot be written.
        """
        if self._spans.step is not None:
            self.flag(PARTIAL)
            self.end_step()
        self._settle(at_most=0)
        rest = self._spans.end_step()
        gap = {"ns": rest.end_ns - rest.begin_ns, "phases": {n: [t.ns, t.calls] for n, t in rest.totals.items()}}
        file = self._file
        lost = {"slow_writes": file.num_slow_writes, "bytes_lost": file.num_bytes_lost}
        self._add({"kind": "close", **_anchor(), "gap": gap, **lost})
        file.close()
        os.replace(file.path, self._path)

    def _settle(self, *, at_most: int) -> None:
        """Hand on the records whose device times are known, in order; the oldest without them if they are too many."""
        while self._pending:
            step = self._pending[0]
            marks = step.stretch.marks
            times = self._device_times(step.stretch) if marks else None
            if marks and times is None and len(self._pending) <= at_most:
                return
            self._pending.popleft()
            text = step.text(self._quoted)
            if marks:
                self._release(step.stretch)
                text = f'{text},"device_ns":{json.dumps(times)}'
            self._file.add(f"{text}}}".encode())

    def _release(self, stretch: Stretch) -> None:
        for _, first, last in stretch.marks:
            assert self._device is not None
            self._device.release(first)
            self._device.release(last)

    def _device_times(self, stretch: Stretch) -> dict[str, int] | None:
        found: dict[str, int] = {}
        for name, first, last in stretch.marks:
            assert self._device is not None
            elapsed = self._device.elapsed_ns(first, last)
            if elapsed is None:
                return None
            found[name] = found.get(name, 0) + elapsed
        return found

    def _add(self, record: dict[str, Any]) -> None:
        self._file.add(json.dumps(record, separators=(",", ":")).encode())


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


class _Quoted(dict[str, str]):
    """Names as JSON writes them; there are few, and they come in every step."""

    def __missing__(self, name: str) -> str:
        self[name] = quoted = json.dumps(name)
        return quoted


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    stretch: Stretch
    gap: Stretch | None
    flags: list[str]
    rss_bytes: int | None

    def text(self, quoted: _Quoted) -> str:
        """The record as JSON, still open: made by hand, for ``json.dumps`` costs as much as all the rest."""
        step = self.stretch
        spans = ",".join([f"[{quoted[name]},{begin},{end}]" for name, begin, end in step.spans])
        text = (
            f'{{"kind":"step","step":{self.number},"begin_ns":{step.begin_ns},"ns":{step.end_ns - step.begin_ns},'
            f'"phases":{_totals(step, quoted)},"spans":[{spans}]'
        )
        if step.num_spans_left_out:
            text += f',"spans_left_out":{step.num_spans_left_out}'
        if self.gap is not None:
            text += f',"gap":{{"ns":{self.gap.end_ns - self.gap.begin_ns},"phases":{_totals(self.gap, quoted)}}}'
        if self.flags:
            text += f',"flags":{json.dumps(self.flags)}'
        return text if self.rss_bytes is None else f'{text},"rss_bytes":{self.rss_bytes}'


def _totals(stretch: Stretch, quoted: _Quoted) -> str:
    return f"{{{','.join([f'{quoted[name]}:[{t.ns},{t.calls}]' for name, t in stretch.totals.items()])}}}"


def _joined(first: Stretch, second: Stretch) -> Stretch:
    totals = {name: Total(total.ns, total.calls) for name, total in first.totals.items()}
    for name, more in second.totals.items():
        total = totals.setdefault(name, Total())
        total.ns, total.calls = total.ns + more.ns, total.calls + more.calls
    return Stretch(first.begin_ns, totals=totals)
