"""Changes as lags of a calibrated replay: the fastest outcome that they allow, and the slowest.

The two differ where one trace cannot know. How much of a collective is transfer, and how much a wait for ranks that
are not here, is not told by one rank: between none and all of it changes. When a batch was ready that the loop never
waited for is not told either: between long before and just then.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.calibrated import NEVER, NONE, Calibrated
from chakra_capture.analysis.replay.inputs import FROM_WORKERS
from chakra_capture.analysis.replay.replay import RankReplay
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS, Rows
from chakra_capture.analysis.what_if.changes import ChangeError, Changes, Scale, Switch
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.columns import Int64

Mask = npt.NDArray[np.bool_]
# What one launch could do, if it and those beside it were one.
_SHORT_NS = 20 * US


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Lags of all edges, if all that is not known turns out well, or badly."""

    fast: Int64
    slow: Int64


class Variants:
    """Lags of variants of one replay; what of it does not change is found once."""

    def __init__(self, model: Calibrated) -> None:
        self.model = model
        self._ranks = [*model.replay.ranks.items()]

    def lags(self, changes: Changes) -> Outcomes:
        """Make changes.

        Raises:
            ChangeError: nothing in the trace is what should change.
        """
        fast, slow = self.model.lag.copy(), self.model.lag.copy()
        fast[self._perhaps_ready] = NEVER
        for scale in changes.scales:
            self._scale(scale, fast, slow)
        for switch in sorted(changes.switches, key=lambda switch: switch.value):
            if switch is Switch.NO_INPUT_WAIT:
                self._no_input_wait(fast, slow)
            elif switch is Switch.NO_WAITING:
                self._no_waiting(fast, slow)
            elif switch is Switch.OVERLAP_COMM:
                fast[self._from_comm] = slow[self._from_comm] = NEVER
            else:
                fast[self._fused] = slow[self._fused] = 0
        if changes.balanced:
            self._no_waiting(fast, slow)
        self._without(changes.gone, fast, slow)
        return Outcomes(fast, slow)

    def _scale(self, scale: Scale, fast: Int64, slow: Int64) -> None:
        chosen = self._chosen(scale)
        if not chosen.any():
            raise ChangeError(f"Nothing in the trace is {_said(scale)}. See names with: chakra-capture summary.")
        unsure = chosen & self._unmet
        for lag, factor_if_unsure in ((fast, min(scale.factor, 1.0)), (slow, max(scale.factor, 1.0))):
            _multiply(lag, chosen & ~unsure, scale.factor)
            _multiply(lag, unsure, factor_if_unsure)

    def _chosen(self, scale: Scale) -> Mask:
        """Edges whose lag is the time of what is scaled."""
        model = self.model
        runs = model.is_kind("run") | self._transfers
        on_cpu = model.is_kind("thread") & (model.rank != NONE)
        if scale.what == "cpu" and scale.name is None:
            found = on_cpu
        elif scale.what in ("cpu", "op", "self"):
            found = self._of_rows([_named(one, scale) for _, one in self._ranks]) & (
                on_cpu if scale.what in ("cpu", "self") else on_cpu | runs
            )
        else:
            found = runs & self._of_rows([_on_device(one, scale) for _, one in self._ranks])
        if scale.rank is not None:
            if scale.rank not in model.ranks:
                raise ChangeError(f"There is no rank {scale.rank} with times. Name one of {model.ranks}.")
            found = found & (model.rank == model.ranks.index(scale.rank))
        return np.asarray(found, dtype=bool)

    def _of_rows(self, masks: list[Mask]) -> Mask:
        """Edges on rows that are marked, by rank."""
        model, found = self.model, np.zeros(len(self.model.src), dtype=bool)
        for number, mask in enumerate(masks):
            mine = (model.rank == number) & (model.row != NONE)
            found[mine] = mask[model.row[mine]]
        return found

    @cached_property
    def _transfers(self) -> Mask:
        found = np.zeros(len(self.model.src), dtype=bool)
        found[[met.transfer for met in self.model.replay.met]] = True
        return found

    @cached_property
    def _unmet(self) -> Mask:
        """Collectives of which other ranks' parts are not known: how much of them is a wait, neither."""
        collective = self._of_rows([_is_collective(one) for _, one in self._ranks]) & self.model.is_kind("run")
        collective[[met.own for met in self.model.replay.met]] = False
        return collective

    @cached_property
    def _perhaps_ready(self) -> Int64:
        return np.array([edge for _, one in self._ranks for edge in one.inputs.perhaps], dtype=np.int64)

    @cached_property
    def _from_comm(self) -> Mask:
        """Edges by which computing, or the loop's thread, waits for a collective."""
        model = self.model
        ends = np.zeros(len(model.times), dtype=bool)
        computes = np.zeros(len(model.times), dtype=bool)
        for _, one in self._ranks:
            is_collective = _is_collective(one)
            ends[[point for row, point in one.activities.ends.items() if is_collective[row]]] = True
            ends[[*one.gloo.ends.values()]] = True
            computes[[point for row, point in one.activities.starts.items() if not is_collective[row]]] = True
            for thread in one.threads.of_track.values():
                computes[thread.points] = bool(one.gloo.ends)
        # A call that waits for the device waits for all on it, overlapped or not.
        return ends[model.src] & computes[model.dst] & model.is_kind("event_wait", "contention", "sync")

    @cached_property
    def _fused(self) -> Mask:
        """Launch calls and gaps of short kernels that follow others."""
        model = self.model
        calls = self._of_rows([_fused_calls(one) for _, one in self._ranks]) & model.is_kind("thread")
        gaps = self._of_rows([_fused_kernels(one) for _, one in self._ranks]) & model.is_kind("stream_order")
        return (calls | gaps) & (model.lag > 0)

    def _no_input_wait(self, fast: Int64, slow: Int64) -> None:
        model = self.model
        for edges in ([*one.inputs.ready, *one.inputs.perhaps] for _, one in self._ranks):
            fast[edges] = slow[edges] = NEVER
        on_cpu = model.is_kind("thread")
        waits = self._of_rows([_in_phase(one, INPUT_WAIT) for _, one in self._ranks]) & on_cpu
        from_workers = self._of_rows([_under(one.rows, re.compile(re.escape(FROM_WORKERS))) for _, one in self._ranks])
        if not waits.any():
            raise ChangeError("Nothing in the trace waits for input, so that wait cannot be removed. See its phases.")
        fast[waits] = 0
        # What a fetch costs that does not wait is left.
        slow[waits & ~from_workers] = 0

    def _no_waiting(self, fast: Int64, slow: Int64) -> None:
        """Every rank goes on when its own part of a collective is over."""
        for lag in (fast, slow):
            for met in self.model.replay.met:
                lag[met.own] = lag[met.transfer]
                lag[met.transfer] = NEVER

    def _without(self, gone: frozenset[int], fast: Int64, slow: Int64) -> None:
        met = [one for one in self.model.replay.met if one.rank in gone]
        if missing := sorted(gone - set(self.model.ranks)):
            raise ChangeError(f"There is no rank {missing[0]} with times. Name one of {self.model.ranks}.")
        arrivals = [one.arrives for one in met]
        fast[arrivals] = slow[arrivals] = NEVER


