"""All ranks of a merged run to .et files and the file of their process groups."""

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.export.making.content import Texts
from chakra_capture.export.making.operations import Plan, plan_operations
from chakra_capture.export.making.rank import RankExport, RankJob, export_rank
from chakra_capture.export.validation.node_checks import Profile
from chakra_capture.merge.many.capacity import available_bytes
from chakra_capture.merge.many.processes import Processes
from chakra_capture.trace.discovery import Run
from chakra_capture.trace.merged import MergedRun, MergedTrace

# Processes cost half a second each before they do anything.
_WORTH_PROCESSES = 20_000_000
# Memory per byte of the tables of a rank, which are packed; measured 18 and 39 (full) on 13.6 MB (scripts/bench_et.py).
_NEED_FACTOR, _NEED_LEAST = {Profile.ASTRA: 25, Profile.FULL: 50}, 100_000_000
_DIED = "the process that wrote it died twice, most likely out of memory. Export it on a machine with more memory."


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How to export.

    Attributes:
        window: which recorded window; None: the first.
        workers: processes at once; None: one per core.
        overwrite: replace an export that is there.
        seen: told of each rank when it is done, and how many there are.
    """

    profile: Profile = Profile.ASTRA
    window: int | None = None
    workers: int | None = None
    overwrite: bool = False
    texts: Texts = field(default_factory=Texts)
    seen: Callable[[RankExport, int], None] = lambda rank, number: None


@dataclass(frozen=True, slots=True)
class Export:
    """What was written.

    Attributes:
        windows: the recorded windows that there are; ``window`` is the one that was written.
        counts: what was changed or left out, over all ranks.
    """

    folder: Path
    window: int
    windows: list[int]
    groups: dict[int, tuple[int, ...]]
    ranks: list[RankExport]
    counts: Counter[str]


def export_et(run: Run, folder: Path | None, asked: Asked) -> Export:
    """Write ``chakra.<rank>.et`` of all merged ranks, and ``comm_group.json``; default: beside the tables.

    Raises:
        TraceFileError: the run has no such window, no rank could be written, or there is an export already.
    """
    traces, ranks = _readable([MergedTrace(rank, path) for rank, path in run.merged_ranks.items()])
    windows = sorted({one["window"] for trace in traces for one in trace.link["windows"]})
    window = _chosen(windows, asked.window, run.merged_dir)
    folder = folder or run.merged_dir / layout.ET_FOLDER
    before = _prepared(folder, overwrite=asked.overwrite)
    plan = plan_operations(MergedRun(run.merged_dir), traces, window, lower=asked.profile == Profile.ASTRA)
    jobs = [_job(trace, window, folder, plan, asked) for trace in traces]
    for rank in _exported(jobs, asked.workers):
        ranks.append(rank)
        asked.seen(rank, len(jobs))
    ranks.sort(key=lambda one: one.rank)
    written = {one.path for one in ranks if one.path}
    if written:
        _write_groups(folder, plan.groups)
        for path in before - written:  # of another export: it would not fit to this one
            path.unlink(missing_ok=True)
    return Export(folder, window, windows, plan.groups, ranks, sum((one.counts for one in ranks), plan.counts))


def _readable(traces: list[MergedTrace]) -> tuple[list[MergedTrace], list[RankExport]]:
    """Ranks whose small tables can be read, and what is wrong with the others: they cost no rank but themselves."""
    found, broken = [], []
    for trace in traces:
        try:
            _ = trace.communication, trace.link["windows"]
        except (TraceFileError, KeyError) as error:
            broken.append(RankExport(trace.rank, error=str(error)))
        else:
            found.append(trace)
    if not found and broken:
        raise TraceFileError(str(broken[0].error))
    return found, broken


def _chosen(windows: Sequence[int], wanted: int | None, folder: Path) -> int:
    if wanted is None and windows:
        return windows[0]
    if wanted is None or wanted not in windows:
        known = ", ".join(map(str, windows)) or "none"
        raise TraceFileError(f"{folder} has no window {wanted}; it has {known}. Name one of them.")
    return wanted


def _prepared(folder: Path, *, overwrite: bool) -> set[Path]:
    """Make the folder; returns the traces of an export that is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = {one for one in folder.iterdir() if _is_ours(one)}
    except OSError as error:
        raise TraceFileError(f"{folder} cannot be written to ({error}). Give another folder with -o.") from error
    if before and not overwrite:
        raise TraceFileError(
            f"{folder} holds an export already ({min(before).name}). Replace it with --overwrite, or give another "
            "folder with -o."
        )
    return before


def _is_ours(path: Path) -> bool:
    match = layout.ET_NAME.fullmatch(path.name)
    return match is not None and match["prefix"] == layout.ET_PREFIX


def _job(trace: MergedTrace, window: int, folder: Path, plan: Plan, asked: Asked) -> RankJob:
    tables = trace.folder / layout.NODES_FILE, trace.folder / layout.EDGES_FILE
    size = sum(path.stat().st_size for path in tables if path.is_file())
    return RankJob(
        rank=trace.rank,
        merged=trace.folder.absolute(),
        window=window,
        folder=folder.absolute(),
        profile=asked.profile,
        world_size=plan.world_size,
        operations=plan.by_rank[trace.rank],
        need_bytes=_NEED_LEAST + _NEED_FACTOR[asked.profile] * size,
        texts=asked.texts,
    )


def _exported(jobs: list[RankJob], workers: int | None) -> Iterator[RankExport]:
    size = sum((job.need_bytes - _NEED_LEAST) // _NEED_FACTOR[job.profile] for job in jobs)
    count = min(workers or os.cpu_count() or 1, len(jobs))
    if count <= 1 or (workers is None and size < _WORTH_PROCESSES):
        yield from map(export_rank, jobs)
        return
    jobs = sorted(jobs, key=lambda job: job.need_bytes, reverse=True)
    with Processes(count, available_bytes()) as processes:
        yield from processes.each(jobs, export_rank, lambda job, pid: None, lambda rank: RankExport(rank, error=_DIED))


def _write_groups(folder: Path, groups: dict[int, tuple[int, ...]]) -> None:
    path = folder / layout.COMM_GROUP_FILE
    part = layout.part_path(path.with_name(f"{path.name}.{secrets.token_hex(4)}"))
    with part.open("x") as file:
        json.dump({str(number): ranks for number, ranks in groups.items()}, file)
    part.replace(path)
