"""Fuzz the C scanner: mutated and truncated traces under ASAN and UBSAN, survivors compared with the msgspec path.

    python scripts/fuzz_scanner.py [--inputs 60000] [--compared 6000] [--seed N] [TRACE ...]

Seeds are the small traces of the repository, and those given. Needs gcc (or the compiler in $CC).
"""

import argparse
import gzip
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from same import differences, outcome  # noqa: E402  # the tests' own comparison

from chakra_capture.trace import native  # noqa: E402
from chakra_capture.trace.device import read_device_trace  # noqa: E402
from chakra_capture.trace.host import read_host_trace  # noqa: E402
from chakra_capture.trace.reading import ReadOptions  # noqa: E402
from chakra_capture.trace.scanners import ScannerKind  # noqa: E402

SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
TOKENS = [
    b'"', b"\\", b"\\u", b"\\ud83d", b"\\ud83d\\ude00", b"\\u0000", b"{", b"}", b"[", b"]", b",", b":", b"null",
    b"true", b"NaN", b"-inf", b"-", b"0", b"00", b"1e5", b"1.5", b"9" * 18, b"9" * 19, b"-9223372036854775808",
    b"0.0005", b"4611686018427386.999", b"4611686018427387.9995", b"0.0015", b" ", b"\n", b"\t", b"\x00", b"\x1f",
    b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b'"ph":"X",', b'"args":{},', b'"name":"x",', b'"ts":1,',
    b'"pid":"7",', b'"stream":"0x0",', b'"id":1,', b'"attrs":[],', b'"value":""', b"[" * 120, b'{"a":' * 120,
    b"[" * 1100, b'"External id":"5",', b'"correlation":1.0,',
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=60_000)
    parser.add_argument("--compared", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("traces", nargs="*", type=Path)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    seeds = [*own_seeds(), *(cut for path in [*own_traces(), *options.traces] for cut in cuts(path))]
    print(f"{len(seeds)} seeds, {sum(host for host, _ in seeds)} of them host traces")
    with tempfile.TemporaryDirectory() as folder:
        sanitized(Path(folder), seeds, random.Random(seed), options.inputs)
        return compared(Path(folder), seeds, random.Random(seed + 1), options.compared)


def own_traces() -> list[Path]:
    return sorted(
        path for path in (ROOT / "traces").rglob("rank-*.json*") if path.parent.name.endswith(("_chakra", "_kineto"))
    )


def cuts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Small traces with the head and a few elements of a real one, in its own layout and re-dumped."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    key = "nodes" if "nodes" in data else "traceEvents"
    elements = data[key]
    for begin in range(0, len(elements), max(1, len(elements) // 6)):
        few = {**data, key: elements[begin : begin + 5]}
        few.pop("deviceProperties", None)
        for layout in ({}, {"separators": (",", ":")}, {"indent": 2}, {"sort_keys": True}):
            yield int(key == "nodes"), json.dumps(few, **layout).encode()


def own_seeds() -> Iterator[tuple[int, bytes]]:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": 'a"b\\ é 😀', "pid": 1, "tid": 2, "ts": 1.5, "dur": 0.001, "args":
         {"External id": 1, "Record function id": 0, "Ev Idx": 7, "Input Dims": [[1, 2], []], "Input type": ["f", ""]}},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1689179597340616, "dur": 3, "args":
         {"stream": "0x0", "device": 0, "correlation": 5, "grid": [1, 1, 1], "bytes": "x", "Addr": -1,
          "x": {"y": [None, True]}}},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": "Spans", "tid": "", "ts": 0, "args":
         {"Bytes": 4, "Total Reserved": 9}},
        {"ph": "s", "id": 1, "pid": 1, "tid": 2, "ts": 2, "cat": "ac2g", "name": "ac2g"},
        {"name": "process_name", "ph": "M", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}},
    ]  # fmt: skip
    yield 0, json.dumps({"baseTimeNanoseconds": 5, "traceEvents": events}).encode()
    yield 0, json.dumps({"traceEvents": events * 9}).encode()  # enough of each to be read together
    yield 0, json.dumps(events, indent=1, ensure_ascii=False).encode()
    values = {"values": [[1, 2, 0, 4, 4, "cpu"], 3, "<None>"], "shapes": [[2], []], "types": ["Tensor(float)", "Int"]}
    attrs = [
        {"name": n, "type": "uint64", "value": i}
        for i, n in enumerate(("rf_id", "fw_parent", "seq_id", "scope", "tid"))
    ]
    nodes = [
        {"id": i, "name": f"aten::x{i}", "ctrl_deps": 1, "inputs": values, "outputs": {**values, "strides": [[1]]},
         "attrs": [*attrs, {"name": "op_schema", "type": "string", "value": "s" * (i % 2)}]}
        for i in range(1, 5)
    ]  # fmt: skip
    yield 1, json.dumps({"schema": "1.1.1", "pid": 1, "nodes": nodes, "finish_ts": 1}).encode()
    many = [{**nodes[i % 4], "id": i} for i in range(10, 50)]
    yield 1, json.dumps({"schema": "1.1.1", "pid": 1, "nodes": many, "finish_ts": 1}).encode()
    flat = [{"name": "n", "id": i, "rf_id": i, "parent": 1, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0,
             "op_schema": "", "inputs": [1], "input_shapes": [[]], "input_types": ["Int"], "outputs": [],
             "output_shapes": [], "output_types": []} for i in range(1, 4)]  # fmt: skip
    yield 1, json.dumps({"schema": "1.0.1", "pid": 1, "nodes": flat, "finish_ts": 1}).encode()