def _multiply(lag: Int64, chosen: Mask, factor: float) -> None:
    # A negative lag is a clock's, or that of a call: it is no time that something took.
    chosen = chosen & (lag > 0)
    lag[chosen] = np.rint(lag[chosen] * factor).astype(np.int64)


def _said(scale: Scale) -> str:
    name = "" if scale.name is None else f"~{scale.name.pattern}"
    return f"{scale.what}{name}{'' if scale.rank is None else f'@{scale.rank}'}"


def _is_collective(one: RankReplay) -> Mask:
    rows = one.rows
    of_device = zip(rows.kind, rows.is_collective, strict=True)
    found = np.array([kind in ACTIVITY_KINDS and is_collective for kind, is_collective in of_device], dtype=bool)
    found[[*one.gloo.starts]] = True
    return found


def _on_device(one: RankReplay, scale: Scale) -> Mask:
    rows, is_collective = one.rows, _is_collective(one)
    kind = np.array(rows.kind)
    if scale.what == "comm":
        found = is_collective
    elif scale.what == "kernel":
        found = (kind == "kernel") & ~is_collective
    elif scale.what == "memory":
        found = np.isin(kind, ["memcpy", "memset"])
    else:
        found = np.isin(kind, [*ACTIVITY_KINDS])
    return np.asarray(found if scale.name is None else found & _matches(rows, scale.name), dtype=bool)


def _named(one: RankReplay, scale: Scale) -> Mask:
    assert scale.name is not None
    return _matches(one.rows, scale.name) if scale.what == "self" else _under(one.rows, scale.name)


def _matches(rows: Rows, name: re.Pattern[str]) -> Mask:
    of_name = {text: name.search(text) is not None for text in set(rows.name)}
    return np.array([of_name[text] for text in rows.name], dtype=bool)


def _under(rows: Rows, name: re.Pattern[str]) -> Mask:
    """Rows of a name, all that they call, and what that launches."""
    found = _matches(rows, name)
    above = np.array(rows.parent, dtype=np.int64)
    launch = np.array(rows.launch, dtype=np.int64)
    above = np.where(launch >= 0, launch, above)
    while True:
        more = found | ((above >= 0) & found[above])
        # Twice as far up each time.
        above = np.where(above >= 0, above[above], NONE)
        if not (above >= 0).any():
            return more
        found = more


def _in_phase(one: RankReplay, phase: str) -> Mask:
    return np.array([of_row == phase for of_row in one.rows.phase], dtype=bool)


def _fused_kernels(one: RankReplay) -> Mask:
    """Short kernels that directly follow another short one of their phase on their stream."""
    rows, found = one.rows, np.zeros(len(one.rows), dtype=bool)
    waits = {row for row, sources in one.waits.events.items() if sources} | one.waits.drains.keys()
    for row, before in one.activities.before.items():
        alike = all(_is_short(rows, other) for other in (row, before)) and rows.phase[row] == rows.phase[before]
        found[row] = alike and row not in waits and rows.launch[row] >= 0
    return found


def _is_short(rows: Rows, row: int) -> bool:
    start, end = rows.start[row], rows.end[row]
    assert start is not None
    assert end is not None
    return rows.kind[row] == "kernel" and not rows.is_collective[row] and end - start < _SHORT_NS


def _fused_calls(one: RankReplay) -> Mask:
    found = np.zeros(len(one.rows), dtype=bool)
    found[list(_launches(one))] = True
    return found


def _launches(one: RankReplay) -> Iterator[int]:
    """Launch calls of fused kernels, with the calls within them; not one that launches anything else."""
    rows, fused = one.rows, _fused_kernels(one)
    kept = {rows.launch[row] for row in one.activities.rows if not fused[row]}
    calls = {rows.launch[row] for row in one.activities.rows if fused[row]} - kept
    yield from calls
    for row, parent in enumerate(rows.parent):
        if parent in calls and rows.kind[row] == "runtime":
            yield row
