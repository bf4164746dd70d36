"""``chakra-capture config``: the settings that a job will have, and where each came from."""

from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from chakra_capture.cli.output import EXIT_OK, UsageError, console, plain, print_json
from chakra_capture.errors import ChakraCaptureError, SettingsError

if TYPE_CHECKING:
    from rich.console import Console

_MODULE = "chakra_capture.integrations.hydra"
_LIMIT_S = 60.0


def config(
    *arguments: str,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Print the settings that a job will have, and where each came from.

    FILE is the configuration of a Hydra application (YAML, composed with its
    defaults list as "python app.py" does), or a mapping in YAML or JSON that holds
    chakra_profile or is that section itself. KEY=VALUE goes on top, spelled as on
    the application's command line. Without FILE, settings are those of an
    application that has none: presets and what is given here.

    Each setting comes from the command line, a file, a preset or the default; the
    last word counts. A setting that cannot work ends the command with what is
    wrong, as it would end the job. What is known only when the job runs, such as
    ${hydra:runtime.output_dir}, is shown as it is written.

    Presets: one_step, nemo_sample, warm_window (a few warm steps),
    periodic_windows, phases_only, detailed, disabled.

    Examples:
        chakra-capture config conf/train.yaml
        chakra-capture config conf/train.yaml +chakra_profile=warm_window \\
            chakra_profile.trace_dir=./traces
        chakra-capture config +chakra_profile=one_step chakra_profile.trace_dir=t

    Parameters
    ----------
    arguments
        FILE, then any number of KEY=VALUE.
    json
        Print JSON.
    """
    file, overrides = _parts(list(arguments))
    found = _sections(file, overrides)
    if json:
        print_json({"schema_version": 1, "file": str(file) if file else None, "sections": found})
        return EXIT_OK
    out = console()
    for section in found:
        _print(out, section)
    return EXIT_OK


def _parts(arguments: list[str]) -> tuple[Path | None, list[str]]:
    first = arguments[0] if arguments else "="
    is_file = isfile(first) or not ("=" in first or first.startswith("~"))
    file = Path(first) if is_file else None
    overrides = arguments[1:] if file is not None else arguments
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise UsageError(f"{override} is neither the first argument, a file, nor KEY=VALUE.")
    if file is not None and not isfile(file):
        raise SettingsError(f"{file} does not exist, or is no file. Give the YAML file of a configuration.")
    return file, overrides


def _sections(file: Path | None, overrides: list[str]) -> list[dict[str, Any]]:
    from chakra_capture.cli.training_half import NoAnswerError, ask

    found = []
    try:
        for line in ask(_MODULE, str(file or ""), *overrides, limit_s=_LIMIT_S):
            if "error" in line:
                raise SettingsError(line["error"])
            if "section" in line:
                found.append(line["section"])
    except NoAnswerError as fault:
        raise ChakraCaptureError(f"The settings could not be read: {fault}.") from fault
    return found


def _print(out: "Console", section: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", title=section["key"], title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for setting in section["settings"]:
        origin = setting["origin"] if setting["is_resolved"] else f"{setting['origin']}, known when the job runs"
        table.add_row(setting["key"], plain(_shown(setting["value"])), plain(origin))
    out.print(table)
    out.print()
    for note in section["notes"]:
        out.print(plain(note))


def _shown(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
