"""Whether the numbers can be trusted: what was recorded, what was linked, what that says of which section."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import polars as pl

from chakra_capture.analysis.idle import MOST_UNEXPLAINED, unexplained_share
from chakra_capture.report.facts import Facts
from chakra_capture.report.words import count, ranges, share, span

_FEW_LINKED = 0.99


class Word(StrEnum):
    """How far to trust the page."""

    GOOD = "good"
    LIMITED = "limited"
    POOR = "poor"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its result, what that means, and the anchors of the sections that it limits."""

    name: str
    result: str
    effect: str = ""
    word: Word = Word.GOOD
    sections: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quality:
    """All checks; the worst of them is the word."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def word(self) -> Word:
        order = [Word.GOOD, Word.LIMITED, Word.POOR]
        return max((check.word for check in self.checks), key=order.index, default=Word.GOOD)

    @property
    def limits(self) -> tuple[Check, ...]:
        """What limits the page."""
        return tuple(check for check in self.checks if check.word != Word.GOOD)


def judge(facts: Facts, *, show_hosts: bool = False) -> Quality:
    """Check a run; what its ranks said themselves is told without the names of their machines."""
    windows = [window for mine in facts.links.values() for window in mine]
    checks = [*_recorded(facts), *_linked(facts, windows), *_repaired(facts, windows), *_times(facts)]
    notes = [*facts.notes]
    for rank in facts.ranks:
        notes += [f"rank {rank.rank}: {note}" for note in rank.notes]
    for number, summary in facts.phases.items():
        notes += [f"rank {number}: {note}" for note in summary.notes]
    if not show_hosts:
        checks = [replace(check, result=_without_hosts(check.result, facts)) for check in checks]
        notes = [_without_hosts(note, facts) for note in notes]
    return Quality(tuple(checks), tuple(dict.fromkeys(notes)))


def _without_hosts(text: str, facts: Facts) -> str:
    for name in {head.hostname for head in facts.manifests.values() if head.hostname}:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(host)", text)
    return text


def _recorded(facts: Facts) -> Iterator[Check]:
    known = sorted({rank.rank for rank in facts.ranks} or set(facts.phases))
    of = "" if facts.world_size is None else f" of {facts.world_size}"
    missing = facts.world_size is not None and len(known) < facts.world_size
    yield Check(
        "ranks", f"{len(known)}{of} (rank {ranges(known)})",
        "who waits for whom is known only among these" if missing else "",
    )  # fmt: skip
    if facts.steps.height:
        whole, partial = facts.whole_steps.height, int(facts.steps["partial"].fill_null(value=False).sum())
        untimed = facts.steps["dur_ns"].null_count()
        if not whole and not facts.steps["dur_ns"].count():
            has_phases = bool(facts.phases)
            yield Check("step times", "none: nothing that was recorded has a time", "no statement on time",
                        Word.LIMITED if has_phases else Word.POOR)  # fmt: skip
        elif partial or (untimed and facts.steps["step"].count()):
            word = Word.LIMITED if whole else Word.POOR
            yield Check("steps complete", f"{whole} whole, {partial or untimed} cut short",
                        "the cut ones are in no mean", word)  # fmt: skip
        elif whole:
            yield Check("steps complete", f"{whole} of {whole}")
        else:
            yield Check("steps complete", "no step is marked", "the whole window is shown instead")
    if facts.phases:
        counted, all_of = (sum(getattr(s, key) for s in facts.phases.values()) for key in ("num_steps", "num_recorded"))
        yield Check("steps timed by phase", f"{count(counted)} of {count(all_of)} count",
                    "the others are the first of a training, profiled or cut short" if counted < all_of else "",
                    )  # fmt: skip
    for rank, head in facts.manifests.items():
        if head.complete is False:
            yield Check(f"recording of rank {rank}", f"incomplete: {head.detail or head.reason}", "", Word.LIMITED)


def _linked(facts: Facts, windows: list[dict[str, Any]]) -> Iterator[Check]:
    ops, linked = _sum(facts, "host_ops"), _sum(facts, "host_linked")
    if ops:
        few = (linked or 0) < _FEW_LINKED * ops
        yield Check("host operators found in the device trace", f"{count(linked)} of {count(ops)}",
                    "shapes and identities of the others are not known" if few else "",
                    Word.LIMITED if few else Word.GOOD, ("names",))  # fmt: skip
    activities, launched = _sum(facts, "activities"), _sum(facts, "launched")
    if activities:
        few = (launched or 0) < _FEW_LINKED * activities
        yield Check("GPU activities with their launch call", f"{count(launched)} of {count(activities)}",
                    "what launched the others is not known" if few else "",
                    Word.LIMITED if few else Word.GOOD, ("gpu", "path", "what-if"))  # fmt: skip
    early = sum(window["device"]["orphans"]["launch_not_in_file"] for window in windows if window["device"])
    if activities:
        yield Check("activities launched outside the recording", count(early))
    if any(window["device"] and window["device"]["tail_lost"] for window in windows):
        yield Check("end of the device trace", "lost", "GPU times are not measured", Word.LIMITED,
                    ("step", "gpu"))  # fmt: skip
    backward: dict[str, int] = {}
    for window in windows:
        for kind, number in window["edges_backward_left_out"].items():
            backward[kind] = backward.get(kind, 0) + number
    if total := sum(backward.values()):
        yield Check("dependencies against the order of time", count(total), "left out of the critical path")


def _repaired(facts: Facts, windows: list[dict[str, Any]]) -> Iterator[Check]:
    if salvaged := [rank.rank for rank in facts.ranks if rank.salvaged]:
        yield Check(
            "files",
            f"cut or repaired on rank {ranges(salvaged)}",
            "what was lost is in no table",
            Word.LIMITED,
            ("step", "steps", "gpu", "names", "communication", "path", "what-if"),
        )
    forced = any(window["pairing"] and window["pairing"]["forced"] for window in windows)
    if forced:
        yield Check(
            "host and device trace",
            "of different runs, merged by force",
            "shapes and identities of operators are those of the other run",
            Word.LIMITED,
            ("names",),
        )
    repaired = sum(window["repairs"]["rows_repaired"] for window in windows)
    clipped = sum(sum(window["repairs"].values()) for window in windows) - repaired
    if windows:
        yield Check("repairs", f"{count(repaired)} times mended, {count(clipped)} clipped to what is around or next")


def _times(facts: Facts) -> Iterator[Check]:
    doubts = [spread for spread in facts.clocks.values() if spread]
    if len(facts.ranks) > 1:
        known = f"compared, known to {span(max(doubts))}" if doubts else "those of one machine, or not compared"
        yield Check("clocks of the ranks", known)
    told = [s for s in facts.phases.values() if s.profiled_median_ns is not None and s.step_median_ns]
    if told:
        first = told[0]
        more = (first.profiled_median_ns or 0) / (first.step_median_ns or 1)
        yield Check(
            "cost of recording",
            f"{span(first.profiled_median_ns)} instead of {span(first.step_median_ns)} a step ({more:.2f} x, medians)",
            "profiled steps are slower by that, most of it on the CPU",
        )
    elif facts.steps.height:
        yield Check("cost of recording", "not known: phases were not timed outside the window",
                    "times of small operators on the CPU are too long by an unknown part")  # fmt: skip
    unexplained = unexplained_share(facts.idle)
    if unexplained is not None:
        bad = unexplained > MOST_UNEXPLAINED
        yield Check("idle time without a recorded reason", share(unexplained),
                    "draw no conclusion from its causes" if bad else "",
                    Word.LIMITED if bad else Word.GOOD, ("gpu",))  # fmt: skip
    path = facts.replayed.path
    if path is not None and path.height:
        whole = path.filter(pl.col("step").is_null())
        part = int(whole.filter(pl.col("category") == "unexplained")["total_ns"].sum()) / max(
            1, int(whole["total_ns"].sum())
        )
        bad = part > MOST_UNEXPLAINED
        yield Check("critical path without a recorded reason", share(part),
                    "trust neither it nor the predictions" if bad else "",
                    Word.LIMITED if bad else Word.GOOD, ("path", "what-if"))  # fmt: skip


def _sum(facts: Facts, field: str) -> int | None:
    values = [getattr(rank, field) for rank in facts.ranks if getattr(rank, field) is not None]
    return sum(values) if values else None
