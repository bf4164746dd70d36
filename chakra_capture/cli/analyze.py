"""``chakra-capture analyze``: one question to a run, one table; each analysis is a function that teaches it."""

from cyclopts import App

from chakra_capture.cli.analyses import communication, device, idle, kernels, launches, memory, operators
from chakra_capture.cli.analyze_findings import findings
from chakra_capture.cli.critical_path import critical_path
from chakra_capture.cli.optional_analyses import allocations, modules, spotted
from chakra_capture.cli.step_analyses import input_, phases, steps, stragglers

_HELP = """Ask a recorded run one question; the answer is one table.

    chakra-capture analyze findings PATH      what is wrong, what does it cost?
    chakra-capture analyze steps PATH         what did each step take?
    chakra-capture analyze device PATH        computing, communicating, idle?
    chakra-capture analyze idle PATH          why has the device nothing to do?
    chakra-capture analyze operators PATH     which ops, and what they launch?
    chakra-capture analyze kernels PATH       which kernels take the time?
    chakra-capture analyze launches PATH      does the host launch fast enough?
    chakra-capture analyze memory PATH        how fast are the copies?
    chakra-capture analyze allocations PATH   how much memory, and who takes it?
    chakra-capture analyze modules PATH       which part of the model?
    chakra-capture analyze spotted PATH       recompute, conversions, graphs?
    chakra-capture analyze communication PATH bandwidth, waiting, who waits?
    chakra-capture analyze phases PATH        which phase, on CPU and device?
    chakra-capture analyze input PATH         does the loop wait for data?
    chakra-capture analyze stragglers PATH    which rank do the others wait for?
    chakra-capture analyze critical-path PATH what had to be done last, all the way?

Ranks that are not merged yet are merged first. All take --rank and --step,
such as 0,2-3, and --json, which explains every column. analyze NAME --help
says what is counted how. What was not recorded is "-" (JSON: null), never 0.
"""


def analyze_app() -> App:
    """The verb with its analyses."""
    built = App(name="analyze", help=_HELP, help_format="plaintext", end_of_options_delimiter="")
    built.command(findings)
    built.command(steps)
    built.command(device)
    built.command(idle)
    built.command(operators)
    built.command(kernels)
    built.command(launches)
    built.command(memory)
    built.command(allocations)
    built.command(modules)
    built.command(spotted)
    built.command(communication)
    built.command(phases)
    built.command(input_, name="input")
    built.command(stragglers)
    built.command(critical_path, name="critical-path")
    return built
