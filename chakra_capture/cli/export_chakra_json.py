"""``chakra-capture export chakra-json``: linked host and device JSON for Chakra's official converter."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_OK,
    UsageError,
    count_of,
    number_ranges,
    print_error,
    print_json,
    print_line,
    size,
    status,
)
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.export.chakra_json.run import LinkedFile


def export_chakra_json(
    path: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    job: str | None = None,
    ranks: Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    anonymize: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write the linked host and device JSON that Chakra's chakra_converter reads.

    PATH is a run that was merged. Each rank gets chakra.<rank>.json, a further
    window of it chakra.<rank>.window-<n>.json. With the package mlc-chakra
    installed:

        chakra-capture export chakra-json ./traces -o linked
        chakra_converter PyTorch --input linked/chakra.0.json --output chakra.0.et

    Every host op, annotation and device activity is a node: copies, memsets and
    kernels of CUDA graphs too. A device activity hangs on the innermost op around
    its launch (on its thread where there is none, on a thread of its own where no
    launch is recorded). Parents and whatever is waited for have smaller ids;
    node_id is the row in the merged tables. Times are in us with three decimals:
    durations as measured, ts since baseTimeNanoseconds (Unix time). exclusive_dur
    of a host op includes runtime calls and Python within it, which this format
    has no nodes for. inter_thread_dep and sync_dep are the edges of the merged
    tables; the converter ignores sync_dep.

    The converter takes the type of a collective from the name of its kernel, and
    ends at names it does not know. Those are written under a name it knows, with
    their own as kernel_name: as the collective that they run, of reduce, gather
    and scatter as all_reduce, all_gather and broadcast, of a batch of sends and
    receives as computation. Its size is what the kernel's one input holds: what
    this rank puts in. The rest of kernels' inputs and outputs is empty.
    Collectives without a kernel (gloo) are computation to the converter.

    Not in the merged tables, and so not as the host trace has it: fw_parent and
    fw_tid (0), scope (7 of annotations, else 0), empty attributes, types of
    attributes, ids of nodes, the steady clock (start_ts and finish_ts are Unix
    ms), time zone (time is UTC). tid is the system's where the device trace tells
    it. A host trace alone has no times, so its nodes have none; a device trace
    alone has no values of inputs.

    A file has its name when it is whole. A rank that cannot be exported is
    reported, the others are written, and the exit status is 1.

    Parameters
    ----------
    path
        Folder of a run, or its merged folder.
    output
        Folder for the files; default: chakra_json in the merged folder.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    ranks
        Export only these ranks.
    overwrite
        Replace files that are there already, instead of refusing.
    anonymize
        Write hashes for names and types, shapes rounded up to powers of two, and no values of
        inputs. Times, structure and collectives stay; equal names stay equal, on all ranks.
    json
        Print a JSON report.
    """
    if ranks is not None and not ranks:
        raise UsageError("--ranks names no rank. Give numbers, or leave it out for all.")
    from chakra_capture.export.anonymize import Anonymizer
    from chakra_capture.export.chakra_json.run import export_rank, prepare_folder
    from chakra_capture.export.chakra_json.tables import RankTables
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.merged import MergedTrace

    run = find_run(path, job)
    merged = run.merged_ranks
    if not merged:
        raise TraceFileError(f"{path} has no merged ranks. Merge it first, with: chakra-capture merge.")
    missing = sorted(set(ranks or ()) - set(merged))
    if missing:
        found = number_ranges(list(merged))
        raise TraceFileError(f"{path} has no merged rank {missing[0]}; it has {found}. Name merged ranks.")
    hide = Anonymizer().nodes if anonymize else None
    folder = output or run.merged_dir / layout.LINKED_FOLDER
    chosen = [rank for rank in merged if ranks is None or rank in ranks]
    prepare_folder(folder, chosen, overwrite=overwrite)
    written: dict[int, list[LinkedFile]] = {}
    errors: dict[int, str] = {}
    with status(f"exporting {count_of(len(chosen), 'rank')}") as say:
        for place, rank in enumerate(chosen):
            where = f"exporting rank {rank} ({place + 1} of {len(chosen)})"

            def seen(done: int, of: int, where: str = where) -> None:
                say(f"{where}: {done:,} of {of:,} nodes")

            say(where)
            try:
                tables = RankTables.of(MergedTrace(rank, merged[rank]), hide)
                written[rank] = export_rank(tables, folder, seen=seen)
            except TraceFileError as error:
                errors[rank] = str(error)
    if json:
        ranks_said = [_as_json(rank, written.get(rank, []), errors.get(rank)) for rank in chosen]
        print_json({"schema_version": 1, "output": str(folder), "ranks": ranks_said})
    else:
        _print(folder, written, errors)
    return EXIT_BAD_INPUT if errors else EXIT_OK


def _as_json(rank: int, files: "list[LinkedFile]", error: str | None) -> dict[str, Any]:
    said = []
    for one in files:
        contents = asdict(one.contents)
        contents["renamed"] = [
            {"collective": collective, "taken_for": taken_for, "is_exact": is_exact, "num_kernels": number}
            for (collective, taken_for, is_exact), number in sorted(one.contents.renamed.items())
        ]
        said.append(
            {
                "window": one.window,
                "file": str(one.path),
                "num_bytes": one.num_bytes,
                **contents,
                "notes": one.contents.notes,
            }
        )
    return {"rank": rank, "error": error, "files": said}


def _print(folder: Path, written: "dict[int, list[LinkedFile]]", errors: dict[int, str]) -> None:
    for rank, files in written.items():
        for one in files:
            contents = one.contents
            print_line(
                f"rank {rank}: {one.path.name}, {size(one.num_bytes)}, {contents.num_host} host nodes, "
                f"{contents.num_device} device nodes"
            )
            for note in contents.notes:
                print_line(f"  note: {note}")
    for rank, error in errors.items():
        print_error(f"rank {rank} was not exported: {error}")
    print_line(f"{len(written)} of {len(written) + len(errors)} ranks exported to {folder}")
