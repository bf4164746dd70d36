"""Reading a host trace (ExecutionTraceObserver), schemas 1.0.1 to 1.1.1, into columns."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.attrs import INT_ATTRS
from chakra_capture.trace.columns import MISSING, Coded, Int64, Rows
from chakra_capture.trace.keys import match_keys
from chakra_capture.trace.nodes import NodeReader
from chakra_capture.trace.packed import Packed, pack
from chakra_capture.trace.reading import ReadFile, ReadOptions, head_integer, head_text, read_file
from chakra_capture.trace.salvage import Salvage
from chakra_capture.trace.scanners import ScannerKind
from chakra_capture.trace.spill import Spill

USER_SCOPE = 7
"""``scope`` of an annotation (torch RecordScope::USER_SCOPE)."""

_KNOWN_SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")
_PROCESS = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|process\]")
_THREAD = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|thread\]")


@dataclass(frozen=True, slots=True)
class AddedRoots:
    """Roots that the file lacks and that were added, see ``merge.roots``.

    Attributes:
        num_nodes: nodes that named a parent that is not in the file.
        missing_parents: the ids they named, the first ones.
        num_roots: roots added for them; the last nodes of the host trace.
    """

    num_nodes: int = 0
    missing_parents: tuple[int, ...] = ()
    num_roots: int = 0


@dataclass(frozen=True, slots=True)
class HostTrace:
    """One host trace; every array has one entry per node, in file order.

    Attributes:
        parent: id of the parent node (``ctrl_deps``), ``MISSING`` for the root.
        attrs: ``rf_id``, ``seq_id``, ``scope``, ``tid``, ``fw_tid``, ``fw_parent`` as written; an
            ``rf_id`` of 0 or a ``seq_id`` of -1 means none and is ``MISSING``.
        input_values, output_values: JSON text of the values, mostly tensor ids, so wide.
        details: JSON text of strides, of the outputs' shapes and types, and of the attributes that have no column.
        cycles: ids of each cycle in ``ctrl_deps``; the parent of its first, smallest id was taken away.
        scanner: what read the file.
        added: roots among the nodes that are not in the file; they come last.
        is_process, is_thread: the observer's own root nodes.
    """

    path: Path
    schema: str | None
    pid: int | None
    finished: bool
    node_id: Packed
    parent: Packed
    name: Coded
    attrs: dict[str, Packed]
    input_shapes: Coded
    input_types: Coded
    input_values: Coded
    output_values: Coded
    details: Coded
    num_duplicate_ids: int
    cycles: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    salvage: Salvage
    scanner: ScannerKind
    added: AddedRoots = AddedRoots()

    @property
    def rest(self) -> Coded:
        """JSON text of all that has no column; put together anew each time."""
        parts = (self.input_values, self.output_values, self.details)
        key = np.zeros(self.num_nodes, dtype=np.int64)
        for part in parts:  # numbered pair by pair, so that the product of three sizes cannot overflow
            key = np.unique(key * (len(part.values) + 1) + part.codes + 1, return_inverse=True)[1].ravel()
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        frames = [_frame(text) for text in self.details.values]
        none = _frame("{}")
        texts = []
        for row in first.tolist():
            code = int(self.details.codes[row])
            begin, middle, end = frames[code] if code >= 0 else none
            texts.append(f"{begin}{self.input_values[row]}{middle}{self.output_values[row]}{end}")
        return Coded(number.ravel().astype(np.int32), texts)

    @property
    def frames(self) -> tuple[Coded, Coded, Coded]:
        """``rest`` in pieces: what stands before the input values, before the output values, and after both."""
        frames = [*(_frame(text) for text in self.details.values), _frame("{}")]
        codes = np.where(self.details.codes >= 0, self.details.codes, np.int32(len(frames) - 1))
        begin, middle, end = zip(*frames, strict=True)
        return Coded(codes, begin), Coded(codes, middle), Coded(codes, end)

    @property
    def num_nodes(self) -> int:
        return len(self.node_id)

    @property
    def is_process(self) -> "np.typing.NDArray[np.bool_]":
        return self.name.mask_of(np.array([bool(_PROCESS.fullmatch(v)) for v in self.name.values], dtype=bool))

    @property
    def is_thread(self) -> "np.typing.NDArray[np.bool_]":
        return self.name.mask_of(np.array([bool(_THREAD.fullmatch(v)) for v in self.name.values], dtype=bool))


def read_host_trace(path: Path, *, scanner: ScannerKind | None = None, options: ReadOptions | None = None) -> HostTrace:
    """Read a host trace, plain or gzip; a damaged one is read as far as it is whole.

    Args:
        path: the file.
        scanner: what to read it with; None takes the C core if it is built.
        options: more on how to read; its scanner counts where ``scanner`` is None.

    Raises:
        TraceFileError: the file is missing, or holds no nodes.
    """
    options = options or ReadOptions(scanner=scanner)
    file = read_file(path, NodeReader, options)
    if not len(file.rows):
        raise TraceFileError(
            f"{path} is no host trace: it has no 'nodes' that are whole. "
            "Give the JSON that the ExecutionTraceObserver wrote."
        )
    return _trace(path, file, options.spill)


def _trace(path: Path, file: ReadFile, spill: Spill | None) -> HostTrace:
    salvage = file.salvage
    finished = head_integer(file.head.get("finish_ts")) is not None
    if not finished:
        salvage.note("not finalised (no finish_ts)")
    rows = _without_duplicates(file.rows)
    ints, texts = rows.ints, rows.texts
    node_id, deps = ints["node_id"][:], ints["ctrl_deps"][:]
    parent = np.where(deps != MISSING, deps, ints["parent"][:])
    parent[parent == node_id] = MISSING  # the process root names itself
    cycles = _break_cycles(node_id, parent)
    if cycles:
        salvage.note(_cycle_note(cycles, node_id, texts["name"]))
    schema = head_text(file.head.get("schema"))
    return HostTrace(
        path=path,
        schema=schema,
        pid=head_integer(file.head.get("pid")),
        finished=finished,
        node_id=pack(node_id, spill),
        parent=pack(parent, spill),
        name=texts["name"],
        attrs={key: pack(ints.pop(key), spill) for key in INT_ATTRS},
        input_shapes=texts["input_shapes"],
        input_types=texts["input_types"],
        input_values=texts["input_values"],
        output_values=texts["output_values"],
        details=texts["details"],
        num_duplicate_ids=len(file.rows) - len(rows),
        cycles=tuple(cycles),
        notes=tuple(_notes(schema)),
        salvage=salvage,
        scanner=file.scanner,
    )


def _without_duplicates(rows: Rows) -> Rows:
    """Of nodes with one id the last one counts, in the place of the first."""
    ids = rows.ints["node_id"][:]
    if (ids[1:] > ids[:-1]).all():  # the observer counts them up
        return rows
    unique, first = np.unique(ids, return_index=True)
    if len(unique) == len(ids):
        return rows
    last = len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]
    keep = last[np.argsort(first)]
    return Rows(
        ints={key: column[keep] for key, column in rows.ints.items()},
        texts={key: Coded(column.codes[keep], column.values) for key, column in rows.texts.items()},
        wide=rows.wide,
    )


def _break_cycles(node_id: Int64, parent: Int64) -> list[tuple[int, ...]]:
    """Take the parent of the smallest id of each cycle away."""
    position = match_keys(parent, node_id)
    known = position >= 0
    if (parent < node_id)[known].all():  # who is always older than its child is on no cycle
        return []
    # Every node climbs twice as far in each round; who has not arrived in the end is on or under a cycle.
    up = np.append(np.where(known, position, len(node_id)), len(node_id))
    for _ in range(len(node_id).bit_length() + 1):
        up = up[up]
        if (up == len(node_id)).all():
            return []
    parents = zip(node_id.tolist(), parent.tolist(), strict=True)
    cycles = find_cycles({node: None if p == MISSING else p for node, p in parents})
    for cycle in cycles:
        parent[node_id == cycle[0]] = MISSING
    return cycles


def _cycle_note(cycles: list[tuple[int, ...]], node_id: Int64, name: Coded) -> str:
    rows = [int(np.flatnonzero(node_id == number)[0]) for number in cycles[0][:4]]
    names = ", ".join(f"{node_id[row]} {(name[row] or '')[:40]}" for row in rows)
    return f"{len(cycles)} cycle(s) in ctrl_deps broken, first: {names}"


def find_cycles(parent: dict[int, int | None]) -> list[tuple[int, ...]]:
    """Cycles of a parent map, each as its ids from the smallest on; a node that names itself is none."""
    cycles: list[tuple[int, ...]] = []
    seen: dict[int, int] = {}
    for number, start in enumerate(parent):
        path: list[int] = []
        at: int | None = start
        while at is not None and at in parent and at not in seen:
            seen[at] = number
            path.append(at)
            at = parent[at]
        if at is not None and seen.get(at) == number and path:
            ring = path[path.index(at) :]
            first = ring.index(min(ring))
            cycles.append((*ring[first:], *ring[:first]))
    return cycles


def _notes(schema: str | None) -> list[str]:
    if schema is not None and schema.split("-")[0] in _KNOWN_SCHEMAS:
        return []
    return [f"unknown host trace schema {schema!r}, read by its layout"]


def _frame(details: str) -> tuple[str, str, str]:
    """What stands before the values of the inputs, between them and those of the outputs, and after both."""
    members = msgspec.json.decode(details, type=dict[str, msgspec.Raw])
    texts = {key: str(bytes(raw), "utf-8") for key, raw in members.items()}
    strides = texts.pop("input_strides", None)  # schema 1.0.1 has none
    after_inputs = "" if strides is None else f',"strides":{strides}'
    outputs = "".join(
        f',"{key}":{texts.pop(f"output_{key}")}' for key in ("shapes", "types", "strides") if f"output_{key}" in texts
    )
    rest = "".join(f",{str(msgspec.json.encode(key), 'utf-8')}:{text}" for key, text in texts.items())
    return '{"inputs":{"values":', f'{after_inputs}}},"outputs":{{"values":', f"{outputs}}}{rest}}}"
