"""Fail if a test was skipped for a reason that is not in the list of allowed ones.

Usage: check_skips.py PYTEST_OUTPUT ALLOWED; every line of ALLOWED is a text that the reason contains.
"""

import re
import sys
from pathlib import Path

_SKIP = re.compile(r"^SKIPPED \[\d+\] (?P<where>\S+?:?\d*): (?P<reason>.*)$")


def unexpected_skips(output: str, allowed: list[str]) -> list[str]:
    """Return the skip lines of a pytest run with ``-ra`` whose reason no allowed text covers."""
    skips = [match for line in output.splitlines() if (match := _SKIP.match(line))]
    return [m.group(0) for m in skips if not any(text in m["reason"] for text in allowed)]


def allowed_reasons(file: Path) -> list[str]:
    """Texts of which a reason must hold one."""
    return [line.strip() for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]


def main(log: str, allowed_file: str) -> int:
    found = unexpected_skips(Path(log).read_text(), allowed_reasons(Path(allowed_file)))
    for line in found:
        print(f"skip not in {allowed_file}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
