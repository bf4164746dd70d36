"""Which trace files a PATH holds: our own run folders, or folders that NeMo, chakra or torch wrote."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from chakra_capture import layout
from chakra_capture.errors import TraceFileError

_NUMBERED = re.compile(r"(?:(?P<side>host|device)[._-])?(?:rank[-_=]?)?(?P<rank>\d+)\.json(?:\.gz)?")
# torch.profiler.tensorboard_trace_handler: <worker>.<time ns>.pt.trace.json; a worker is <host>_<pid> by default.
_TORCH_NAME = re.compile(r"(?P<worker>.+?)(?:\.(?P<time>\d+))?\.pt\.trace\.json(?:\.gz)?")
# What a manifest gives as the end of a recording that its training did not survive.
_FAILED = ("exception", "SIGTERM")
_LARGEST_MANIFEST = 16 << 20
_Shape = TypeVar("_Shape", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class WindowFiles:
    """The files of one recorded cycle of one rank; at least one side is there.

    Attributes:
        unfinished: a file still has its ``.part`` name: the process ended, or still runs, before it was whole.
        cut_steps: steps that the manifest says were cut short; None without a manifest.
        issued: what torch noted of the collectives, see ``trace.issued``.
    """

    host: Path | None
    device: Path | None
    cycle: int = 0
    unfinished: bool = False
    cut_steps: tuple[int, ...] | None = None
    issued: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.host, self.device) if path is not None)


@dataclass(slots=True)
class RankFiles:
    """What was found for one rank."""

    rank: int
    windows: list[WindowFiles] = field(default_factory=list)
    phases: Path | None = None

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for window in self.windows for path in window.files if path.exists())


@dataclass(frozen=True, slots=True)
class Run:
    """One run on disk: its ranks in order, and where its merged tables belong."""

    paths: layout.RunPaths
    ranks: tuple[RankFiles, ...]
    merged_dir: Path
    other_jobs: tuple[str, ...] = ()
    is_newest: bool = False

    @property
    def merged_ranks(self) -> dict[int, Path]:
        """Folder of each merged rank (complete ones only)."""
        return merged_ranks(self.merged_dir)

    @property
    def manifests(self) -> dict[int, "ManifestHead"]:
        """What each rank's manifest says; ranks without a readable one are left out."""
        folder = self.paths.run_dir
        found = {}
        for child in folder.iterdir() if folder.is_dir() else ():
            match = layout.TRACE_NAME.fullmatch(child.name)
            head = manifest_head(child) if match and not match["part"] else None
            if match and head is not None:
                found[int(match["rank"])] = head
        return dict(sorted(found.items()))

    @property
    def why_failed(self) -> str | None:
        """Why the training ended before its time, as the manifests say; None if none says so."""
        # A training may fail after its windows are complete: then the detail alone says it.
        ends = [(rank, head) for rank, head in self.manifests.items() if head.detail or head.reason in _FAILED]
        return f"rank {ends[0][0]}: {ends[0][1].detail or ends[0][1].reason}" if ends else None

    @property
    def owner(self) -> str | None:
        """Run id that has claimed the folders; None where nothing says."""
        claim = _decoded(self.paths.claim, _Claim)
        return None if claim is None else claim.run_id

    @property
    def phase_files(self) -> dict[int, Path]:
        """Each rank's file of phases; the working one where the process has not finished it."""
        return _phase_files(self.paths.phases_dir)

    @property
    def why_empty(self) -> str:
        """One sentence on a run without traces: why it recorded nothing, and what else is here."""
        reasons = sorted({head.detail or head.reason or "unknown" for head in self.manifests.values()})
        why = f" ({', '.join(reasons)})" if reasons else ""
        others = f" Other runs here: {', '.join(self.other_jobs)}; choose one with --job." if self.other_jobs else ""
        if self.phase_files:
            return (
                f"run {self.paths.job} in {self.paths.trace_dir} recorded phases but no traces{why}, so there is "
                f"nothing to merge. See its phases with chakra-capture summary.{others}"
            )
        return f"run {self.paths.job} in {self.paths.trace_dir} recorded no traces{why}.{others or ' Record it again.'}"


class _Claim(msgspec.Struct):
    run_id: str


class _Moment(msgspec.Struct):
    unix_ns: int
    monotonic_ns: int


class _Settings(msgspec.Struct):
    ranks: list[int] | None = None


