"""Write the tables of settings and columns into README.md from the code that defines them.

Usage: doc_tables.py [--check]; with --check nothing is written and the exit status says whether README is current.
"""

import re
import sys
from pathlib import Path

from chakra_capture.config import settings_table
from chakra_capture.trace.schema import EDGE_KINDS, KINDS, SIDES, TABLES

README = Path(__file__).resolve().parent.parent / "README.md"


def settings() -> str:
    rows = [f"| `{row.key}` | {row.default} | {_cell(row.meaning)} |" for row in settings_table()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def tables() -> str:
    parts = []
    for table in TABLES:
        rows = [f"| `{c.name}` | {_dtype(c.dtype)} | {_cell(c.meaning)} |" for c in table.columns]
        head = f"`{table.name}.parquet`: {table.meaning}."
        parts.append("\n".join([head, "", "| column | type | meaning |", "|---|---|---|", *rows]))
    kinds = f"`kind` of a node is one of {_listed(KINDS)}; of an edge one of {_listed(EDGE_KINDS)}. "
    parts.append(kinds + f"`src_at` and `dst_at` are {_listed(SIDES)}.")
    return "\n\n".join(parts)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _dtype(dtype: object) -> str:
    return str(dtype).split("(")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def filled(text: str) -> str:
    """Return README with every generated block made anew."""
    for name, make in (("settings", settings), ("tables", tables)):
        block = re.compile(rf"(<!-- {name}:begin [^>]*-->\n)(.*?)(<!-- {name}:end -->)", re.DOTALL)
        text = block.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[3]}", text)
    return text


def main(arguments: list[str]) -> int:
    text = README.read_text()
    wanted = filled(text)
    if "--check" not in arguments:
        README.write_text(wanted)
    elif text != wanted:
        print("README.md is not current: run scripts/doc_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
