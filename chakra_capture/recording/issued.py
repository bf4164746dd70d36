"""What torch's flight recorder noted of the collectives of a window: a trace of gloo does not name their groups."""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
T = TypeVar("T")


class IssuedOperations:
    """Notes the numbers of the groups at both ends of a window, and what was issued in it.

    All of it is private to torch: where it is not as expected nothing is noted, and recording goes on.
    """

    def __init__(self) -> None:
        self.content: dict[str, object] | None = None
        self._start_ns = 0
        self._start: dict[str, int] = {}

    def start(self) -> None:
        """The window begins."""
        self._start_ns = time.time_ns()
        self._start = _in_peace(_counts) or {}

    def end(self) -> None:
        """The window is over: take what torch has kept; nothing where it keeps nothing, or no group is in use."""
        self.content = _in_peace(self._noted)

    def _noted(self) -> dict[str, object] | None:
        groups, ranks = _counts(), _ranks()
        dump = getattr(sys.modules["torch._C"]._distributed_c10d, "_dump_fr_trace_json", None) if groups else None
        if dump is None:
            return None
        end_ns = time.time_ns()
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        entries.sort(key=lambda entry: int(entry["record_id"]))
        inside = [entry for entry in entries if self._start_ns <= entry["time_created_ns"] <= end_ns]
        # torch keeps the latest ones; if none is of before the window, some of the window may be gone, too.
        is_cut = bool(inside) and inside[0] is entries[0] and int(entries[0]["record_id"]) > 0
        return {
            "schema_version": SCHEMA_VERSION,
            "start_ns": self._start_ns,
            "end_ns": end_ns,
            "lost": is_cut,
            "groups": [
                {"name": name, "start": self._start.get(name, 0), "end": groups.get(name), "ranks": ranks.get(name)}
                for name in sorted({*self._start, *groups})
            ],
            "operations": [_operation(entry) for entry in inside],
        }


def _in_peace(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as fault:
        logger.debug("This torch does not tell what it issued: %s", fault, exc_info=fault)
        return None


def _counts() -> dict[str, int]:
    """How many operations each process group has issued."""
    return {name: int(group._get_sequence_number_for_group()) for name, group in _groups().items()}


def _ranks() -> dict[str, list[int]]:
    """Global ranks of each process group's members, in group order."""
    distributed: Any = sys.modules.get("torch.distributed")
    return {name: distributed.get_process_group_ranks(group) for name, group in _groups().items()}


def _groups() -> dict[str, Any]:
    """Process groups of gloo by name: those of NCCL are in its traces."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    listed = list(distributed.distributed_c10d._world.pg_map.items())
    return {str(group.group_name): group for group, (backend, _) in listed if "gloo" in str(backend)}


def _operation(entry: dict[str, Any]) -> dict[str, object]:
    name, description = entry["process_group"]
    dtypes = [*entry["input_dtypes"], *entry["output_dtypes"]]
    return {
        "name": entry["profiling_name"],
        "process_group": name,
        "description": description,
        "time_ns": entry["time_created_ns"],
        "seq": entry["collective_seq_id"],
        "op": entry["op_id"],
        "dtype": dtypes[0] if dtypes else None,
        "in_elements": _elements(entry["input_sizes"]),
        "out_elements": _elements(entry["output_sizes"]),
    }


def _elements(sizes: list[list[int]]) -> int:
    total = 0
    for shape in sizes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
