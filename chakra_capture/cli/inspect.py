"""``chakra-capture inspect``: what lies in a folder, without reading the traces; or what a Chakra .et file holds."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chakra_capture.cli.output import EXIT_OK, UsageError, number_ranges, print_json, print_line, size


def inspect(
    path: Path,
    /,
    *,
    job: str | None = None,
    dump: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """List what a run recorded, or sum up a Chakra .et file.

    Of a folder, per rank: files, sizes, steps, whether it is complete and merged. Reads
    names, sizes and manifests, not the traces, so it is quick on any size.

    Of a .et file (plain or gzip): nodes by type, communication by type and by process
    group with bytes, dependencies, the time it spans, and the longest path through its
    dependencies by duration, which is what a simulation takes at least.

    Examples:
        chakra-capture inspect ./traces
        chakra-capture inspect et/chakra.0.et
        chakra-capture inspect et/chakra.0.et --dump | grep COMM_COLL_NODE

    Parameters
    ----------
    path
        Folder of a run, or a .et file.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    dump
        Print a .et file as JSON Lines: its metadata, then one node a line.
    json
        Print JSON.
    """
    if path.is_file():
        from chakra_capture.cli.inspect_et import dump_file, inspect_file

        return dump_file(path) if dump else inspect_file(path, json=json)
    if dump:
        raise UsageError(f"--dump is for a .et file, and {path} is none.")
    from chakra_capture.trace.discovery import find_run

    run = find_run(path, job)
    manifests, merged, phases = run.manifests, run.merged_ranks, run.phase_files
    numbers = sorted({files.rank for files in run.ranks} | set(merged) | set(manifests) | set(phases))
    by_rank = {files.rank: files for files in run.ranks}
    rows: list[dict[str, Any]] = []
    for number in numbers:
        files, head = by_rank.get(number), manifests.get(number)
        rows.append(
            {
                "rank": number,
                "windows": len(files.windows) if files else None,
                "bytes": files.size_bytes if files else None,
                "unfinished": any(w.unfinished for w in files.windows) if files else None,
                "steps": sorted({s for w in head.windows for s in w.steps}) if head else None,
                "complete": head.complete if head else None,
                "reason": (head.detail or head.reason) if head else None,
                "merged": number in merged,
                "phases": phases[number].name if number in phases else None,
            }
        )
    if json:
        print_json({"schema_version": 1, "job": run.paths.job, "other_jobs": list(run.other_jobs), "ranks": rows})
        return EXIT_OK
    print_line(f"{path}, job {run.paths.job}" + (f" (others: {', '.join(run.other_jobs)})" if run.other_jobs else ""))
    for row in rows:
        steps = "steps not stated" if row["steps"] is None else f"steps {number_ranges(row['steps'])}"
        state = {None: "no manifest", True: "complete", False: f"incomplete ({row['reason']})"}[row["complete"]]
        amount = "" if row["bytes"] is None else f"{row['windows']} window(s), {size(row['bytes'])}, "
        flags = (", unfinished files" if row["unfinished"] else "") + (", merged" if row["merged"] else ", not merged")
        timed = ", phases" if row["phases"] else ""
        print_line(f"rank {row['rank']}: {amount}{steps}, {state}{flags}{timed}")
    return EXIT_OK
