"""``chakra-capture analyze``: one question to a run, one table; each analysis is a function that teaches it."""

from cyclopts import App

from chakra_capture.cli.analyses import device, idle, kernels, launches, memory, operators
from chakra_capture.cli.critical_path import critical_path

_HELP = """Ask a recorded run one question; the answer is one table.

    chakra-capture analyze device PATH      computing, communicating, idle?
    chakra-capture analyze idle PATH        why has the device nothing to do?
    chakra-capture analyze kernels PATH     which kernels take the time?
    chakra-capture analyze operators PATH   which ops, and what they launch?
    chakra-capture analyze launches PATH    does the host launch fast enough?
    chakra-capture analyze memory PATH      how fast are the copies?
    chakra-capture analyze critical-path PATH   what is each step made of, end to begin?

Ranks that are not merged yet are merged first. All take --rank and --step, such as 0,2-3, and --json, which
explains every column. analyze NAME --help says what is counted how. What was not recorded is "-" (JSON: null),
never 0.
"""


def analyze_app() -> App:
    """The verb with its analyses."""
    built = App(name="analyze", help=_HELP, help_format="plaintext", end_of_options_delimiter="")
    built.command(device)
    built.command(idle)
    built.command(kernels)
    built.command(operators)
    built.command(launches)
    built.command(memory)
    built.command(critical_path, name="critical-path")
    return built
