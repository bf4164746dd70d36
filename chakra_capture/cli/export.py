"""``chakra-capture export KIND``: merged runs in the formats of other tools, each kind imported when it runs."""

from cyclopts import App

_HELP = """Write a merged run in the format of another tool.

    chakra-capture export chakra-json PATH    for Chakra's official chakra_converter

Merge the run first; exporting reads the merged tables alone, never the traces.
"""


def export_app() -> App:
    """Build the verb with its kinds."""
    built = App(name="export", help=_HELP, help_format="plaintext")
    built.command("chakra_capture.cli.export_chakra_json:export_chakra_json", name="chakra-json")
    return built
