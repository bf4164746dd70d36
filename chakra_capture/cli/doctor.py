"""``chakra-capture doctor``: can a job be recorded here, and what will not work?"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from chakra_capture.cli.output import EXIT_BAD_INPUT, EXIT_OK, UsageError, console, count_of, plain, print_json, status
from chakra_capture.layout import DEFAULT_TRACE_DIR

if TYPE_CHECKING:
    from rich.console import Console

_MODULE = "chakra_capture.recording.checkup"
_OK, _WARNING, _BLOCKING = "ok", "warning", "cannot record"
_STYLES = {_OK: "green", _WARNING: "yellow", _BLOCKING: "red"}
_LONGEST_S = 86_400
_READERS = "reading traces"
# What the process of a job has and this one has not.
_ONLY_IN_JOB = ("profilers", "forks", "compiled modules", "signals")


@dataclass(slots=True)
class _Report:
    """What was found so far."""

    checks: list[dict[str, str]] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)

    def levels(self, level: str) -> int:
        return sum(check["level"] == level for check in self.checks)


def doctor(
    trace_dir: Path = Path(DEFAULT_TRACE_DIR),
    /,
    *,
    framework: Literal["lightning", "ignite", "monai", "huggingface", "hydra"] | None = None,
    timeout: float = 120.0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Check whether a job can be recorded here: what works, what not, what to do.

    Run it in the environment of the job, on its machine, in the shell or batch
    script that starts it. It looks at variables that torch's profilers read, at
    Nsight, the folder (a megabyte is written, flushed and removed), frameworks and
    versions, dumps of NCCL's flight recorder (named, never opened), signals, torch,
    the device and CUPTI; then it records one step of a small training, which it
    takes away again. What needs torch runs in a process of its own: one that
    crashes or hangs is a finding, too.

    What a job does in its own process shows only there: a second profiler, a signal
    handler, compiled modules, what breaks in forked workers. In the job, once model
    and loaders are made:

        from chakra_capture.recording.checkup import checks
        print(*checks("./traces"), sep="\\n")

    Exit status: 0 if recording works, also with warnings; 1 if it cannot.

    Examples:
        chakra-capture doctor ./traces
        chakra-capture doctor /scratch/me/traces --framework lightning --json

    Parameters
    ----------
    trace_dir
        Folder that the job will record to; made for the check, and removed, where it is missing.
    framework
        What the job uses: that it is missing is then a problem.
    timeout
        Seconds after which the process that looks at torch is given up.
    json
        Print JSON.
    """
    if not 0 < timeout <= _LONGEST_S:
        raise UsageError(f"--timeout {timeout} is no time to wait; give seconds, at most {_LONGEST_S}.")
    report = _Report()
    with status("looking") as show:
        _ask(report, [str(trace_dir), *([framework] if framework else [])], timeout, show)
    report.checks.append(_readers())
    can_record = not report.levels(_BLOCKING)
    if json:
        print_json(
            {
                "schema_version": 1,
                "can_record": can_record,
                "num_problems": report.levels(_BLOCKING),
                "num_warnings": report.levels(_WARNING),
                "checks": report.checks,
                "versions": report.versions,
                "only_in_job": list(_ONLY_IN_JOB),
            }
        )
    else:
        _print(console(), report)
    return EXIT_OK if can_record else EXIT_BAD_INPUT


def _ask(report: _Report, arguments: list[str], limit_s: float, show: Any) -> None:
    from chakra_capture.cli.training_half import NoAnswerError, ask

    looks_at, is_done = "its start", False
    try:
        for line in ask(_MODULE, *arguments, limit_s=limit_s):
            if "looks_at" in line:
                looks_at = line["looks_at"]
                show(f"looking at {looks_at}")
            elif "check" in line:
                report.checks.append(line["check"])
            elif "versions" in line:
                report.versions = line["versions"]
            is_done = is_done or "is_done" in line
        reason = "" if is_done else "it ended without saying why"
    except NoAnswerError as fault:
        reason = "" if is_done else str(fault)
    if reason:
        report.checks.append(
            {
                "subject": looks_at,
                "level": _BLOCKING,
                "what": f"The process that looked at this was lost: {reason}.",
                "why": "A job may end or hang at the same place; what comes after it was not looked at.",
                "todo": f"See to it with the last lines of: python -P -m {_MODULE} {arguments[0]}",
            }
        )


def _readers() -> dict[str, str]:
    """Which of the optional C parts the offline half has here."""
    from chakra_capture.merge import join, nest
    from chakra_capture.trace import native

    parts = {"scanner": native.load() is not None, "nesting": nest.is_built(), "joining": join.is_built()}
    missing = [name for name, is_built in parts.items() if not is_built]
    if not missing:
        return {"subject": _READERS, "level": _OK, "what": "the C scanner is in use", "why": "", "todo": ""}
    scanner = "the Python scanner is in use" if "scanner" in missing else "the C scanner is in use"
    return {
        "subject": _READERS,
        "level": _WARNING,
        "what": f"Not built for this machine: {', '.join(missing)} in C; {scanner}.",
        "why": "merge gives the same, but takes several times as long and more memory.",
        "todo": "Install a wheel, or a C compiler and then chakra-capture anew.",
    }


def _print(out: "Console", report: _Report) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in sorted(report.checks, key=lambda check: list(_STYLES).index(check["level"])):
        text = " ".join(part for part in (check["what"], check["why"], check["todo"]) if part)
        style = _STYLES[check["level"]]
        table.add_row(Text(check["level"], style=style), plain(check["subject"]), plain(text))
    out.print(table)
    out.print()
    out.print(f"Of {', '.join(_ONLY_IN_JOB)} a job's own process tells more: see --help.", style="dim")
    out.print(_verdict(report))


def _verdict(report: _Report) -> str:
    problems, warnings = report.levels(_BLOCKING), report.levels(_WARNING)
    if problems:
        also = f" and {count_of(warnings, 'warning')}" if warnings else ""
        return f"Recording cannot work here: {count_of(problems, 'problem')}{also}."
    return (
        f"Recording works here, with {count_of(warnings, 'warning')}."
        if warnings
        else "All is well: recording works here."
    )