class _ManifestWindow(msgspec.Struct):
    cycle: int = 0
    start_step: int | None = None
    end_step: int | None = None
    warmup_steps: int = 0
    active_steps: int = 1
    first_step: int | None = None
    steps: list[int] = msgspec.field(default_factory=list)
    partial_step: int | None = None
    aborted_steps: list[int] = msgspec.field(default_factory=list)
    reason: str | None = None
    started: _Moment | None = None
    ended: _Moment | None = None


class ManifestHead(msgspec.Struct):
    """What of a rank's manifest the offline half reads."""

    run_id: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pid: int | None = None
    hostname: str | None = None
    opened: _Moment | None = None
    settings: _Settings = msgspec.field(default_factory=_Settings)
    complete: bool | None = None
    reason: str | None = None
    detail: str | None = None
    faults: list[str] = msgspec.field(default_factory=list)
    versions: dict[str, str | None] = msgspec.field(default_factory=dict)
    windows: list[_ManifestWindow] = msgspec.field(default_factory=list)


def find_run(path: Path, job: str | None = None) -> Run:
    """Find the run under ``path``: the newest one of a trace_dir, or the one named by ``job``.

    Raises:
        TraceFileError: the path does not exist, or holds nothing that looks like a trace.
    """
    if not path.exists():
        raise TraceFileError(f"{path} does not exist. Give the trace_dir of a run, or a folder with its traces.")
    if not path.is_dir():
        raise TraceFileError(
            f"{path} is a file, but a folder was expected. "
            "Give the trace_dir, or merge single files with --host FILE --device FILE -o OUT."
        )
    inside = layout.RUN_FOLDER_NAME.fullmatch(path.resolve().name)
    # Merged tables may stand alone: their traces were removed.
    if inside and job is None and not _jobs(path) and inside["job"] in _jobs(path.resolve().parent):
        path, job = path.resolve().parent, inside["job"]
    jobs = _jobs(path)
    if jobs:
        return _own_run(path, jobs, job)
    paths = layout.RunPaths(path, job or "0")
    if merged_ranks(path):
        return Run(paths, (), path)
    ranks = _foreign_ranks(path)
    if not ranks:
        raise TraceFileError(
            f"{path} holds no traces: expected <job>_chakra and <job>_kineto folders, host/ and device/, "
            "or *.pt.trace.json files. Give the trace_dir that the run wrote to."
        )
    return Run(paths, tuple(ranks), paths.merged_dir)


def merged_ranks(folder: Path) -> dict[int, Path]:
    """Folders ``rank=<R>`` under ``folder`` whose merge is complete (link.json is written last)."""
    if not folder.is_dir():
        return {}
    found = {
        int(match["rank"]): child
        for child in folder.iterdir()
        if (match := layout.MERGED_RANK_NAME.fullmatch(child.name)) and (child / layout.LINK_FILE).is_file()
    }
    return dict(sorted(found.items()))


def manifest_head(path: Path) -> ManifestHead | None:
    """What a rank's manifest says on top; None without a readable manifest."""
    return _decoded(path, ManifestHead)


def _decoded(path: Path, shape: type[_Shape]) -> _Shape | None:
    """A small file of a run; None without a readable one."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_MANIFEST), type=shape)
    except (OSError, msgspec.DecodeError):
        return None


def _jobs(path: Path) -> dict[str, float]:
    """Jobs with a run folder in ``path``, with the time each was last written."""
    jobs: dict[str, float] = {}
    for child in path.iterdir():
        match = layout.RUN_FOLDER_NAME.fullmatch(child.name)
        if match and match["part"] != layout.MERGED_FOLDER and child.is_dir():
            # A summary is written whenever somebody looks at a run: it makes the run no newer.
            files = [path for path in child.iterdir() if layout.SUMMARY_FILE not in path.name]
            times = map(_written_ns, files or [child])
            jobs[match["job"]] = max(jobs.get(match["job"], 0), *times)
    return jobs


def _written_ns(path: Path) -> int:
    """When a file was last written; 0 of one that is gone: a running job gives its files their final names."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _own_run(path: Path, jobs: dict[str, float], job: str | None) -> Run:
    if job is not None and job not in jobs:
        raise TraceFileError(
            f"{path} has no run of job {job!r}; it has {', '.join(sorted(jobs))}. Give one with --job."
        )
    chosen = job if job is not None else max(jobs, key=lambda name: (jobs[name], name))
    paths = layout.RunPaths(path, chosen)
    others = tuple(sorted(set(jobs) - {chosen}))
    ranks = _pair(paths.host_dir, paths.device_dir)
    phases = _phase_files(paths.phases_dir)
    for entry in ranks:
        entry.phases = phases.get(entry.rank)
        head = manifest_head(paths.manifest(entry.rank))
        if head is not None:
            entry.windows = [_with_cut_steps(files, head) for files in entry.windows]
        entry.windows = [
            _with_issued(files, paths.issued_operations(entry.rank, files.cycle)) for files in entry.windows
        ]
    return Run(paths, tuple(ranks), paths.merged_dir, others, is_newest=job is None)


