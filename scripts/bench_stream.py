"""Merge a generated device trace of many gigabytes: time, peak memory, and whether every row came out.

    python scripts/bench_stream.py DEVICE_TRACE --gigabytes 1 10 --memory-budget 1GB

DEVICE_TRACE is a real trace (Kineto, plain or gz); it is written again and again, each time with later times, higher
ids and later steps, until the file is as large as asked. Needs that much room, and the tables', in --folder.
Prints ratios of the sizes, so that growth can be seen, and fails if a row or a nanosecond of device time is missing.
"""

import argparse
import gzip
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

SHIFTED = ("External id", "correlation", "Record function id", "Sequence number", "Ev Idx")
STEP = re.compile(r"ProfilerStep#(\d+)")
ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Unit:
    """One copy of the events as a format string, its numbers, and what each grows by from copy to copy."""

    head: str
    text: str
    numbers: "np.typing.NDArray[np.int64]"
    growth: "np.typing.NDArray[np.int64]"
    rows: int
    device_ns: int

    def copy(self, number: int) -> str:
        return self.text % tuple((self.numbers + number * self.growth).tolist())


def load(path: Path) -> Any:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return json.load(file)


def unit(path: Path) -> Unit:
    trace = load(path)
    events = [
        e for e in trace.pop("traceEvents") if e.get("ph") == "X" and "dur" in e and isinstance(e.get("pid"), int)
    ]
    starts = [round(float(e["ts"]) * 1000) for e in events]
    ends = [start + round(float(e["dur"]) * 1000) for start, e in zip(starts, events, strict=True)]
    span_us = (max(ends) - min(starts)) // 1000 + 2
    steps = len({e["name"] for e in events if STEP.fullmatch(str(e.get("name")))})
    highest = {key: max((e.get("args", {}).get(key, 0) for e in events), default=0) + 1 for key in SHIFTED}
    highest["External id"] = highest["correlation"] = max(highest["External id"], highest["correlation"])
    texts, numbers, growth = [], [], []

    def field(value: int, by: int) -> str:
        numbers.append(value)
        growth.append(by)
        return "%d"

    for event, start in zip(events, starts, strict=True):
        marked = {**event, "ts": "@ts", "args": dict(event.get("args", {}))}
        present = [key for key in SHIFTED if isinstance(marked["args"].get(key), int) and marked["args"][key] > 0]
        marked["args"] |= {key: f"@{key}" for key in present}
        text = json.dumps(marked).replace("%", "%%")
        step = STEP.fullmatch(str(event.get("name")))
        if step:
            text = text.replace(step[0], f"ProfilerStep#{field(int(step[1]), steps)}")
        places = {"@ts": (start // 1000, span_us), **{f"@{key}": (event["args"][key], highest[key]) for key in present}}
        for mark in sorted(places, key=lambda mark: text.index(f'"{mark}"')):
            # Microseconds with three decimals, as Kineto writes them; the copies are whole microseconds apart.
            decimals = f".{start % 1000:03d}" if mark == "@ts" else ""
            text = text.replace(f'"{mark}"', field(*places[mark]) + decimals)
        texts.append(text)
    device_ns = sum(e - s for s, e, event in zip(starts, ends, events, strict=True) if event.get("cat") in ACTIVITIES)
    return Unit(json.dumps(trace)[:-1], ",\n".join(texts), np.array(numbers), np.array(growth), len(events), device_ns)


def pieces(of: Unit, size: int) -> Iterator[str]:
    yield f'{of.head}, "traceEvents": [\n{of.copy(0)}'
    written = len(of.head) + len(of.text)
    number = 0
    while written < size:
        number += 1
        piece = of.copy(number)
        written += len(piece)
        yield f",\n{piece}"
    yield "\n]}"


def write(of: Unit, size: int, path: Path) -> int:
    """Write the trace; how often the events are in it."""
    num_pieces = 0
    with path.open("w") as file:
        for piece in pieces(of, size):
            file.write(piece)
            num_pieces += 1
            if sys.stderr.isatty():
                print(f"\r{path.name}: {file.tell() / 1e9:.1f} GB", end="", file=sys.stderr)
    return num_pieces - 1  # the last one is the end alone


def merge(path: Path, out: Path, budget: str | None) -> tuple[float, int, int]:
    """CPU seconds, and peak memory in bytes: all of it, and that which no file backs."""
    command = [sys.executable, "-m", "chakra_capture", "merge", "--device", path, "-o", out, "--rank", "0"]
    process = subprocess.Popen([*command, *(["--memory-budget", budget] if budget else [])], stdout=subprocess.DEVNULL)
    own = 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if match := re.search(r"RssAnon:\s+(\d+)", status):
            own = max(own, int(match[1]) * 1024)
        time.sleep(0.05)
    _, status_code, usage = os.wait4(process.pid, 0)
    if status_code:
        sys.exit(f"the merge of {path} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, own


def check(out: Path, of: Unit, copies: int) -> None:
    nodes = pl.scan_parquet(out / "rank=0" / "nodes.parquet")
    activity = pl.col("kind").cast(pl.String).is_in(["kernel", "memcpy", "memset"])
    rows, device_ns = nodes.select(pl.len(), pl.col("dur_ns").filter(activity).sum()).collect(engine="streaming").row(0)
    if (rows, device_ns) != (copies * of.rows, copies * of.device_ns):
        sys.exit(f"{rows} rows and {device_ns} ns, not {copies * of.rows} and {copies * of.device_ns}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device_trace", type=Path)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--memory-budget")
    parser.add_argument("--folder", type=Path, help="where the traces and tables go; default: a temporary folder")
    given = parser.parse_args()
    of = unit(given.device_trace)
    measured = []
    for gigabytes in given.gigabytes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path, out = Path(folder) / "device.json", Path(folder) / "merged"
            copies = write(of, int(gigabytes * 1e9), path)
            cpu, peak, own = merge(path, out, given.memory_budget)
            check(out, of, copies)
            size = path.stat().st_size
            written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            spilled = json.loads((out / "rank=0" / "link.json").read_text())["windows"][0]["num_bytes_spilled"]
        measured.append((size, cpu, peak))
        print(
            f"{size / 1e9:.2f} GB, {copies * of.rows} rows: {cpu:.1f} s CPU ({size / 1e6 / cpu:.0f} MB/s), peak "
            f"{peak / 1e9:.2f} GB ({peak / size:.2f} x the file; without mapped files {own / 1e9:.2f} GB), "
            f"spilled {spilled / 1e9:.2f} GB, tables {written / 1e9:.2f} GB",
            flush=True,
        )
    if len(measured) > 1:
        (small, *first), (large, *last) = measured[0], measured[-1]
        exponents = [math.log(b / a) / math.log(large / small) for a, b in zip(first, last, strict=True)]
        print(f"growth: time {exponents[0]:.2f}, memory {exponents[1]:.2f} (exponents of the size)")


if __name__ == "__main__":
    main()
