"""``chakra-capture trigger``: have a job that is running record a few steps now."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chakra_capture.cli.output import EXIT_OK, UsageError, count_of, print_json, print_line, status
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.layout import DEFAULT_TRACE_DIR

if TYPE_CHECKING:
    from chakra_capture.layout import RunPaths

_LONGEST_S = 86_400
_LOOK_S = 0.1
_LARGEST_ANSWER = 4096
_FINAL = ("recording", "refused")


class TriggerError(ChakraCaptureError):
    """No window was opened."""


def trigger(
    trace_dir: Path = Path(DEFAULT_TRACE_DIR),
    /,
    *,
    steps: int = 3,
    job: str | None = None,
    timeout: float = 120.0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Have a job that is running, and is slow now, record its next few steps.

    The job was started with this folder as its trace_dir, at whatever window, or
    none (start_step: null), and chakra_profile.trigger.file is on, as it is by
    default. It looks for a request once a second. All ranks that record do so at the
    same steps, some seconds ahead; where one has gone past them before it hears of
    it, none does, and this command says so. What is recorded is merged and summed up
    as any other window, also while the job goes on.

    A job can do it by itself: chakra_profile.trigger.slow_factor=3 records after a
    step that takes 3 times the median, trigger.signal=SIGUSR2 when the signal comes.
    All of them together open trigger.max windows in a run.

    Exit status: 0 if steps are recorded, 1 if not.

    Examples:
        chakra-capture trigger ./traces
        chakra-capture trigger ./traces --steps 5 --job 4711 --json

    Parameters
    ----------
    trace_dir
        Folder that the job writes to.
    steps
        How many steps to record; at most the job's chakra_profile.max_window_steps.
    job
        Which run, if several are in the folder; else the one that wrote last.
    timeout
        Seconds to wait for the job's answer; a job may look only between two steps.
    json
        Print JSON.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps} records nothing; give 1 or more.")
    if not 0 < timeout <= _LONGEST_S:
        raise UsageError(f"--timeout {timeout} is no time to wait; give seconds, at most {_LONGEST_S}.")
    from chakra_capture.trace.discovery import find_run

    paths = find_run(trace_dir, job).paths
    _check(paths)
    request = os.urandom(8).hex()
    _ask(paths, {"steps": steps, "id": request})
    with status(f"asking job {paths.job}") as show:
        answer = _wait(paths, request, timeout, show)
    if json:
        facts = {key: answer.get(key) for key in ("state", "first_step", "last_step", "num_ranks", "why")}
        print_json({"schema_version": 1, "job": paths.job, **facts})
        return EXIT_OK
    verb = "is recording" if answer["state"] == "recording" else "is going to record"
    print_line(
        f"Job {paths.job} {verb} steps {answer['first_step']} to {answer['last_step']} on "
        f"{count_of(answer['num_ranks'], 'rank')}. Then: chakra-capture merge {trace_dir}"
        + (f" --job {paths.job}" if job is not None else "")
    )
    return EXIT_OK


def _check(paths: "RunPaths") -> None:
    where = f"job {paths.job} in {paths.trace_dir}"
    try:
        owner = paths.run_dir.stat().st_uid
    except OSError as fault:
        raise TriggerError(
            f"{where} cannot be asked: {paths.run_dir}: {fault.strerror}. Only a job that chakra-capture records can."
        ) from fault
    if owner != os.geteuid():
        raise TriggerError(
            f"{where} belongs to user {owner} and ignores requests of others, such as you, user {os.geteuid()}. "
            "Ask as that user."
        )
    if paths.phases_file(0).exists():
        raise TriggerError(f"{where} has ended its training. Give a running one with --job, or start it again.")


def _ask(paths: "RunPaths", request: dict[str, object]) -> None:
    from json import dumps

    path = paths.trigger_request
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(path, flags, 0o640)
        try:
            os.write(file, dumps(request).encode())
        finally:
            os.close(file)
    except FileExistsError as fault:
        raise TriggerError(
            f"{path} is there already: somebody else asks, or a job that has ended was asked. Try again in a few "
            "seconds; if it stays, remove it."
        ) from fault
    except OSError as fault:
        raise TriggerError(f"{path} cannot be written: {fault.strerror}. Ask where, and as who, it can.") from fault


def _wait(paths: "RunPaths", request: str, limit_s: float, show: Callable[[str], None]) -> dict[str, Any]:
    """Wait until the job says what it does; a request that nobody takes is withdrawn."""
    end = time.monotonic() + limit_s
    answer: dict[str, Any] = {}
    try:
        while time.monotonic() < end:
            answer = _answer(paths, request) or answer
            state = answer.get("state")
            if state == "refused":
                raise TriggerError(f"job {paths.job} records nothing: {answer.get('why')}.")
            if state in _FINAL:
                return answer
            show(_SAID.get(str(state), "waiting for the job"))
            time.sleep(_LOOK_S)
    finally:
        is_withdrawn = not answer and _withdraw(paths, request)
    if answer.get("state") == "announced":
        return answer
    if not answer and not is_withdrawn:
        raise TriggerError(
            f"job {paths.job} has taken the request and not answered in {limit_s:g} s: its folder may be full, or "
            "gone. Whether it records, chakra-capture inspect shows."
        )
    if answer:
        raise TriggerError(
            f"job {paths.job} has taken the request, and began no step in {limit_s:g} s; it records when it does. "
            "Wait longer with --timeout, or look whether it hangs."
        )
    raise TriggerError(
        f"job {paths.job} in {paths.trace_dir} has not taken the request in {limit_s:g} s, so it is withdrawn: it has "
        "ended, or trigger.file is off, or it has several ranks and no process group, or records elsewhere under this "
        "name. Look with: chakra-capture inspect."
    )


def _withdraw(paths: "RunPaths", request: str) -> bool:
    """Remove a request that is there still, and not what somebody else asks after a job has taken it."""
    from json import loads

    try:
        if loads(paths.trigger_request.read_bytes()).get("id") != request:
            return False
        paths.trigger_request.unlink()
    except (OSError, ValueError, AttributeError):
        return False
    return True


_SAID = {"seen": "the job has taken it; waiting for its next step", "announced": "the steps are announced to all ranks"}


def _answer(paths: "RunPaths", request: str) -> dict[str, Any] | None:
    """What the job says to this request, in the shape it should have; None if nothing."""
    from json import loads

    try:
        with paths.trigger_answer.open("rb") as file:
            content = loads(file.read(_LARGEST_ANSWER))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("id") != request:
        return None
    is_complete = all(type(content.get(key)) is int for key in ("first_step", "last_step", "num_ranks"))
    return content if is_complete or content.get("state") in ("seen", "refused") else None
