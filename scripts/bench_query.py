"""Ask the merged tables of many ranks with `chakra-capture query`: time and peak memory against the size of the tables.

    python scripts/make_ranks.py RUN --ranks 64 --size 20 && merge-traces RUN && python scripts/bench_query.py RUN

Each query runs in a process of its own. Memory is said beside that of a query that reads nothing, and beside what the
table nodes takes when it is loaded whole.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import polars as pl

from chakra_capture.trace.sql import open_tables

QUERIES = {
    "no table": "SELECT 1 AS one",
    "top kernels or ops": "SELECT kind, name, count(*) AS n, sum(self_dur_ns) AS ns FROM nodes "
    "WHERE kind IN ('kernel', 'host_op') GROUP BY kind, name ORDER BY ns DESC LIMIT 10",
    "by rank": "SELECT rank, sum(dur_ns) AS ns FROM nodes WHERE kind = 'annotation' GROUP BY rank ORDER BY ns DESC",
    "one name": "SELECT rank, step, dur_ns FROM nodes WHERE name = 'gloo:all_reduce' ORDER BY dur_ns DESC LIMIT 10",
}


# Said by the process itself: what wait4 says of a child is no less than what its parent held when it began.
_RUN = """
import sys, atexit, re
from chakra_capture.cli.main import main
peak = lambda: re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
atexit.register(lambda: print("peak", peak(), file=sys.stderr))
main(sys.argv[1:])
"""


def measure(path: Path, sql: str) -> tuple[float, float, float]:
    """Wall and CPU seconds and peak MB of one query."""
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-c", _RUN, "query", str(path), sql, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu, int(done.stderr.rpartition("peak")[2]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    tables = open_tables(settings.run)
    files = [p for rank in tables.ranks for p in (tables.folder / f"rank={rank}").glob("*.parquet")]
    on_disk = sum(path.stat().st_size for path in files)
    rows = tables.frames["nodes"].select(pl.len()).collect().item()
    one = tables.frames["nodes"].filter(pl.col("rank") == tables.ranks[0]).collect()
    loaded = one.estimated_size() / max(1, one.height) * rows
    print(f"{len(tables.ranks)} ranks, {rows} rows of nodes, all tables {on_disk / 1e6:.1f} MB on disk, "
          f"nodes {loaded / 1e6:.0f} MB when loaded (by rank {tables.ranks[0]})")  # fmt: skip
    print(f"{'query':20} {'wall s':>8} {'CPU s':>8} {'peak MB':>8}")
    for name, sql in QUERIES.items():
        taken = [measure(settings.run, sql) for _ in range(settings.rounds)]
        wall, cpu, peak = (min(column) for column in zip(*taken, strict=True))
        print(f"{name:20} {wall:8.2f} {cpu:8.2f} {peak:8.0f}")


if __name__ == "__main__":
    main()
