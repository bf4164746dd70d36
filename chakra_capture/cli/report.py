"""``chakra-capture report``: a run as one page that opens in a browser."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture.cli.files import write_bytes
from chakra_capture.cli.merged import merge_stale
from chakra_capture.cli.output import EXIT_OK, console, number_ranges, plain, print_error, print_json, size, status
from chakra_capture.cli.selection import chosen, first_missing, parse_ranges
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.trace.discovery import Run

SCHEMA_VERSION = 1
DEFAULT_NAME = "report.html"
_TARGET_BYTES = 6_000_000


def report(
    path: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path(DEFAULT_NAME),
    rank: Annotated[list[str] | None, Parameter(name=["--rank", "--ranks"], negative=(), consume_multiple=True)] = None,
    no_replay: Annotated[bool, Parameter(negative=())] = False,
    show_paths: Annotated[bool, Parameter(negative=())] = False,
    job: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a run as one page: what is wrong, where the time goes, what would help.

    One file that opens in any browser, without a network: it loads nothing and
    sends nothing. Findings in words come first; then where a step goes, every
    step, the GPU, kernels and operators, communication, ranks, the critical path,
    what would help most, and how far all of it can be trusted. A section that
    cannot be filled says why, and how to get it. Times are exact; what was not
    recorded reads "not recorded", never 0. The same run gives the same file.

    Ranks that are not merged yet are merged first. A report that is there already
    is replaced, whole: it can be made again at any time.

    Replaying the run for the critical path and the what-ifs takes most of the
    time on a large run; --no-replay leaves both out.

    Examples:
        chakra-capture report ./traces
        chakra-capture report ./traces -o slow-run.html
        chakra-capture report ./traces --ranks 0-3 --no-replay --json

    Parameters
    ----------
    path
        Folder of a run, or of merged ranks.
    output
        The page; replaced if it is there.
    rank
        Ranks to look at, such as 0 or 0,2-3; default: all.
    no_replay
        Leave out the critical path and the what-ifs.
    show_paths
        Leave folders in paths and the name of the run's folder; else they are cut off, since reports get mailed.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    json
        Print where the page is and its size as JSON.
    """
    from chakra_capture.report.content import content
    from chakra_capture.report.facts import gather
    from chakra_capture.report.page import render
    from chakra_capture.trace.discovery import find_run

    _check_target(output)
    run = find_run(path, job)
    merge_stale(run)
    ranks = _ranks(run, path, rank)
    command = shlex.join(["chakra-capture", "report", str(path), *(["--no-replay"] if no_replay else [])])
    with status("looking at the run") as say:
        facts = gather(run, ranks, replay=not no_replay, say=say)
        say("writing the page")
        page = render(content(facts, command, show_paths=show_paths), show_paths=show_paths)
        num_bytes = _write(output, page)
    if num_bytes > _TARGET_BYTES:
        print_error(f"{output} is {size(num_bytes)} large and may open slowly; --ranks shows fewer.")
    if json:
        print_json({"schema_version": SCHEMA_VERSION, "file": str(output.resolve()), "num_bytes": num_bytes})
    else:
        console().print(plain(f"{output} ({size(num_bytes)}): open it in a browser."), soft_wrap=True)
    return EXIT_OK


def _check_target(output: Path) -> None:
    if output.is_dir():
        raise TraceFileError(f"{output} is a folder. Name a file, such as {output / DEFAULT_NAME}.")
    if output.exists() and not output.is_file():  # a device, a pipe: to be replaced by a file would be its end
        raise TraceFileError(f"{output} is no plain file and is not replaced. Name another one.")
    if not output.absolute().parent.is_dir():
        raise TraceFileError(f"{output.parent} is no folder, so {output} cannot be written. Make it, or name another.")


def _ranks(run: "Run", path: Path, texts: list[str] | None) -> list[int] | None:
    """The ranks asked for; None for all.

    Raises:
        TraceFileError: there is nothing to report, or a rank is not there.
    """
    there = sorted({*run.merged_ranks, *run.phase_files})
    if not there:
        if run.ranks:
            raise TraceFileError(
                f"no rank of {path} could be merged. See the messages above, or run: chakra-capture merge {path}"
            )
        raise TraceFileError(run.why_empty)
    if texts is None:
        return None
    ranges = parse_ranges(texts, "--ranks")
    if (missing := first_missing(ranges, there)) is not None:
        raise TraceFileError(f"{path} has no rank {missing}; it has {number_ranges(there)}. Name some of them.")
    return chosen(ranges, there)


def _write(output: Path, page: str) -> int:
    raw = page.encode()  # whole: what no encoding holds, half of a surrogate pair, was written as an escape
    try:
        write_bytes(output, raw)
    except OSError as fault:
        raise TraceFileError(f"{output} cannot be written: {fault.strerror or fault}. Name another file.") from fault
    return len(raw)
