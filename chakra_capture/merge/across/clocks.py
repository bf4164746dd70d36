"""How far the clocks of ranks are apart, from the operations that they take part in together.

Hard bounds come from causality: nobody leaves an operation before those it waits for have arrived. Within them the
offset is where the ends agree, since ranks leave a synchronising operation almost together; the drift is stated only
where the ends tell it from none. Where no line fits the bounds the matching or a clock is wrong, and nothing is said.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.merge.across.matching import Matches
from chakra_capture.merge.across.outcome import Clock
from chakra_capture.merge.across.roles import Role, waits_for
from chakra_capture.trace.columns import LARGEST, MISSING, Bool, Int64

Float = npt.NDArray[np.float64]

_LAST_RANK = int(np.iinfo(np.int64).max)
# No clock that works drifts more.
_LARGEST_DRIFT = 500e-6
# Each halves or thirds the doubt about a drift: to below 1 ns in a day.
_HALVINGS = 64
# Ranks leave an operation at one time. Where nothing else tells that they were in one, their ends have to agree within
# this share of the shortest.
AGREEMENT = 0.1
_MOST_REFERENCES = 4
_MOST_BINS = 32
_FEWEST_BINS = 8
# A slope of 8 bins beyond 5 standard errors comes about by chance in 1 of 400 pairs of clocks.
_STANDARD_ERRORS = 5


def to_reference(times: Int64, clocks: Sequence[Clock], clock: Int64) -> Int64:
    """Times on the clocks of their references; ``MISSING`` where those cannot be told.

    Args:
        clock: position in ``clocks`` of each time.
    """
    offset = np.array([MISSING if c.offset_ns is None else c.offset_ns for c in clocks], dtype=np.int64)[clock]
    drift = np.array([(c.drift_ppm or 0.0) * 1e-6 for c in clocks])[clock]
    known = (times != MISSING) & (offset != MISSING)
    moved = np.where(known, times, 0) - np.where(known, offset, 0)
    since = moved - np.array([c.t0_ns for c in clocks], dtype=np.int64)[clock]
    moved -= np.rint(since * (drift / (1 + drift))).astype(np.int64)
    return np.where(known, moved, MISSING)


@dataclass(frozen=True, slots=True)
class _Side:
    """Operations of one rank that clocks can be compared by, in order of operation.

    Attributes:
        certain: the traces say that the ranks are of one process group; not so where they name no members.
    """

    op: Int64
    role: npt.NDArray[np.int8]
    certain: Bool
    arrival: Int64
    end: Int64

    def at(self, rows: Int64) -> "_Side":
        return _Side(self.op[rows], self.role[rows], self.certain[rows], self.arrival[rows], self.end[rows])

    @property
    def shortest(self) -> int:
        return int((self.end - self.arrival).min())

    def on_reference(self, clock: Clock) -> "_Side":
        of_all = np.zeros(len(self.op), dtype=np.int64)
        arrival, end = (to_reference(times, [clock], of_all) for times in (self.arrival, self.end))
        return replace(self, arrival=arrival, end=end)

    @property
    def middle(self) -> int:
        return 0 if not len(self.op) else (int(self.arrival.min()) + int(self.end.max())) // 2

    @property
    def resolution(self) -> int:
        """Times of old traces are whole microseconds."""
        return 1 if (self.arrival % 1000).any() or (self.end % 1000).any() else 1000


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why two clocks cannot be compared; ``contradicts``: no offset fits, not merely too little is known."""

    rank: int
    anchor: int
    what: str
    why: str
    contradicts: bool


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Which ranks can be compared, by what they are matched in."""

    of_rank: Mapping[int, list[int]]
    ranks: Mapping[int, list[int]]
    synchronising: frozenset[int]


def compare_clocks(
    matches: Matches, role: npt.NDArray[np.int8], hosts: Mapping[int, str], excluded: Mapping[int, str]
) -> dict[int, Clock]:
    """Find the clock of every rank that has operations.

    Args:
        matches: the operations of the run.
        role: of every row of theirs.
        hosts: machine of each rank where it is stated; ranks of one machine share a clock.
        excluded: ranks whose times are not to be compared, and why.
    """
    ranks = matches.rows["rank"].unique().sort().to_list()
    sides = _sides(matches, role, ranks)
    lanes = _lanes(matches, role)
    clocks: dict[int, Clock] = {}
    reasons = dict(excluded)
    waiting = set(ranks) - set(excluded)
    num_contradicted = 0
    while waiting and num_contradicted < _MOST_REFERENCES:
        found, failed = _component(min(waiting), waiting, sides=sides, lanes=lanes, hosts=hosts)
        for each in failed.values():
            reasons.setdefault(each.rank, f"{each.what} with rank {each.anchor}{each.why}")
            reasons.setdefault(each.anchor, f"{each.what} with rank {each.rank}{each.why}")
        # A rank that contradicts the reference may still agree with others: then it is the reference that is wrong.
        num_contradicted += any(each.contradicts for each in failed.values())
        if len(found) > 1 or len(ranks) == 1:
            clocks |= found
        waiting -= set(found)
    for rank in ranks:
        if rank not in clocks:
            why = reasons.get(rank, "no operation that is certainly one and the same links it with another rank")
            clocks[rank] = Clock(rank=rank, reference=rank, t0_ns=sides[rank].middle, evidence="none", reason=why)
    return dict(sorted(clocks.items()))


def _sides(matches: Matches, role: npt.NDArray[np.int8], ranks: list[int]) -> dict[int, _Side]:
    rows = matches.rows
    arrival, end = (rows[name].fill_null(MISSING).to_numpy() for name in ("arrival", "end"))
    rank, op = rows["rank"].to_numpy(), matches.op
    several = matches.num_found > 1
    usable = np.flatnonzero((~matches.doubtful & several)[op] & (role > Role.LOOSE) & (arrival != MISSING))
    usable = usable[np.argsort(rank[usable], kind="stable")]
    bounds = np.searchsorted(rank[usable], np.array([*ranks, _LAST_RANK]))
    whole = _Side(op, role, matches.is_certain[op], arrival, end)
    return {r: whole.at(usable[bounds[at] : bounds[at + 1]]) for at, r in enumerate(ranks)}


def _lanes(matches: Matches, role: npt.NDArray[np.int8]) -> _Lanes:
    """Only lanes with operations that more than one rank has and that are certain."""
    usable = (~matches.doubtful & (matches.num_found > 1))[matches.op] & (role > Role.LOOSE)
    rows = matches.rows.select("lane", "rank").with_columns(all=pl.Series(role == Role.ALL))
    counts = rows.filter(pl.Series(usable)).group_by("lane", "rank").agg(pl.col("all").sum()).sort("lane", "rank")
    of_rank, ranks = defaultdict(list), defaultdict(list)
    synchronising = set()
    # The lane with most operations first: it makes the better comparison.
    for lane, rank, num_all in counts.sort("all", "lane", "rank", descending=[True, False, False]).iter_rows():
        of_rank[rank].append(lane)
        ranks[lane].append(rank)
        if num_all:
            synchronising.add(lane)
    return _Lanes(of_rank, {lane: sorted(found) for lane, found in ranks.items()}, frozenset(synchronising))


def _component(
    reference: int, waiting: set[int], *, sides: Mapping[int, _Side], lanes: _Lanes, hosts: Mapping[int, str]
) -> tuple[dict[int, Clock], dict[int, _Failure]]:
    """Clocks of the ranks that operations link with the reference, and why some of them have none."""
    t0 = sides[reference].middle
    found = {reference: Clock(rank=reference, reference=reference, t0_ns=t0, offset_ns=0, evidence="reference")}
    failed: dict[int, _Failure] = {}
    left = waiting - {reference}
    # Operations in which all wait for all bound a clock on both sides; the others are asked where these do not reach.
    for only_synchronising in (True, False):
        queue = deque(found)
        while queue and left:
            anchor = queue.popleft()
            aligned = sides[anchor].on_reference(found[anchor])
            of_anchor = [n for n in lanes.of_rank.get(anchor, ()) if not only_synchronising or n in lanes.synchronising]
            for rank in dict.fromkeys(r for lane in of_anchor for r in lanes.ranks[lane] if r in left):
                same = rank in hosts and hosts[rank] == hosts.get(anchor)
                clock = _against(rank, found[anchor], sides[rank], aligned, same_machine=same)
                if isinstance(clock, _Failure):
                    failed[rank] = clock
                    if clock.contradicts:
                        left.remove(rank)
                else:
                    failed.pop(rank, None)
                    found[rank] = clock
                    left.remove(rank)
                    queue.append(rank)
    return found, failed


def _against(rank: int, anchor: Clock, mine: _Side, theirs: _Side, *, same_machine: bool) -> Clock | _Failure:
    """The clock of a rank, from its operations in common with one whose times are on the reference clock."""
    _, at, there = np.intersect1d(mine.op, theirs.op, assume_unique=True, return_indices=True)
    slack = mine.resolution + theirs.resolution
    mine, theirs = mine.at(at), theirs.at(there)
    is_all = (mine.role == Role.ALL) & (theirs.role == Role.ALL)
    if (is_all & mine.certain).any() and not mine.certain.all():
        of_one_group = np.flatnonzero(mine.certain)
        mine, theirs, is_all = mine.at(of_one_group), theirs.at(of_one_group), is_all[of_one_group]
    after, before = waits_for(mine.role, theirs.role), waits_for(theirs.role, mine.role)
    is_bounded = after.any() and before.any()
    if not is_bounded and not (same_machine and len(mine.op)):
        why = " do not bound how far apart the clocks are" if len(at) else " are not certain to be the same"
        return _Failure(rank, anchor.rank, "its operations", why, contradicts=False)
    apart = mine.end - theirs.end
    if np.abs(apart).max() > LARGEST // 2:
        return _Failure(rank, anchor.rank, "times of its operations", " are decades apart", contradicts=True)
    # From here on relative to a typical difference: small enough to be exact as floats.
    base = int(np.median(apart))
    x = (theirs.end - anchor.t0_ns).astype(np.float64)
    bounds = _Bounds(
        x_high=x[after],
        high=(mine.end - theirs.arrival - base)[after].astype(np.float64) + slack,
        x_low=x[before],
        low=(mine.arrival - theirs.end - base)[before].astype(np.float64) - slack,
    )
    low, high = bounds.at(0.0)
    ends = None
    fitted: _Line | None
    if same_machine and low <= -base <= high:
        fitted = _Line(-base, 0.0)
    elif not is_bounded:
        why = " bound how far apart the clocks are on one side only, and exclude that they are one"
        return _Failure(rank, anchor.rank, "its operations", why, contradicts=False)
    else:
        same_machine = False
        ends = _typical_ends(mine, theirs, x, base)
        fitted = _within(bounds, _Line((low + high) / 2, 0.0) if ends is None else ends.line())
    if fitted is None:
        what = "no offset and drift of the clock fit its operations"
        why = (
            f" (they miss by {-bounds.widest()[1]:.0f} ns): the clock was set meanwhile, or they are not the same "
            "operations"
        )
        return _Failure(rank, anchor.rank, what, why, contradicts=True)
    if not (mine.certain.all() or same_machine):
        rows = np.flatnonzero(is_all & ~mine.certain)
        off = np.abs((apart - base)[rows] - fitted.offset - fitted.drift * x[rows])
        if not len(rows) or off.max() > AGREEMENT * min(mine.at(rows).shortest, theirs.at(rows).shortest):
            why = " end at times that do not agree, and nothing tells that they are of one process group"
            return _Failure(rank, anchor.rank, "its operations", why, contradicts=False)
    low, high = bounds.at(fitted.drift)
    # The anchor's own doubt comes on top.
    low += 0 if anchor.low_ns is None else anchor.low_ns - (anchor.offset_ns or 0)
    high += 0 if anchor.high_ns is None else anchor.high_ns - (anchor.offset_ns or 0)
    return Clock(
        rank=rank,
        reference=anchor.reference,
        t0_ns=anchor.t0_ns,
        offset_ns=base + round(fitted.offset),
        drift_ppm=fitted.drift * 1e6 or None,
        low_ns=base + math.floor(low) if math.isfinite(low) and anchor.is_bounded else None,
        high_ns=base + math.ceil(high) if math.isfinite(high) and anchor.is_bounded else None,
        spread_ns=None if ends is None else math.ceil(ends.spread(fitted)) + (anchor.spread_ns or 0),
        num_operations=len(mine.op),
        evidence="same machine" if same_machine else "operations",
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """Offset and drift, relative to what the bounds are relative to."""

    offset: float
    drift: float


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What causality leaves: low <= offset + drift x <= high at every x."""

    x_high: Float
    high: Float
    x_low: Float
    low: Float

    def at(self, drift: float) -> tuple[float, float]:
        """Least and greatest offset that this drift allows; crossed where it allows none."""
        low = (self.low - drift * self.x_low).max(initial=-np.inf)
        return float(low), float((self.high - drift * self.x_high).min(initial=np.inf))

    def width(self, drift: float) -> float:
        low, high = self.at(drift)
        return high - low

    def widest(self) -> tuple[float, float]:
        """The drift that leaves most, and how much; the width is concave in the drift."""
        left, right = -_LARGEST_DRIFT, _LARGEST_DRIFT
        for _ in range(_HALVINGS):
            third = (right - left) / 3
            if self.width(left + third) < self.width(right - third):
                left += third
            else:
                right -= third
        drift = (left + right) / 2
        return drift, self.width(drift)