def mutate(data: bytes, rng: random.Random, *, most: int = 4) -> bytes:
    """A few random edits; one input in five is cut short."""
    text = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(text) + 1) if text else 0
        kind = rng.randrange(6)
        if kind == 0 and at < len(text):
            text[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            text[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del text[at : at + rng.choice((1, 1, 1, 2, 5, 30))]
        elif kind == 3:
            text[at : at + rng.randint(0, 3)] = rng.choice(TOKENS)
        elif kind == 4:
            other = rng.randrange(len(text) + 1)
            text[at:at] = text[other : other + rng.randrange(60)]
        elif at < len(text):
            text[at] = rng.randrange(256)
    return bytes(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text)


def elements_of(data: bytes, host: int) -> bytes:
    """What lies behind the opening bracket of the array, which is what the core is fed."""
    head = data.find(b'"nodes"' if host else b'"traceEvents"')
    return data[data.find(b"[", max(0, head)) + 1 :]


def sanitized(folder: Path, seeds: list[tuple[int, bytes]], rng: random.Random, count: int) -> None:
    driver = folder / "fuzz"
    compiler = os.environ.get("CC", "gcc")
    source = str(ROOT / "scripts" / "fuzz_scanner.c")
    if shutil.which(compiler) is None:
        raise SystemExit(f"{compiler} is not here; name a C compiler in $CC")
    subprocess.run([compiler, *SANITIZE, "-o", str(driver), source], check=True)
    started = time.monotonic()
    inputs = []
    for _ in range(count):
        host, data = rng.choice(seeds)
        text = mutate(elements_of(data, host), rng)
        inputs.append(struct.pack("<III", host, rng.randrange(1 << 16), len(text)) + text)
    done = subprocess.run([str(driver)], input=b"".join(inputs), capture_output=True)
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        raise SystemExit(f"the scanner failed under the sanitizers (exit {done.returncode})")
    size = sum(map(len, inputs)) / 1e6
    print(
        f"{int(done.stdout)} inputs, {size:.0f} MB, whole and in pieces: no report, {time.monotonic() - started:.0f} s"
    )


def compared(folder: Path, seeds: list[tuple[int, bytes]], rng: random.Random, count: int) -> int:
    """Read mutated files both ways until ``count`` of them gave a trace."""
    if native.load() is None:
        raise SystemExit("the C scanner is not built here, so the two paths cannot be compared")
    path = folder / "trace.json"
    started = time.monotonic()
    survivors = refused = different = 0
    while survivors < count:
        host, data = rng.choice(seeds)
        path.write_bytes(mutate(data, rng, most=2))
        read = read_host_trace if host else read_device_trace
        size = rng.choice((1, 7, 64, 4096, 1 << 20))
        first = outcome(read, path, options=ReadOptions(ScannerKind.NATIVE, buffer_size=size))
        size = rng.choice((1, 64, 4096, 1 << 20))
        second = outcome(read, path, options=ReadOptions(ScannerKind.MSGSPEC, buffer_size=size))
        survivors += not isinstance(first, str)
        refused += isinstance(first, str)
        found = differences(first, second)
        if found:
            different += 1
            kept = Path(tempfile.gettempdir()) / f"different-{different}.json"
            shutil.copy(path, kept)
            print(f"{kept}: the two paths differ in {found}")
            if different >= 10:
                break
    took = time.monotonic() - started
    print(f"{survivors} survivors and {refused} refused read both ways: {different} differ, {took:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
