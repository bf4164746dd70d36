"""One line of JSON for each record of a Chakra .et file, for people, grep and jq."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chakra_capture.export.et_reader import Attribute, EtFile, EtNode
from chakra_capture.export.et_schema import node_type_name


def dump_et(path: Path) -> Iterator[str]:
    """Give the lines: the metadata, then the nodes as they stand in the file; what is empty is left out.

    Raises:
        TraceFileError: the file cannot be opened, or is damaged from here on.
    """
    with EtFile(path) as file:
        if file.metadata is not None:
            yield _line({"version": file.metadata.version, "attrs": _attributes(file.metadata.attributes)})
        for node in file.nodes():
            yield _line(_node(node))


def _node(node: EtNode) -> dict[str, Any]:
    given = {
        "name": node.name,
        "start_us": node.start_us,
        "data_deps": node.data_deps,
        "ctrl_deps": node.ctrl_deps,
        "inputs": node.inputs._asdict() if node.inputs else None,
        "outputs": node.outputs._asdict() if node.outputs else None,
        "attrs": _attributes(node.attributes),
    }
    head = {"id": node.node_id, "type": node_type_name(node.type), "duration_us": node.duration_us}
    return head | {key: value for key, value in given.items() if value}


def _attributes(given: tuple[Attribute, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in given:
        name, again = one.name, 2
        while name in found:
            name, again = f"{one.name}#{again}", again + 1
        found[name] = one.value
    return found


def _line(record: dict[str, Any]) -> str:
    return json.dumps(speakable(record), allow_nan=False).replace("\x7f", "\\u007f")


def speakable(value: Any) -> Any:
    """What JSON has no words for is written as text: bytes as hex digits, and no numbers."""
    if isinstance(value, dict):
        return {key: speakable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [speakable(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
