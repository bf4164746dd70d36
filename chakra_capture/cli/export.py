"""``chakra-capture export``: merged runs in formats of others; each kind is a module of its own."""

from cyclopts import App

from chakra_capture.cli.export_chakra_json import export_chakra_json
from chakra_capture.cli.export_et import export_et
from chakra_capture.cli.export_graph import export_graph
from chakra_capture.cli.export_perfetto import export_perfetto

_HELP = """Write a merged run in a format of other tools.

    chakra-capture export et PATH             Chakra traces for simulators
    chakra-capture export chakra-json PATH    for Chakra's own chakra_converter
    chakra-capture export graph PATH -o DIR   dependencies as GraphML or DOT
    chakra-capture export perfetto PATH -o F  a time line for Perfetto, for HTA

Merge the run first: exports read the merged tables alone, never the traces.
"""


def export_app() -> App:
    """The verb with its kinds."""
    built = App(name="export", help=_HELP, help_format="plaintext", end_of_options_delimiter="")
    built.command(export_et, name="et")
    built.command(export_chakra_json, name="chakra-json")
    built.command(export_graph, name="graph")
    built.command(export_perfetto, name="perfetto")
    return built
