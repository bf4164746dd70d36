"""Do the ranks of a run belong together? Asked of manifests and heads of files, before anything is merged."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from chakra_capture.trace.discovery import ManifestHead, RankFiles, Run
from chakra_capture.trace.head import LARGEST_RANK, DeviceHead, HostHead, device_head, host_head

# A window's clocks are read on the machine that wrote the trace: the monotonic one cannot be set, the other can.
_SLACK_MS = 10_000
_SLACK_NS = 3_600_000_000_000

_Stated = TypeVar("_Stated", str, int)
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A device trace that states another rank than its name."""

    file: str
    name_rank: int
    content_rank: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Which ranks a run has, and which files are not of it.

    Attributes:
        world_size: as most ranks state it; None where nothing does.
        missing: first and last of each row of ranks that should have recorded and have no trace.
        missing_by_content: the same, if a trace counted for the rank that it states instead of its name's.
        conflicts: traces that state another rank than their name.
        faults: why a rank is not of this run.
        machines: of each rank that states one.
    """

    world_size: int | None = None
    missing: Ranges = ()
    missing_by_content: Ranges = ()
    conflicts: tuple[Conflict, ...] = ()
    faults: dict[int, str] = field(default_factory=dict)
    machines: dict[int, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What manifest and traces of one rank state."""

    files: RankFiles
    manifest: ManifestHead | None
    hosts: list[HostHead | None]
    devices: list[DeviceHead | None]

    @property
    def number(self) -> int:
        return self.files.rank

    @property
    def run_id(self) -> str | None:
        return self.manifest.run_id if self.manifest else None

    @property
    def world_size(self) -> int | None:
        """None where nothing states one that this rank could be in."""
        stated = [self.manifest] if self.manifest else [head for head in self.devices if head]
        sizes = [head.world_size for head in stated if head.world_size is not None]
        ranks = [head.rank for head in stated if head.rank is not None]
        is_sound = sizes and max(ranks, default=0) < sizes[0] <= LARGEST_RANK
        return sizes[0] if is_sound else None

    @property
    def stated_rank(self) -> int | None:
        return next((head.rank for head in self.devices if head and head.rank is not None), None)

    @property
    def is_vouched_for(self) -> bool:
        """Its trace states its own rank, or its manifest the process of its traces."""
        if self.stated_rank is not None:
            return self.stated_rank == self.number
        pids = {head.pid for head in self.hosts if head} | {pid for head in self.devices if head for pid in head.pids}
        knows = self.manifest is not None and self.manifest.pid in pids
        return knows and not any(_against_manifest(self))

    def devices_may_be_those_of(self, other: "_Rank") -> bool:
        """Not where both have device traces and these differ: then pairing tells whose the host traces are."""
        own, others = set(self.digests(self.devices)), set(other.digests(other.devices))
        return not own or not others or bool(own & others)

    def digests(self, side: list[HostHead | None] | list[DeviceHead | None]) -> tuple[bytes, ...]:
        return tuple(head.digest for head in side if head and head.digest)


def check_ranks(run: Run) -> Roster:
    """Hold the ranks of ``run`` against each other; reads manifests and the first bytes of every trace."""
    manifests = run.manifests
    ranks = [_look(files, manifests.get(files.rank)) for files in run.ranks]
    conflicts = tuple(conflict for rank in ranks for conflict in _conflicts(rank))
    faults: dict[int, str] = {}
    for number, fault in (
        *_of_other_runs(ranks, run.owner),
        *((c.name_rank, _other_rank(c, ranks)) for c in conflicts),
        *_copies(ranks),
        *((rank.number, fault) for rank in ranks for fault in _against_manifest(rank)),
    ):
        faults.setdefault(number, fault)  # what follows is often of the same cause
    sound = [rank for rank in ranks if rank.number not in faults]
    sizes = Counter(rank.world_size for rank in sound if rank.world_size is not None)
    size, is_shared = _most_common(sizes)
    for rank in sound:
        stated = rank.world_size
        if stated is not None and (is_shared or stated != size):
            others = " and ".join(str(other) for other in sorted(sizes) if other != stated)
            faults[rank.number] = f"of another run: it states world size {stated}, other ranks {others}"
        elif size is not None and not is_shared and rank.number >= size:
            faults[rank.number] = f"not of this run: it is rank {rank.number} of a world size of {size}"
    world_size = None if is_shared else size
    present, by_content = (
        {r.number for r in ranks},
        {rank.number if rank.stated_rank is None else rank.stated_rank for rank in ranks},
    )
    expected = _expected(manifests.values(), world_size)
    return Roster(
        world_size=world_size,
        missing=_gaps(present, expected, world_size),
        missing_by_content=_gaps(by_content, expected, world_size),
        conflicts=conflicts,
        faults=dict(sorted(faults.items())),
        machines={rank: head.hostname for rank, head in manifests.items() if head.hostname},
    )


def _look(files: RankFiles, manifest: ManifestHead | None) -> _Rank:
    hosts = [host_head(window.host) if window.host else None for window in files.windows]
    devices = [device_head(window.device) if window.device else None for window in files.windows]
    return _Rank(files, manifest, hosts, devices)


