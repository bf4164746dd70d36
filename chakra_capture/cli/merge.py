"""``chakra-capture merge`` (also ``merge-traces``)."""

import logging
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.alignment import print_alignment
from chakra_capture.cli.merge_progress import watched
from chakra_capture.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_OK,
    UsageError,
    not_negative,
    number_ranges,
    print_error,
    print_json,
    print_line,
)
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.merge.across.outcome import Alignment
    from chakra_capture.merge.many.cluster import Cluster
    from chakra_capture.merge.many.roster import Roster
    from chakra_capture.merge.report import RankReport
    from chakra_capture.trace.discovery import Run


def merge(
    path: Path | None = None,
    /,
    *,
    host: Path | None = None,
    device: Path | None = None,
    rank: Annotated[int | None, Parameter(validator=not_negative)] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    job: str | None = None,
    ranks: Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)] = None,
    workers: Annotated[int | None, Parameter(validator=not_negative)] = None,
    cluster: str | None = None,
    memory_budget: str | None = None,
    again: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
    strict: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Link the host and device traces of every rank into tables (Parquet).

    PATH is the trace_dir of a run (its newest run is taken), one of its folders, or a folder that
    NeMo, chakra's scripts or torch.profiler wrote. Host or device traces alone merge too.

    Each rank gets rank=<R>/nodes.parquet, edges.parquet, steps.parquet, communication.parquet and
    link.json under <job>_merged beside the traces; steps.parquet has the recorded phases of each
    step. What the ranks communicated with each other stands in collectives.parquet there, how their
    clocks compare in alignment.json. A rank that
    cannot be merged is reported, the others merge, and the exit status is 1. Ranks that were merged
    before, from the same files and by the same version, are left as they are.

    Examples:
        chakra-capture merge /data/traces
        chakra-capture merge --host host.json --device device.json.gz -o merged
        chakra-capture merge /data/traces --rank $SLURM_ARRAY_TASK_ID
        chakra-capture merge /data/traces --cluster tcp://10.0.0.1:8786

    Parameters
    ----------
    path
        Folder of a run.
    host
        One host trace (ExecutionTraceObserver), instead of PATH.
    device
        One device trace (Kineto), instead of PATH.
    rank
        Merge only this rank of PATH. With --host or --device: the rank of the files; default: from the
        file name or the device trace, else 0.
    output
        Folder for the merged ranks.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    ranks
        Merge only these ranks.
    workers
        Ranks merged at once; default, or 0: one per core. Fewer where their traces need more memory
        than is free.
    cluster
        Address of a Dask scheduler (tcp://HOST:PORT), whose workers merge the ranks, one at a time
        each. They need this version of chakra-capture, and the folders under the same paths.
    memory_budget
        For traces larger than memory: what is read of a rank past this size (such as 500MB or 2GB) goes
        to temporary files in its output folder. Linking still holds about a quarter of the size of the
        traces in memory.
    again
        Merge also ranks that are merged already.
    force
        Merge files that are not of one process, rank and run all the same; link.json says so.
    strict
        Refuse damaged or unfinished files, and pairs whose traces hold different steps, instead of
        merging what is there.
    json
        Print a JSON report.
    """
    from chakra_capture.merge.many.roster import Roster, check_ranks
    from chakra_capture.merge.many.run import merge_run
    from chakra_capture.merge.report import MergeOptions

    budget = None if memory_budget is None else _bytes(memory_budget)
    options = MergeOptions(force=force, strict=strict, memory_budget=budget)
    if cluster is not None:
        _check_cluster(cluster, host or device)
    if host or device:
        run, out = _single(host, device, rank, path, output)
        roster, wanted = Roster(), None
    else:
        wanted = ranks if rank is None else [*(ranks or ()), rank]
        run, out = _folder(path, job, wanted, output)
        roster = check_ranks(run)
    alignments: list[Alignment | None] = []
    with _executor(cluster, run, out) as executor, watched() as watch:
        reports = merge_run(
            run,
            out,
            options,
            ranks=wanted,
            again=again,
            roster=roster,
            workers=workers,
            executor=executor,
            watch=replace(watch, aligned=alignments.append),
        )
    (alignment,) = alignments
    if json:
        print_json(_as_json(out, reports, roster, alignment))
    else:
        _print(out, reports, roster if wanted is None else Roster())
        if len(run.ranks) > 1:
            print_alignment(alignment)
    return EXIT_BAD_INPUT if any(report.error for report in reports) else EXIT_OK


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"--memory-budget {text!r} is no size. Give a number of bytes, such as 500MB or 2GB.")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2].upper()]


def _folder(path: Path | None, job: str | None, ranks: list[int] | None, output: Path | None) -> "tuple[Run, Path]":
    from chakra_capture.trace.discovery import find_run

    if path is None:
        raise UsageError("nothing to merge: give the trace_dir of a run, or --host FILE --device FILE -o OUT.")
    run = find_run(path, job)
    if ranks is not None:
        if not ranks:
            raise UsageError("--ranks names no rank. Give numbers, or leave it out for all.")
        found = [files.rank for files in run.ranks]
        unknown = sorted(set(ranks) - set(found))
        if unknown:
            raise TraceFileError(
                f"{path} has no rank {unknown[0]}; it has {number_ranges(found)}. Name ranks that were recorded."
            )
    if not run.ranks:
        if run.merged_ranks:
            raise TraceFileError(f"{path} is merged already and holds no traces. Give the folder with the traces.")
        raise TraceFileError(run.why_empty)
    return run, output or run.merged_dir


def _single(
    host: Path | None, device: Path | None, rank: int | None, path: Path | None, output: Path | None
) -> "tuple[Run, Path]":
    from chakra_capture.trace.discovery import RankFiles, Run, WindowFiles

    if path is not None:
        raise UsageError(f"give either the folder {path} or --host/--device, not both.")
    if output is None:
        raise UsageError("--host/--device need a folder for the result. Give it with -o OUT.")
    number = rank if rank is not None else _stated_rank(host, device)
    files = RankFiles(number, [WindowFiles(host, device)])
    return Run(layout.RunPaths(output, "0"), (files,), output), output


def _stated_rank(host: Path | None, device: Path | None) -> int:
    """Rank that the files state themselves; 0 if neither does."""
    for path in (host, device):
        match = re.search(r"(?:rank|host|device)[-_.=](\d+)", path.name) if path else None
        if match:
            return int(match[1])
    from chakra_capture.trace.head import stated_rank

    return (stated_rank(device) if device else None) or 0


def _check_cluster(address: str, file: Path | None) -> None:
    if file is not None:
        raise UsageError("--cluster merges the ranks of a folder. Give PATH instead of --host/--device.")
    if not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}", address):
        raise UsageError(f"--cluster {address!r} is no address of a scheduler. Give it as tcp://HOST:PORT.")


def _executor(cluster: str | None, run: "Run", out: Path) -> "AbstractContextManager[Cluster | None]":
    if cluster is None:
        return nullcontext()
    from chakra_capture.merge.many.cluster import connected

    with suppress(ImportError):
        import distributed  # noqa: F401  # it sets up its loggers, and a level for each, when it is imported

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what went wrong is said once, and by us
    return connected(cluster, run, out)


def _as_json(out: Path, reports: "list[RankReport]", roster: "Roster", alignment: "Alignment | None") -> dict[str, Any]:
    ranks = [
        {"rank": r.rank, "error": r.error, "unchanged": r.unchanged, "notes": list(r.notes), "windows": list(r.windows)}
        for r in reports
    ]
    run = {
        "world_size": roster.world_size,
        "missing_ranks": roster.missing,
        "missing_ranks_by_content": roster.missing_by_content,
        "conflicts": [asdict(conflict) for conflict in roster.conflicts],
    }
    aligned = None if alignment is None else alignment.as_json()
    return {"schema_version": 1, "output": str(out), "run": run, "ranks": ranks, "alignment": aligned}


def _print(out: Path, reports: "list[RankReport]", roster: "Roster") -> None:
    for report in reports:
        if report.error:
            print_error(f"rank {report.rank} was not merged: {report.error}")
            continue
        print_line(f"rank {report.rank}: {_headline(report)}")
        notes = [note for window in report.windows for note in window["notes"] + (window["pairing"] or _NONE)["faults"]]
        for note in [*report.notes, *notes]:
            print_line(f"  note: {note}")
    merged = sum(report.error is None for report in reports)
    unchanged = sum(report.unchanged for report in reports)
    before = f" ({unchanged} merged before, unchanged)" if unchanged else ""
    print_line(f"{merged} of {len(reports)} ranks merged into {out}{before}{_missing(roster)}")


_NONE: dict[str, list[str]] = {"faults": []}
_MOST_LISTED = 10


def _missing(roster: "Roster") -> str:
    if not roster.missing:
        return ""
    listed = ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in roster.missing[:_MOST_LISTED]
    )
    more = ", ..." if len(roster.missing) > _MOST_LISTED else ""
    return f"; of a world size of {roster.world_size} no trace is here of rank {listed}{more}"


def _headline(report: "RankReport") -> str:
    parts = []
    hosts = [w["host"] for w in report.windows if w["host"]]
    devices = [w["device"] for w in report.windows if w["device"]]
    if hosts and devices:
        linked, ops = sum(h["num_linked"] for h in hosts), sum(h["num_nodes"] - h["num_roots"] for h in hosts)
        parts.append(f"{linked} of {ops} host ops linked")
    elif hosts:
        parts.append(f"host trace alone, {sum(h['num_nodes'] for h in hosts)} nodes, no times")
    if devices:
        if not hosts:
            parts.append("device trace alone")
        activities = sum(d["num_activities"] for d in devices)
        launched = sum(d["num_launched"] for d in devices)
        parts.append(f"{launched} of {activities} device activities linked" if activities else "no device activities")
    steps = sorted({step for d in [*devices, *hosts] for step in d["steps"]})
    parts.append(f"steps {number_ranges(steps)}")
    if report.salvaged:
        parts.append("salvaged")
    return ", ".join(parts)
