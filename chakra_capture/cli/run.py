"""``chakra-capture run``: a training script recorded without a change to it."""

import json
import os
import sys
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chakra_capture.cli.output import UsageError
from chakra_capture.config import settings_from, settings_table
from chakra_capture.layout import DEFAULT_TRACE_DIR
from chakra_capture.runner.plan import Plan

# Options of ours that take no value; what follows the script is the script's.
_FLAGS = {"-m", "--merge", "--help", "-h"}
_OWN = ("enabled", "start_step", "end_step", "trace_dir", "job_id", "windows")


def with_script_last(arguments: list[str]) -> list[str]:
    """Mark where the options of ``run`` end: what follows the script's name is the script's, after a ``--`` or not."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        is_alone = arguments[place] in _FLAGS or "=" in arguments[place] or arguments[place].startswith("--no-")
        place += 1 if is_alone else 2
    own, script = arguments[:place], arguments[place:]
    if script[:1] == ["--"]:
        del script[0]
    if script[1:2] == ["--"]:
        del script[1]
    return [*own, "--", *script] if script else own


def _other_settings() -> type:
    """Every setting that has no parameter of its own, as an option that takes its value."""
    rows = [row for row in settings_table() if row.key not in _OWN]
    made = make_dataclass(
        "Settings",
        [
            (
                row.key.replace(".", "__"),
                Annotated[
                    str | None, Parameter(name=f"--{row.key.replace('_', '-')}", help=f"{row.meaning} [{row.default}]")
                ],
                field(default=None),
            )
            for row in rows
        ],
        kw_only=True,
    )
    made.__module__ = __name__  # or cyclopts takes it for a type of Python's own
    return made


_SETTINGS = _other_settings()


def run(
    target: str,
    /,
    *arguments: str,
    module: Annotated[bool, Parameter(name=["-m"], negative=())] = False,
    start_step: int | None = None,
    end_step: int | None = None,
    trace_dir: Path = Path(DEFAULT_TRACE_DIR),
    run_name: str | None = None,
    merge: Annotated[bool, Parameter(negative=())] = False,
    settings: Annotated[Any, Parameter(name="*")] = _SETTINGS(),  # noqa: B008
) -> int:
    """Run a training script and record it, without a change to it.

    The steps are those of Lightning, MONAI, Ignite or the Hugging Face Trainer
    where the script uses one; else a step ends with the request for the first
    batch (or the first backward) after an update. Phases of every step are
    recorded, and with --start-step the traces of a window. The script gets its
    arguments, folder, input and signals as without us, and its exit status is
    that of this command.

    Examples:
        chakra-capture run train.py -- --lr 0.1
        chakra-capture run --start-step 5 --end-step 10 --merge train.py
        chakra-capture run --trace-dir logs --run-name first -m package.train
        torchrun --nproc-per-node 2 -m chakra_capture run train.py

    Parameters
    ----------
    target
        Python file, program of the PATH that is one, or with -m a module.
    arguments
        What follows is the script's.
    module
        Run a module, as python -m does.
    start_step
        First step of the window whose traces are recorded, from 0. Left out: phases alone.
    end_step
        Last step of the window; the first one if left out.
    trace_dir
        Folder for all files; created if missing.
    run_name
        First part of the folder names (the setting job_id).
    merge
        Merge the traces at the end, and show the summary of both.
    """
    if end_step is not None and start_step is None:
        raise UsageError("--end-step without --start-step records no window.")
    chosen: dict[str, Any] = {"enabled": True, "start_step": start_step, "end_step": end_step}
    if end_step is None:
        chosen["end_step"] = start_step
    chosen |= {"trace_dir": str(trace_dir), "job_id": run_name} | _given(settings)
    settings_from(chosen)  # wrong ones are said here, before anything starts
    plan = Plan(target=target, is_module=module, merge=merge, settings=chosen, is_path_safe=sys.flags.safe_path)
    command = plan.command(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


# What stands in the signature is for people: the class is made of the table of settings.
run.__annotations__["settings"] = Annotated[_SETTINGS, Parameter(name="*")]


def _given(settings: Any) -> dict[str, Any]:
    """The settings that were given, as a configuration file would hold them."""
    found: dict[str, Any] = {}
    for item in fields(settings):
        text = getattr(settings, item.name)
        if text is not None:
            *outer, last = item.name.split("__")
            place = found
            for name in outer:
                place = place.setdefault(name, {})
            place[last] = _value(text)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("null", "none"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
