"""Small traces with round numbers, written as the real tools lay them out."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from chakra_capture.merge.rank import merge_rank
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

PID, MAIN, DEVICE, STREAM = 100, 11, 0, 7


@dataclass
class TraceBuilder:
    """Events in microseconds; each method returns the builder. Host ops enter both files unless told otherwise."""

    pid: int = PID
    host_pid: int | None = None
    rank: int | None = None
    world_size: int | None = None
    base_ns: int | None = None
    schema: str = "1.1.1-chakra.0.0.4"
    events: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    _next_id: int = 3

    def event(self, **fields: Any) -> "TraceBuilder":
        """Add one record to the device trace exactly as given."""
        self.events.append(fields)
        return self

    def op(
        self, name: str, ts: Any, dur: Any, *, tid: int = MAIN, host: bool = True, cat: str = "cpu_op", **args: Any
    ) -> "TraceBuilder":
        number = self._next_id
        self._next_id += 1
        ids = {"Record function id": number, "Ev Idx": number, **args}
        self.event(ph="X", cat=cat, name=name, pid=self.pid, tid=tid, ts=ts, dur=dur, args=ids)
        if host:
            self.nodes.append(
                {"id": number, "name": name, "rf": ids["Record function id"], "tid": tid, "ts": ts, "dur": dur,
                 "scope": 0 if cat == "cpu_op" else 7, "seq": args.get("Sequence number", -1)}
            )  # fmt: skip
        return self

    def annotation(self, name: str, ts: Any, dur: Any, **more: Any) -> "TraceBuilder":
        return self.op(name, ts, dur, cat="user_annotation", **more)

    def step(self, number: int, ts: Any, dur: Any, **more: Any) -> "TraceBuilder":
        return self.annotation(f"ProfilerStep#{number}", ts, dur, **more)

    def runtime(
        self, name: str, ts: Any, dur: Any, correlation: Any, *, tid: int = MAIN, cat: str = "cuda_runtime"
    ) -> "TraceBuilder":
        args = {"correlation": correlation, "cbid": 211}
        return self.event(ph="X", cat=cat, name=name, pid=self.pid, tid=tid, ts=ts, dur=dur, args=args)

    def kernel(
        self, name: str, ts: Any, dur: Any, correlation: Any = None, *, stream: int = STREAM, device: int = DEVICE,
        cat: str = "kernel", **args: Any
    ) -> "TraceBuilder":  # fmt: skip
        known = {"device": device, "stream": stream, **args}
        if correlation is not None:
            known["correlation"] = correlation
        return self.event(ph="X", cat=cat, name=name, pid=device, tid=stream, ts=ts, dur=dur, args=known)

    def launched(self, name: str, ts: Any, dur: Any, correlation: int, *, at: Any, **more: Any) -> "TraceBuilder":
        """A kernel and the launch call of 1 us that begins at ``at``."""
        return self.runtime("cudaLaunchKernel", at, 1, correlation).kernel(name, ts, dur, correlation, **more)

    def device_dict(self) -> dict[str, Any]:
        head: dict[str, Any] = {"schemaVersion": 1}
        if self.rank is not None:
            stated = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size}
            head["distributedInfo"] = {key: value for key, value in stated.items() if value is not None}
        if self.base_ns is not None:
            head["baseTimeNanoseconds"] = self.base_ns
        return {**head, "traceEvents": self.events, "traceName": "t.json"}

    def host_dict(self) -> dict[str, Any]:
        """The host trace: two roots, then the nodes under the innermost node around them."""
        roots = [_node(2, "[pytorch|profiler|execution_trace|thread]", 1, rf=0, tid=1, scope=7, seq=-1)]
        body = [_node(n["id"], n["name"], self._parent(n), n["rf"], 1, n["scope"], n["seq"]) for n in self.nodes]
        process = _node(1, "[pytorch|profiler|execution_trace|process]", 1, rf=0, tid=1, scope=7, seq=-1)
        return {
            "schema": self.schema,
            "pid": self.pid if self.host_pid is None else self.host_pid,
            "time": "2026-01-01 00:00:00",
            "start_ts": 1,
            "nodes": [*roots, *body, process],
            "finish_ts": 2,
        }

    def _parent(self, node: dict[str, Any]) -> int:
        around = [
            other for other in self.nodes
            if other is not node and other["tid"] == node["tid"] and other["ts"] <= node["ts"]
            and node["ts"] + node["dur"] <= other["ts"] + other["dur"]
            and (other["ts"], -other["dur"], other["id"]) < (node["ts"], -node["dur"], node["id"])
        ]  # fmt: skip
        return max(around, key=lambda n: (n["ts"], -n["dur"], n["id"]))["id"] if around else 2

    def write(self, folder: Path, rank: int = 0, *, cycle: int = 0, job: str = "0", gz: bool = False) -> Path:
        """Write both files of one rank in this project's own layout."""
        name = f"rank-{rank}{f'.cycle-{cycle}' if cycle else ''}.json{'.gz' if gz else ''}"
        write_json(folder / f"{job}_chakra" / name, self.host_dict())
        write_json(folder / f"{job}_kineto" / name, self.device_dict())
        return folder

    def write_device(self, path: Path) -> Path:
        return write_json(path, self.device_dict())

    def write_host(self, path: Path) -> Path:
        return write_json(path, self.host_dict())

    def merged(self, folder: Path, *, host: bool = True) -> MergedTrace:
        """Merge what was built and read the tables back."""
        host_file = self.write_host(folder / "h.json") if host else None
        files = WindowFiles(host_file, self.write_device(folder / "d.json"))
        return merge_files(folder / "out", files)


def merge_files(out: Path, *windows: WindowFiles, rank: int = 0, **options: bool) -> MergedTrace:
    merge_rank(rank, list(windows), out, MergeOptions(**options))
    return MergedTrace(rank, out)


def _node(number: int, name: str, parent: int, rf: int, tid: int, scope: int, seq: int) -> dict[str, Any]:
    values: dict[str, Any] = {"values": [], "shapes": [], "types": [], "strides": []}
    ints = {"rf_id": rf, "fw_parent": 0, "seq_id": seq, "scope": scope, "tid": tid, "fw_tid": 0}
    attrs = [{"name": key, "type": "int64" if key == "seq_id" else "uint64", "value": v} for key, v in ints.items()]
    attrs.append({"name": "op_schema", "type": "string", "value": ""})
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": values, "outputs": values, "attrs": attrs}


def write_json(path: Path, content: Any) -> Path:
    """Write JSON with one element per line, compressed if the name ends in gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(content, indent=1) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def assert_table(frame: pl.DataFrame, expected: str) -> None:
    """Compare a whole table with comma-separated text; an empty field is null."""
    lines = [line.strip() for line in expected.strip().splitlines()]
    header = lines[0].split(",")
    shown = [",".join("" if v is None else _cell(v) for v in row) for row in frame.select(header).iter_rows()]
    assert shown == lines[1:]


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