def _phase_files(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = layout.PHASES_NAME.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(int(match["rank"]), path)
    return dict(sorted(found.items()))


def _with_cut_steps(files: WindowFiles, head: ManifestHead) -> WindowFiles:
    for window in head.windows:
        if window.cycle == files.cycle:
            partial = [] if window.partial_step is None else [window.partial_step]
            return replace(files, cut_steps=tuple(sorted({*partial, *window.aborted_steps})))
    return files


def _with_issued(files: WindowFiles, path: Path) -> WindowFiles:
    return replace(files, issued=path) if path.is_file() else files


def _pair(host_dir: Path, device_dir: Path) -> list[RankFiles]:
    """Pair the files of both folders by rank and cycle; a ``.part`` stands in for a missing file."""
    host, device = _named(host_dir), _named(device_dir)
    ranks: dict[int, RankFiles] = {}
    for rank, cycle in sorted(set(host) | set(device)):
        files = [side.get((rank, cycle)) for side in (host, device)]
        unfinished = any(path is not None and path.name.endswith(layout.PART_SUFFIX) for path in files)
        ranks.setdefault(rank, RankFiles(rank)).windows.append(WindowFiles(files[0], files[1], cycle, unfinished))
    return [ranks[rank] for rank in sorted(ranks)]


def _named(folder: Path) -> dict[tuple[int, int], Path]:
    found: dict[tuple[int, int], Path] = {}
    # Sorted, so that a final name comes before the .part of the same trace.
    for child in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = layout.TRACE_NAME.fullmatch(child.name)
        if match and child.is_file() and not _is_placeholder(child):
            found.setdefault((int(match["rank"]), int(match["cycle"] or 0)), child)
    return found


def _is_placeholder(path: Path) -> bool:
    """Say whether a file was only reserved: nothing has been written to it yet."""
    return path.name.endswith(layout.PART_SUFFIX) and path.stat().st_size <= 1


def _foreign_ranks(path: Path) -> list[RankFiles]:
    if (path / "host").is_dir() or (path / "device").is_dir():
        return _by_number(_files(path / "host"), _files(path / "device"))
    files = _files(path)
    host = [p for p in files if (m := _NUMBERED.fullmatch(p.name)) and m["side"] == "host"]
    device = [p for p in files if (m := _NUMBERED.fullmatch(p.name)) and m["side"] != "host"]
    if host or device:
        return _by_number(host, device)
    traces = [p for p in files if _TORCH_NAME.fullmatch(p.name)]
    return _by_content(traces)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []


def _by_number(host: Iterable[Path], device: Iterable[Path]) -> list[RankFiles]:
    sides = [{int(m["rank"]): p for p in side if (m := _NUMBERED.fullmatch(p.name))} for side in (host, device)]
    ranks = sorted(set(sides[0]) | set(sides[1]))
    return [RankFiles(rank, [WindowFiles(sides[0].get(rank), sides[1].get(rank))]) for rank in ranks]


def _by_content(traces: list[Path]) -> list[RankFiles]:
    """Number torch's own trace files by the rank they state; several of one rank are windows in order of time."""
    ranks: dict[int, RankFiles] = {}
    for rank, path in _stated_ranks(sorted(traces, key=_time_in_name)):
        entry = ranks.setdefault(rank, RankFiles(rank))
        entry.windows.append(WindowFiles(None, path, len(entry.windows)))
    return [ranks[rank] for rank in sorted(ranks)]


def _time_in_name(path: Path) -> tuple[int, str]:
    match = _TORCH_NAME.fullmatch(path.name)
    return (int(match["time"] or 0) if match else 0), path.name


def _stated_ranks(traces: list[Path]) -> Iterator[tuple[int, Path]]:
    from chakra_capture.trace.head import stated_rank

    workers = {match["worker"] for path in traces if (match := _TORCH_NAME.fullmatch(path.name))}
    for path in traces:
        rank = stated_rank(path)
        # The files of one process are its windows, whether or not it had a rank.
        if rank is None and len(workers) > 1:
            raise TraceFileError(
                f"{path} does not state its rank, and the folder holds traces of {len(workers)} processes, so their "
                "ranks are not known. Merge each alone: --device FILE --rank R -o OUT."
            )
        yield rank or 0, path
