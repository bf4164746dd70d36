"""Mends what torch writes into traces that no reader can use: names that are not JSON, parents that are not there.

In place and without a change of length, for a trace may be larger than memory, and seldom needs it.
"""

import mmap
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chakra_capture.annotations import THREAD_ROOT

# Where torch 2.13 writes the names that users give to annotations. The observer escapes nothing in them; Kineto
# replaces backslashes and drops control characters, but leaves double quotes.
_HOST_NODE = re.compile(
    rb'\n        "id": (?P<id>\d+), "name": "(?P<name>.*?)", "ctrl_deps": (?P<parent> *\d+),\n        "inputs": ',
    re.DOTALL,
)
_DEVICE_NAME = re.compile(rb'\n    "name": "(?P<name>[^\n]*)",\n')
_UNSAFE_IN_HOST_NAME = re.compile(rb'["\\\x00-\x1f]')
_UNSAFE_IN_DEVICE_NAME = re.compile(rb'"')
_NODE_END = b"\n      }"
_THREAD = re.compile(rb'"name": "tid", "type": "uint64", "value": (\d+)')
_PROCESS_ROOT = b"1"


@dataclass(frozen=True, slots=True)
class Repairs:
    """How many names and parents were mended."""

    names: int = 0
    parents: int = 0


def repair_host_trace(path: Path) -> Repairs:
    """Make annotation names valid JSON, and put nodes whose parent is not in the file under the root of their thread.

    An op that raises is never written, and stays the parent of all that its thread begins afterwards (torch 2.13).
    """
    num_names, ids, roots = 0, set(), {}
    parents, places = array("Q"), array("Q")
    with _mapped(path) as content:
        for match in _HOST_NODE.finditer(content):
            num_names += _repair_name(content, match, _UNSAFE_IN_HOST_NAME)
            ids.add(int(match["id"]))
            parents.append(int(match["parent"]))
            places.append(match.start("parent"))
            if match["name"] == THREAD_ROOT.encode():
                roots[_thread_of(content, match.end())] = match["id"]
        dangling = [place for place, parent in zip(places, parents, strict=True) if parent not in ids]
        for place in dangling:
            end = content.find(b",", place)
            root = roots.get(_thread_of(content, end), _PROCESS_ROOT)
            content[place:end] = (root if len(root) <= end - place else _PROCESS_ROOT).rjust(end - place)
    return Repairs(num_names, len(dangling))


def repair_device_trace(path: Path) -> Repairs:
    """Make annotation names valid JSON."""
    with _mapped(path) as content:
        names = sum(_repair_name(content, match, _UNSAFE_IN_DEVICE_NAME) for match in _DEVICE_NAME.finditer(content))
    return Repairs(names)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        yield content


def _repair_name(content: mmap.mmap, match: re.Match[bytes], unsafe: re.Pattern[bytes]) -> bool:
    name, count = unsafe.subn(b"_", match["name"])
    if count:
        content[match.start("name") : match.end("name")] = name
    return count > 0


def _thread_of(content: mmap.mmap, start: int) -> bytes | None:
    found = _THREAD.search(content, start, content.find(_NODE_END, start))
    return found[1] if found else None
