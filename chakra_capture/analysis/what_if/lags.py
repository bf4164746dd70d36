"""Changes as lags of a calibrated replay: the fastest outcome that they allow, and the slowest.

The two differ where one trace cannot know. How much of a collective is transfer, and how much a wait for ranks that
are not here, is not told by one rank: between none and all of it changes. When a batch was ready that the loop never
waited for is not told either: between long before and just then.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.calibrated import NEVER, NONE, Calibrated
from chakra_capture.analysis.replay.inputs import FROM_WORKERS
from chakra_capture.analysis.replay.replay import RankReplay
from chakra_capture.analysis.what_if.changes import ChangeError, Changes, Scale, Switch
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Bool, Int64

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

    def _chosen(self, scale: Scale) -> Bool:
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

    def _of_rows(self, masks: list[Bool]) -> Bool:
        """Edges on rows that are marked, by rank."""
        model, found = self.model, np.zeros(len(self.model.src), dtype=bool)
        for number, mask in enumerate(masks):
            mine = (model.rank == number) & (model.row != NONE)
            found[mine] = mask[model.row[mine]]
        return found

    @cached_property
    def _transfers(self) -> Bool:
        found = np.zeros(len(self.model.src), dtype=bool)
        found[[met.transfer for met in self.model.replay.met]] = True
        return found

    @cached_property
    def _unmet(self) -> Bool:
        """Collectives of which other ranks' parts are not known: how much of them is a wait, neither."""
        collective = self._of_rows([_is_collective(one) for _, one in self._ranks]) & self.model.is_kind("run")
        collective[[met.own for met in self.model.replay.met]] = False
        return collective

    @cached_property
    def _perhaps_ready(self) -> Int64:
        return np.concatenate([one.inputs.perhaps for _, one in self._ranks])

    @cached_property
    def _from_comm(self) -> Bool:
        """Edges by which computing, or the loop's thread, waits for a collective."""
        model = self.model
        ends = np.zeros(len(model.times), dtype=bool)
        computes = np.zeros(len(model.times), dtype=bool)
        for _, one in self._ranks:
            is_collective = _is_collective(one)[one.activities.rows]
            ends[one.activities.ends[is_collective]] = True
            ends[one.gloo.ends] = True
            computes[one.activities.starts[~is_collective]] = True
            computes[one.threads.points] = len(one.gloo) > 0
        # A call that waits for the device waits for all on it, overlapped or not.
        return ends[model.src] & computes[model.dst] & model.is_kind("event_wait", "contention", "sync")

    @cached_property
    def _fused(self) -> Bool:
        """Launch calls and gaps of short kernels that follow others."""
        model = self.model
        calls = self._of_rows([_fused_calls(one) for _, one in self._ranks]) & model.is_kind("thread")
        gaps = self._of_rows([_fused_kernels(one) for _, one in self._ranks]) & model.is_kind("stream_order")
        return (calls | gaps) & (model.lag > 0)

    def _no_input_wait(self, fast: Int64, slow: Int64) -> None:
        model = self.model
        for edges in (side for _, one in self._ranks for side in (one.inputs.ready, one.inputs.perhaps)):
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


def _multiply(lag: Int64, chosen: Bool, factor: float) -> None:
    # A negative lag is a clock's, or that of a call: it is no time that something took.
    chosen = chosen & (lag > 0)
    lag[chosen] = np.rint(lag[chosen] * factor).astype(np.int64)


def _said(scale: Scale) -> str:
    name = "" if scale.name is None else f"~{scale.name.pattern}"
    return f"{scale.what}{name}{'' if scale.rank is None else f'@{scale.rank}'}"


def _is_collective(one: RankReplay) -> Bool:
    rows = one.rows
    found = rows.is_activity & rows.is_collective
    found[one.gloo.rows] = True
    return found


def _on_device(one: RankReplay, scale: Scale) -> Bool:
    rows, is_collective = one.rows, _is_collective(one)
    if scale.what == "comm":
        found = is_collective
    elif scale.what == "kernel":
        found = rows.is_kind("kernel") & ~is_collective
    elif scale.what == "memory":
        found = rows.is_kind("memcpy", "memset")
    else:
        found = rows.is_activity
    return np.asarray(found if scale.name is None else found & _matches(rows, scale.name), dtype=bool)


def _named(one: RankReplay, scale: Scale) -> Bool:
    assert scale.name is not None
    return _matches(one.rows, scale.name) if scale.what == "self" else _under(one.rows, scale.name)


def _matches(rows: Rows, name: re.Pattern[str]) -> Bool:
    return rows.named(lambda text: name.search(text) is not None)


def _under(rows: Rows, name: re.Pattern[str]) -> Bool:
    """Rows of a name, all that they call, and what that launches."""
    found = _matches(rows, name)
    above = np.where(rows.launch >= 0, rows.launch, rows.parent)
    while True:
        more = found | ((above >= 0) & found[above])
        # Twice as far up each time.
        above = np.where(above >= 0, above[above], NONE)
        if not (above >= 0).any():
            return more
        found = more


def _in_phase(one: RankReplay, phase: str) -> Bool:
    return one.rows.phase.mask((phase,))


def _fused_kernels(one: RankReplay) -> Bool:
    """Short kernels that directly follow another short one of their phase on their stream."""
    rows, found = one.rows, one.activities
    phase = rows.phase.codes[found.rows]
    is_short = rows.is_kind("kernel")[found.rows] & ~rows.is_collective[found.rows]
    is_short &= found.end - found.begin < _SHORT_NS
    alike = found.follows & is_short & np.roll(is_short, 1) & (phase == np.roll(phase, 1))
    alike &= ~one.waits.has_event & (rows.launch[found.rows] >= 0)
    alike[[*one.waits.drains]] = False
    fused = np.zeros(len(rows), dtype=bool)
    fused[found.rows[alike]] = True
    return fused


def _fused_calls(one: RankReplay) -> Bool:
    """Launch calls of fused kernels, with the calls within them; not one that launches anything else."""
    rows, is_fused = one.rows, _fused_kernels(one)[one.activities.rows]
    launch, found = rows.launch[one.activities.rows], np.zeros(len(rows), dtype=bool)
    found[launch[is_fused]] = True
    kept = launch[~is_fused]
    found[kept[kept >= 0]] = False
    return found | (rows.is_kind("runtime") & (rows.parent >= 0) & found[rows.parent])
