"""What the Perfetto export of merged runs takes: events per second of CPU and peak memory, rows alone and with all.

    python scripts/bench_perfetto.py RUN [RUN ...]      merged runs, such as scripts/bench_analyses.py makes

Every export is the command itself in a process of its own. "rows" leaves out what analyses make of the rows: the
critical path alone takes more than all rows. Exit status: 0 every run meets the bar for its rows, 1 one misses it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from chakra_capture.trace.schema import KINDS

BAR_EVENTS_PER_S = 200_000
ROWS = ("--kind", *(kind for kind in KINDS if kind not in ("process", "thread")))
KEPT = ("num_events", "num_bytes", "num_bytes_unpacked")


def exported(run: Path, target: Path, options: tuple[str, ...]) -> dict[str, float]:
    """Seconds of CPU and peak memory of one export, and what it says of its file."""
    call = [sys.executable, "-m", "chakra_capture", "export", "perfetto", run, "-o", target, "--overwrite", "--json"]
    with subprocess.Popen([*map(str, call), *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the export of {run} failed")
    (file,) = said["files"]
    return {
        "s": used.ru_utime + used.ru_stime,
        "mb": used.ru_maxrss * 1024 / 1e6,
        **{name: file[name] for name in KEPT},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'run':32}{'what':>6}{'events':>12}{'JSON MB':>9}{'gz MB':>7}{'CPU s':>7}{'events/s':>10}{'peak MB':>9}")
    missed = []
    with tempfile.TemporaryDirectory(prefix="bench_perfetto-") as folder:
        for run in options.runs:
            for what, kinds in (("rows", ROWS), ("all", ())):
                found = [exported(run, Path(folder) / "t.json.gz", kinds) for _ in range(options.rounds)]
                one = {name: statistics.median(each[name] for each in found) for name in found[0]}
                speed = one["num_events"] / one["s"]
                missed += [str(run)] * (what == "rows" and speed < BAR_EVENTS_PER_S)
                print(
                    f"{str(run)[-31:]:32}{what:>6}{one['num_events']:12,.0f}{one['num_bytes_unpacked'] / 1e6:9.1f}"
                    f"{one['num_bytes'] / 1e6:7.1f}{one['s']:7.2f}{speed:10,.0f}{one['mb']:9.0f}"
                )
    print(f"bar for rows ({BAR_EVENTS_PER_S:,} events/s): {'missed by ' + ', '.join(missed) if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
