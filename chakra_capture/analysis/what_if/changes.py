"""Changes of a what-if, as users write them: ``kernel~gemm=0.5``, ``comm=0``, ``op~attention@1=2``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from chakra_capture.errors import ChakraCaptureError

# What can be scaled, and what that is.
SCALABLE = {
    "kernel": "kernels that compute",
    "comm": "collectives: their transfer, not the wait for other ranks",
    "memory": "copies and memsets on a device",
    "device": "everything on devices",
    "op": "an operator with all it calls, on the CPU and on devices",
    "cpu": "CPU time, with everything called from it",
    "self": "CPU time of operators, without what they call",
}
REMOVABLE = ("input_wait", "waiting", "rank")
_SCALE = re.compile(r"(?P<what>\w+)(?:~(?P<name>.+?))?(?:@(?P<rank>\d{1,9}))?", re.DOTALL)
_RANK = re.compile(r"rank[@:=]?(\d{1,9})")


class ChangeError(ChakraCaptureError):
    """A change that cannot be made."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Have all that is of a kind, and whose name holds a pattern, take ``factor`` times as long.

    Attributes:
        what: of ``SCALABLE``.
        name: regular expression, case ignored; None: whatever its name.
        rank: on this rank alone; None: on all.
    """

    what: str
    factor: float
    name: re.Pattern[str] | None = None
    rank: int | None = None


class Switch(Enum):
    """Changes that are no factor."""

    NO_INPUT_WAIT = "input_wait"
    NO_WAITING = "waiting"
    OVERLAP_COMM = "overlap_comm"
    FUSE_SHORT = "fuse_short"


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that are made together.

    Attributes:
        gone: ranks that the others no longer wait for.
        balanced: every rank takes the mean of what the ranks take when none waits for another.
    """

    scales: tuple[Scale, ...] = ()
    switches: frozenset[Switch] = field(default_factory=frozenset)
    gone: frozenset[int] = field(default_factory=frozenset)
    balanced: bool = False


def parse_scale(text: str) -> Scale:
    """Read ``WHAT[~NAME][@RANK]=FACTOR``.

    Raises:
        ChangeError: it is none.
    """
    left, has_factor, right = text.rpartition("=")
    if not has_factor:
        raise ChangeError(f"{text!r} has no factor. Write such as kernel~gemm=0.5 or comm=0.")
    return _scale(left, _factor(text, right))


def _factor(text: str, right: str) -> float:
    try:
        factor = float(right)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= 1000:
        raise ChangeError(f"{right!r} in {text!r} is no factor from 0 to 1000. Write such as kernel~gemm=0.5.")
    return factor


def _scale(left: str, factor: float) -> Scale:
    match = _SCALE.fullmatch(left)
    if match is None or match["what"] not in SCALABLE:
        raise ChangeError(
            f"{left!r} is nothing that can be changed. Take one of {', '.join(SCALABLE)}, with ~NAME for those whose "
            "name matches and @RANK for one rank, as in kernel~gemm=0.5 or op~attention@1=2."
        )
    if match["what"] in ("op", "self") and match["name"] is None:
        raise ChangeError(f"{left!r} needs a name: {match['what']}~NAME. For all CPU time write cpu.")
    rank = None if match["rank"] is None else int(match["rank"])
    return Scale(match["what"], factor, _pattern(match["name"]), rank)


def _pattern(name: str | None) -> re.Pattern[str] | None:
    try:
        return None if name is None else re.compile(name, re.IGNORECASE)
    except re.error as error:
        raise ChangeError(
            f"{name!r} is no regular expression ({error}). Write a part of a name, with \\ before + * ( ) [ ] ?."
        ) from error


def parse_changes(scales: Sequence[str], removals: Sequence[str], *, overlap_comm: bool) -> Changes:
    """Read changes that are made together.

    Raises:
        ChangeError: one is none.
    """
    found, switches, gone = [parse_scale(text) for text in scales], set[Switch](), set[int]()
    for text in removals:
        if rank := _RANK.fullmatch(text):
            gone.add(int(rank[1]))
        elif text in (Switch.NO_INPUT_WAIT.value, Switch.NO_WAITING.value):
            switches.add(Switch(text))
        else:
            found.append(_removed(text))
    if overlap_comm:
        switches.add(Switch.OVERLAP_COMM)
    return Changes(tuple(found), frozenset(switches), frozenset(gone))


def _removed(text: str) -> Scale:
    try:
        return _scale(text, 0.0)
    except ChangeError as error:
        raise ChangeError(
            f"{text!r} is nothing that can be removed: {error} Also input_wait, waiting (of ranks for each other) and "
            "rank0, rank1 and so on can be removed."
        ) from error