def _within(bounds: _Bounds, wanted: _Line) -> _Line | None:
    """The line nearest to the wanted one that the bounds allow: its drift first, then its offset."""
    drift = wanted.drift
    if bounds.width(drift) < 0:
        allowed, width = bounds.widest()
        if width < 0:
            return None
        for _ in range(_HALVINGS):
            middle = (drift + allowed) / 2
            drift, allowed = (drift, middle) if bounds.width(middle) >= 0 else (middle, allowed)
        drift = allowed
    low, high = bounds.at(drift)
    return _Line(min(max(wanted.offset, low), high), drift)


@dataclass(frozen=True, slots=True)
class _Ends:
    """How far apart the ends are in short operations, all through the recording."""

    x: Float
    apart: Float
    bins: tuple[npt.NDArray[np.intp], ...]

    def line(self) -> _Line:
        """A robust line; its drift is 0 where the scatter may have made it."""
        x, apart = (np.array([np.median(column[rows]) for rows in self.bins]) for column in (self.x, self.apart))
        level = _Line(float(np.median(apart)), 0.0)
        one, other = np.triu_indices(len(x), k=1)
        distant = x[one] != x[other]
        if len(x) < _FEWEST_BINS or not distant.any():
            return level
        one, other = one[distant], other[distant]
        drift = float(np.median((apart[one] - apart[other]) / (x[one] - x[other])))
        offset = float(np.median(apart - drift * x))
        scatter = np.sqrt(((apart - offset - drift * x) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
        least = max(_STANDARD_ERRORS * float(scatter), 1 / float(np.ptp(x)))
        return level if abs(drift) < least else _Line(offset, max(-_LARGEST_DRIFT, min(drift, _LARGEST_DRIFT)))

    def spread(self, line: _Line) -> float:
        rows = np.concatenate(self.bins)
        return float(np.quantile(np.abs(self.apart[rows] - line.offset - line.drift * self.x[rows]), 0.9))


def _typical_ends(mine: _Side, theirs: _Side, x: Float, base: int) -> _Ends | None:
    """The shortest quarter of the synchronising operations in each part of the recording: those end most alike."""
    rows = np.flatnonzero((mine.role == Role.ALL) & (theirs.role == Role.ALL))
    if not len(rows):
        return None
    rows = rows[np.argsort(x[rows], kind="stable")]
    apart = (mine.end - theirs.end - base)[rows].astype(np.float64)
    length = ((mine.end - mine.arrival) + (theirs.end - theirs.arrival))[rows]
    parts = np.array_split(np.arange(len(rows)), min(_MOST_BINS, max(1, len(rows) // 2)))
    bins = [part[np.argsort(length[part], kind="stable")[: -(-len(part) // 4)]] for part in parts]
    return _Ends(x[rows], apart, tuple(bins))
