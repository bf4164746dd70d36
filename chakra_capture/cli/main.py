"""Entry points ``chakra-capture`` and ``merge-traces``."""

import gc
import sys
from io import TextIOWrapper

from cyclopts import App, CycloptsError

from chakra_capture.cli.analyze import analyze_app
from chakra_capture.cli.compare import compare
from chakra_capture.cli.config import config
from chakra_capture.cli.doctor import doctor
from chakra_capture.cli.export import export_app
from chakra_capture.cli.inspect import inspect
from chakra_capture.cli.merge import merge
from chakra_capture.cli.output import EXIT_BAD_INPUT, EXIT_USAGE, UsageError, print_error
from chakra_capture.cli.query import query
from chakra_capture.cli.report import report
from chakra_capture.cli.slice import slice_
from chakra_capture.cli.summary import summary
from chakra_capture.cli.trigger import trigger
from chakra_capture.cli.validate import validate
from chakra_capture.cli.what_if import what_if
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.memory import prepare_process

_HELP = """Record, merge, check and explain PyTorch training traces.

    chakra-capture run train.py         record a training script as it is
    chakra-capture trigger TRACE_DIR    record some steps of a running job now
    chakra-capture merge TRACE_DIR      link host and device traces of all ranks
    chakra-capture summary TRACE_DIR    see where the step time goes
    chakra-capture report TRACE_DIR     write it as a page for a browser
    chakra-capture analyze NAME PATH    one table on one question
    chakra-capture compare A B          see whether a change made steps slower
    chakra-capture what-if TRACE_DIR    see what would make steps faster
    chakra-capture query TRACE_DIR SQL  ask the tables of all ranks
    chakra-capture slice PATH -o DIR    cut some steps or ranks out of a run
    chakra-capture export et TRACE_DIR  write Chakra traces for simulators
    chakra-capture validate PATH        check .et files, or replay a run
    chakra-capture export KIND PATH     write a run in another tool's format
    chakra-capture doctor TRACE_DIR     see what can be recorded here
    chakra-capture config FILE          see a job's settings and their origins

A job can also record by itself: one callback, or two lines (see the README).
Exit status: 0 ok, 1 bad input, 2 wrong usage, 3 inconclusive, 4 regression.
"""
_RUN_HELP = "Run a training script and record it, without a change to it."


def app() -> App:
    """Build the command line."""
    built = App(
        name="chakra-capture", help=_HELP, version=_version, help_format="plaintext", end_of_options_delimiter=""
    )
    built.command(merge)
    built.command(summary)
    built.command(report)
    built.command(inspect)
    built.command(compare)
    built.command(analyze_app())
    built.command(query)
    built.command(slice_, name="slice")
    built.command(export_app())
    built.command(doctor)
    built.command(config)
    built.command(trigger)
    built.command(validate)
    built.command(what_if)
    # Imported when it is asked for: it knows all settings.
    built.command("chakra_capture.cli.run:run", name="run", end_of_options_delimiter="--", help=_RUN_HELP)
    return built


def main(argv: list[str] | None = None) -> None:
    """Run ``chakra-capture`` and leave with its exit status."""
    if argv is None:  # a process of our own
        prepare_process(merges=sys.argv[1:2] == ["merge"])
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["run"]:
        from chakra_capture.cli.run import with_script_last

        argv = ["run", *with_script_last(given[1:])]
    sys.exit(_run(app(), argv))


def merge_traces(argv: list[str] | None = None) -> None:
    """Run ``merge-traces``, which is ``chakra-capture merge``."""
    if argv is None:
        prepare_process(merges=True)
    built = App(name="merge-traces", version=_version, help_format="plaintext", help=merge.__doc__)
    built.default(merge)
    sys.exit(_run(built, argv))


def _run(built: App, argv: list[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal's encoding lacks must not end in a traceback
            stream.reconfigure(errors="replace")
    try:
        result = built(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print_error(f"{error} Try --help.")
        return EXIT_USAGE
    except UsageError as error:
        print_error(f"{error} Try --help.")
        return EXIT_USAGE
    except ChakraCaptureError as error:
        print_error(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print_error("interrupted; what was finished is kept.")
        return 130
    except BrokenPipeError:
        return EXIT_BAD_INPUT
    if argv is None:
        gc.freeze()  # or leaving looks for cycles once more, among all that was imported
    return result if isinstance(result, int) else 0


def _version() -> str:
    from importlib.metadata import version

    return version("chakra-capture")
