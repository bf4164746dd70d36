"""``chakra-capture compare``: did a change make training slower?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.output import (
    EXIT_INCONCLUSIVE,
    EXIT_OK,
    EXIT_REGRESSION,
    UsageError,
    console,
    duration,
    make_table,
    plain,
    print_json,
    shortened,
)
from chakra_capture.cli.recorded_steps import compare_recorded_steps, print_recorded_steps
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from rich.console import Console

    from chakra_capture.analysis.compare import Comparison, RunSteps
    from chakra_capture.analysis.trace_diff.diff import RunDifference

_NAME = 16
_JSON_NAME, _TEXT_NAME = "compare.json", "compare.txt"
# Of TraceML's summaries: its averages in ms by our names.
_TRACEML = {
    "step_time_ms": "step",
    "input_wait_ms": "input_wait",
    "h2d_ms": "h2d",
    "forward_ms": "forward",
    "backward_ms": "backward",
    "optimizer_ms": "optimizer",
    "residual_ms": "residual",
}


def compare(
    first: Path | None = None,
    second: Path | None = None,
    /,
    *,
    runs: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    vs: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None,
    max_regression: float | None = None,
    phases_only: Annotated[bool, Parameter(negative=())] = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare the step times of two runs: slower, faster, the same, or not to be told from noise.

    A and B are folders of runs (their phase files), or final_summary.json of TraceML, of which averages
    alone are known. Steps under the profiler and the first of a training are left out. Steps of one run
    are not independent, so a change counts only beyond an interval that their correlation widens, and
    from 3 % on; the same means that the whole interval lies within 5 %. On a shared machine identical
    runs differ by more than any of that: give several runs a side, three or five, run in turns. Then each
    side's fastest run counts, by its 10th percentile, and a change only from 10 % on (of five: 5 %) and
    beyond what runs of one side differ by.

    Of two runs that recorded steps under the profiler, these are compared too (ranks are merged first where
    they are not): by phase, by call and its input shapes, by kernel and collective. Each nanosecond of a step
    belongs to one call, so the differences of the calls sum to that of the step, exactly. Calls are matched by
    where they stand (parents, place among them, shapes, phase), so a renamed module or another instance of a
    kernel is the same one under another name; what one side alone has is new or gone. A call is slower or
    faster beyond what steps of one side differ by (at least five steps a side, 95 % over all calls together),
    3 % of its time and 0.1 % of the step. How runs of one program differ a single pair cannot tell. Of several
    ranks the one that differs most is shown, and the one in the middle. None of this changes the verdict or the
    exit status.

    Exit status: 0, 3 where it cannot be told (also if world sizes differ or a run is not whole), 4 if the
    step is slower by more than --max-regression percent.

    Examples:
        chakra-capture compare before/ after/
        chakra-capture compare before/ after/ --json      # recorded_steps: all calls, kernels, collectives
        chakra-capture compare --runs a1 a2 a3 --vs b1 b2 b3 --max-regression 5 -o report/

    Parameters
    ----------
    first
        Run A.
    second
        Run B, which is judged.
    runs
        Several runs of side A.
    vs
        Several runs of side B.
    max_regression
        Largest slowdown that passes, in percent.
    phases_only
        Leave the traces alone, merged or not.
    output
        Folder for compare.json and compare.txt.
    json
        Print JSON.
    """
    from chakra_capture.analysis.compare import compare as compare_sides

    sides = _sides(first, second, runs, vs)
    if max_regression is not None and not 0 <= max_regression < float("inf"):
        raise UsageError(f"--max-regression {max_regression} is no percentage. Give 0 or more.")
    read = [[(path, _read(path)) for path in side] for side in sides]
    is_pair = all(len(side) == 1 for side in sides)
    recorded = compare_recorded_steps(sides[0][0], sides[1][0]) if is_pair and not phases_only else None
    result = compare_sides(*([run or _without_phases(path, recorded) for path, run in side] for side in read))
    if output is not None:
        _write(output, result, recorded)
    if json:
        print_json(_content(result, recorded))
    else:
        _print(console(), result, recorded)
    return _exit_status(result, max_regression)


def _sides(
    first: Path | None, second: Path | None, runs: list[Path] | None, vs: list[Path] | None
) -> tuple[list[Path], list[Path]]:
    if runs or vs:
        if first is not None or not runs or not vs:
            raise UsageError("give either two runs A B, or --runs A1 A2 ... --vs B1 B2 ...")
        return runs, vs
    if first is None or second is None:
        raise UsageError("nothing to compare: give two runs A B, or --runs A1 A2 ... --vs B1 B2 ...")
    return [first], [second]


def _content(result: "Comparison", recorded: "RunDifference | None") -> dict[str, Any]:
    return {**result.as_json(), "recorded_steps": None if recorded is None else recorded.as_json()}