def _conflicts(rank: _Rank) -> Iterator[Conflict]:
    for window, head in zip(rank.files.windows, rank.devices, strict=True):
        if head and window.device and head.rank not in (None, rank.number):
            yield Conflict(window.device.name, rank.number, head.rank or 0)


def _other_rank(conflict: Conflict, ranks: list[_Rank]) -> str:
    fault = f"different rank: rank {conflict.name_rank} expected, device trace of rank {conflict.content_rank}"
    by_number = {rank.number: rank for rank in ranks}
    original, copy = by_number.get(conflict.content_rank), by_number[conflict.name_rank]
    if original and set(original.digests(original.devices)) & set(copy.digests(copy.devices)):
        fault += ", of which it is a copy"
    return fault


def _of_other_runs(ranks: list[_Rank], owner: str | None) -> Iterator[tuple[int, str]]:
    """Ranks whose manifest states another run than the one the folders belong to."""
    ids = Counter(rank.run_id for rank in ranks if rank.run_id is not None)
    run_id, is_shared = (owner, False) if owner in ids else _most_common(ids)
    for rank in ranks:
        if rank.run_id is None or (rank.run_id == run_id and not is_shared):
            continue
        others = " and ".join(sorted(ids.keys() - {rank.run_id})[:3])
        yield rank.number, f"of another run: its manifest states run {rank.run_id}, those of other ranks {others}"


def _copies(ranks: list[_Rank]) -> Iterator[tuple[int, str]]:
    """Ranks with the recording of another one. Whose it is, its stated rank or a manifest that fits it says."""
    same: dict[bytes, list[_Rank]] = {}
    for rank in ranks:
        for digest in (*rank.digests(rank.devices), *rank.digests(rank.hosts)):
            same.setdefault(digest, []).append(rank)
    seen: set[int] = set()
    for copies in same.values():
        owners = [rank.number for rank in copies if rank.is_vouched_for]
        for rank in copies:
            others = sorted({other.number for other in copies if other.devices_may_be_those_of(rank)} - {rank.number})
            # One that states another rank is refused for that.
            if not others or rank.is_vouched_for or rank.stated_rank is not None or rank.number in seen:
                continue
            seen.add(rank.number)
            whose = (
                f"rank {_listed(owners)}'s" if owners else f"that of rank {_listed(others)}; nothing says whose it is"
            )
            yield rank.number, f"different rank: its recording is {whose}"


def _against_manifest(rank: _Rank) -> Iterator[str]:
    """How the traces of a rank differ from what its manifest says was recorded."""
    manifest = rank.manifest
    if manifest is None:
        return
    if manifest.rank not in (None, rank.number):
        yield f"different rank: its manifest is that of rank {manifest.rank}"
    pids = {pid for head in rank.devices if head for pid in head.pids}
    pids_of_hosts = {head.pid for head in rank.hosts if head and head.pid is not None}
    for found, what in ((pids_of_hosts, "host"), (pids, "device")):
        if manifest.pid is not None and found and manifest.pid not in found:
            stated = _listed(sorted(found))
            yield f"of another run: its manifest states pid {manifest.pid}, its {what} trace pid {stated}"
    known = {window.cycle: window for window in manifest.windows}
    for number, files in enumerate(rank.files.windows):
        window, host, device = known.get(files.cycle), rank.hosts[number], rank.devices[number]
        if window is None or window.started is None or window.ended is None or manifest.opened is None:
            continue
        # A host trace begins with the warm-up, which may be long before its window.
        begin, end = manifest.opened.monotonic_ns // 10**6, window.ended.monotonic_ns // 10**6
        if host and host.start_ms is not None and not begin - _SLACK_MS <= host.start_ms <= end + _SLACK_MS:
            yield "of another run: its host trace was not recorded when its manifest says"
        begin, end = window.started.unix_ns, window.ended.unix_ns
        if device and device.begin_ns is not None and not begin - _SLACK_NS <= device.begin_ns <= end + _SLACK_NS:
            yield "of another run: its device trace was not recorded when its manifest says"


def _most_common(counts: Counter[_Stated]) -> tuple[_Stated | None, bool]:
    """What most ranks state, and whether something else is stated as often."""
    first = counts.most_common(2)
    if not first:
        return None, False
    return first[0][0], len(first) > 1 and first[0][1] == first[1][1]


def _expected(manifests: Iterable[ManifestHead], world_size: int | None) -> list[int] | None:
    """Ranks that were asked to record; None for all."""
    for manifest in manifests:
        if manifest.settings.ranks is not None and world_size is not None:
            return sorted({rank for rank in manifest.settings.ranks if 0 <= rank < world_size})
    return None


def _gaps(present: set[int], expected: list[int] | None, world_size: int | None) -> Ranges:
    """Ranges, because a world size is only a number in a file and may be any."""
    if world_size is None:
        return ()
    if expected is not None:
        return tuple((rank, rank) for rank in expected if rank not in present)
    found, first = [], 0
    for rank in [*sorted(rank for rank in present if rank < world_size), world_size]:
        if rank > first:
            found.append((first, rank - 1))
        first = rank + 1
    return tuple(found)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" ..." if len(numbers) > 5 else "")
