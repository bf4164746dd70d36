"""``chakra-capture inspect``: what lies in a folder, without reading the traces."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chakra_capture.cli.output import EXIT_OK, number_ranges, print_json, print_line, size


def inspect(
    path: Path,
    /,
    *,
    job: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """List what a run recorded, per rank: files, sizes, steps, whether it is complete and merged.

    Reads names, sizes and manifests, not the traces, so it is quick on any size.

    Examples:
        chakra-capture inspect ./traces

    Parameters
    ----------
    path
        Folder of a run.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    json
        Print JSON.
    """
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
