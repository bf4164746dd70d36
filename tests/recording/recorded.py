"""Reading what a recording wrote, in plain Python, for the tests of the training half."""

import gzip
import json
from pathlib import Path
from typing import Any

from chakra_capture import ChakraProfileConfig
from chakra_capture.annotations import PROCESS_GROUP_INIT, parse_step


def settings(trace_dir: Path, start: int = 2, end: int = 3, **changes: Any) -> ChakraProfileConfig:
    return ChakraProfileConfig(enabled=True, start_step=start, end_step=end, trace_dir=str(trace_dir), **changes)


def read(path: Path) -> Any:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(content)


def manifest(trace_dir: Path, rank: int = 0, job: str = "0") -> Any:
    return read(trace_dir / f"{job}_run" / f"rank-{rank}.json")


def files(trace_dir: Path) -> list[str]:
    """All files of a trace_dir, relative and sorted."""
    return sorted(str(path.relative_to(trace_dir)) for path in trace_dir.rglob("*") if path.is_file())


def traces(trace_dir: Path) -> list[str]:
    """The host and device traces among them, finished or not."""
    return [name for name in files(trace_dir) if "_chakra/" in name or "_kineto/" in name]


def entries(path: Path) -> list[dict[str, Any]]:
    """The nodes of a host trace or the events of a device trace."""
    content = read(path)
    return content["nodes"] if "nodes" in content else content["traceEvents"]


def steps(path: Path) -> list[int]:
    """The numbers of the ProfilerStep annotations, in file order."""
    found = [parse_step(str(entry.get("name"))) for entry in entries(path)]
    return [number for number in found if number is not None]


def names(path: Path, prefix: str) -> list[str]:
    found = {str(entry.get("name")) for entry in entries(path)}
    return sorted((name for name in found if name.startswith(prefix)), key=lambda name: (len(name), name))


def host_ids(path: Path) -> set[int]:
    ids = set()
    for node in entries(path):
        if node["name"] != PROCESS_GROUP_INIT:
            ids |= {a["value"] for a in node["attrs"] if a["name"] == "rf_id" and a["value"] != 0}
    return ids


def device_ids(path: Path) -> set[int]:
    """Record-function ids of a device trace; what another thread had not finished at the stop is in no host trace."""
    found = [entry["args"] for entry in entries(path) if "Record function id" in entry.get("args", {})]
    return {args["Record function id"] for args in found if args.get("finished", True)} - {0}


def check_pair(trace_dir: Path, expected: list[int], rank: int = 0, cycle: int = 0, job: str = "0") -> None:
    """Both files are JSON, hold exactly these steps, and name the same operators."""
    name = f"rank-{rank}.cycle-{cycle}.json" if cycle else f"rank-{rank}.json"
    host, device = trace_dir / f"{job}_chakra" / name, trace_dir / f"{job}_kineto" / name
    assert steps(host) == expected
    assert steps(device) == expected
    assert host_ids(host)
    assert host_ids(host) == device_ids(device)
    assert read(device)["traceName"] == str(device)