def _without_phases(path: Path, recorded: "RunDifference | None") -> "RunSteps":
    """A run of which only recorded steps can be compared."""
    from chakra_capture.analysis.compare import RunSteps

    if recorded is None or recorded.worst is None:
        raise TraceFileError(
            f"{path} has no step phases to compare. Record with phases on (the default), or give final_summary.json."
        )
    return RunSteps(str(path), {}, incomplete="it recorded no phases of its steps")


def _read(path: Path) -> "RunSteps | None":
    """What the phases of a run say; None where it has none."""
    from chakra_capture.analysis.compare import run_steps
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.phase_records import read_phases

    if path.is_file():
        return _of_summary(path)
    if (path / layout.SUMMARY_FILE).is_file() and not list(path.glob(f"*_{layout.PHASES_FOLDER}")):
        return _of_summary(path / layout.SUMMARY_FILE)
    run = find_run(path)
    if not run.phase_files:
        return None
    records = {rank: read_phases(file) for rank, file in run.phase_files.items()}
    sizes = [each.world_size for each in run.manifests.values()] + [each.world_size for each in records.values()]
    return run_steps(str(path), records, max((size for size in sizes if size), default=None), run.why_failed)


def _of_summary(path: Path) -> "RunSteps":
    import msgspec

    from chakra_capture.analysis.compare import RunSteps

    class Global(msgspec.Struct):
        average: dict[str, float | None]

    class Section(msgspec.Struct):
        overall: Global = msgspec.field(name="global")

    class Meta(msgspec.Struct):
        world_size: int | None = None

    class Summary(msgspec.Struct):
        step_time: Section
        schema_version: float | str | None = None
        meta: Meta = msgspec.field(default_factory=Meta)

    try:
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise TraceFileError(
            f"{path} is no summary of step times ({error}). Give final_summary.json, or the folder of a run."
        ) from error
    found = summary.step_time.overall.average
    averages = {ours: value * 1e6 for name, ours in _TRACEML.items() if (value := found.get(name)) is not None}
    schema = summary.schema_version
    return RunSteps(str(path), {}, world_size=summary.meta.world_size, averages=averages, schema_version=schema)


def _write(folder: Path, result: "Comparison", recorded: "RunDifference | None") -> None:
    import json as json_text

    from rich.console import Console

    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = json_text.dumps(_content(result, recorded), indent=2, allow_nan=False)
        (folder / _JSON_NAME).write_text(content + "\n")
        with (folder / _TEXT_NAME).open("w", encoding="utf-8") as file:
            _print(Console(file=file, width=80, highlight=False, markup=False, emoji=False), result, recorded)
    except OSError as error:
        raise TraceFileError(
            f"{folder} cannot be written: {error.strerror or error}. Give a writable folder with -o."
        ) from error


def _exit_status(result: "Comparison", max_regression: float | None) -> int:
    if result.verdict == "inconclusive":
        return EXIT_INCONCLUSIVE
    limit = None if max_regression is None else max_regression / 100
    if limit is not None and result.verdict == "slower" and (result.change or 0.0) > limit:
        return EXIT_REGRESSION
    return EXIT_OK


def _print(out: "Console", result: "Comparison", recorded: "RunDifference | None") -> None:
    out.print(plain(f"A  {result.labels[0]}"), soft_wrap=True)
    out.print(plain(f"B  {result.labels[1]}"), soft_wrap=True)
    out.print()
    unit = "sample" if result.per_sample else "batch" if result.per_batch else "step"
    title = f"{result.statistic.capitalize()} of a {unit}"
    interval = "95 %" if result.statistic == "median" else "+- noise"
    table = make_table(title, "", "A", "B", "change", interval, "")
    table.columns[0].justify = table.columns[5].justify = "left"
    for row in result.rows:
        name = row.domain if row.rank is None else f"rank {row.rank}"
        table.add_row(shortened(name, _NAME), duration(row.first_ns), duration(row.second_ns), *_change(row.change))
    if result.rows:
        out.print(table)
    for note in result.notes:
        out.print(plain(f"note: {note}"))
    if recorded is not None:
        print_recorded_steps(out, recorded)
    out.print()
    out.print(plain(_sentence(result)), soft_wrap=True)


def _change(change: Any) -> tuple[str, str, str]:
    if change.change is None:
        return "-", "-", "not measured"
    interval = "-" if change.low is None else f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    return f"{100 * change.change:+.1f} %", interval, str(change.verdict)


def _sentence(result: "Comparison") -> str:
    """The verdict in words."""
    if result.verdict == "inconclusive":
        return f"inconclusive: {result.reason or 'not measured on both sides'}"
    if result.verdict == "same":
        return "B is as fast as A"
    mostly = f", mostly {result.dominant}" if result.dominant else ""
    return f"B is {result.verdict} by {abs(100 * (result.change or 0.0)):.1f} %{mostly}"
