"""What the arguments of one row say about the communication it belongs to: operation, group, sizes, peers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from chakra_capture.merge.collectives import stated_collective
from chakra_capture.trace.process_groups import MOST_RANKS, ranks_in_text, sound_ranks

# Element types as torch's C++ (traces) and NCCL's records spell them, by torch's name, with their bytes.
_DTYPES = {
    "float": ("float32", 4), "double": ("float64", 8), "half": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "long int": ("int64", 8), "long": ("int64", 8), "int": ("int32", 4), "short int": ("int16", 2),
    "short": ("int16", 2), "signed char": ("int8", 1), "char": ("int8", 1), "unsigned char": ("uint8", 1),
    "byte": ("uint8", 1), "bool": ("bool", 1), "complexfloat": ("complex64", 8), "complex<float>": ("complex64", 8),
    "complexdouble": ("complex128", 16), "complex<double>": ("complex128", 16),
    "float8_e4m3fn": ("float8_e4m3fn", 1), "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", 1), "float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
}  # fmt: skip
_LARGEST = 2**53
# Every step states the same of its operations, but for their numbers.
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFacts:
    """What is known of an operation; None where nothing tells.

    Attributes:
        group_root, group_peer: ranks within the group, as c10d's ops take them.
        root, peer: global ranks.
    """

    collective: str | None = None
    process_group: str | None = None
    description: str | None = None
    ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    dtype: str | None = None
    in_bytes: int | None = None
    out_bytes: int | None = None
    seq: int | None = None
    group_root: int | None = None
    group_peer: int | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None

    def or_else(self, other: "CommFacts") -> "CommFacts":
        """These facts, and the other's where these say nothing."""
        if self is NOTHING or other is NOTHING:
            return other if self is NOTHING else self
        both = zip(_NAMES, _values(self), _values(other), strict=True)
        return CommFacts(**{name: theirs if own is None else own for name, own, theirs in both})

    @property
    def is_whole(self) -> bool:
        """Nothing that a row could add is missing."""
        needed: tuple[object, ...] = (self.process_group, self.dtype, self.in_bytes, self.out_bytes)
        if self.collective in _WITH_ROOT:
            needed += (self.group_root if self.root is None else self.root,)
        if self.collective in _WITH_PEER:
            needed += (self.group_peer if self.peer is None else self.peer, self.tag)
        return None not in needed


_NAMES = tuple(field.name for field in fields(CommFacts))
_values = attrgetter(*_NAMES)
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
_WITH_PEER = ("send", "recv")
NOTHING = CommFacts()


def dtype_name(text: str | None) -> str | None:
    """Torch's name of an element type that a trace spells ``c10::BFloat16``, ``long int`` or ``Float``."""
    entry = _dtype(text)
    return None if entry is None else entry[0]


def _dtype(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    plain = text.removeprefix("Tensor(").removesuffix(")").replace("c10::", "").strip().lower()
    return _DTYPES.get(plain)


class _Args(msgspec.Struct):
    """Members that Kineto writes to ``record_param_comms`` and to NCCL's kernels."""

    collective: str | None = msgspec.field(name="Collective name", default=None)
    dtype: str | None = None
    num_in: int | None = msgspec.field(name="In msg nelems", default=None)
    num_out: int | None = msgspec.field(name="Out msg nelems", default=None)
    group: str | int | None = msgspec.field(name="Process Group Name", default=None)
    description: str | None = msgspec.field(name="Process Group Description", default=None)
    ranks: str | None = msgspec.field(name="Process Group Ranks", default=None)
    size: int | None = msgspec.field(name="Group size", default=None)
    start: int | None = msgspec.field(name="Global rank start", default=None)
    stride: int | None = msgspec.field(name="Global rank stride", default=None)
    seq: int | None = msgspec.field(name="Seq", default=None)
    source: int | None = msgspec.field(name="Src Rank", default=None)
    target: int | None = msgspec.field(name="Dst Rank", default=None)
    root: int | None = msgspec.field(name="Root Rank", default=None)


@lru_cache(maxsize=_MOST_KEPT)
def facts_of_args(text: str | None) -> CommFacts:
    """Facts in the args of an event; nothing where they state no collective."""
    if not text or "Collective name" not in text:
        return NOTHING
    try:
        args = msgspec.json.decode(text, type=_Args)
    except (msgspec.DecodeError, RecursionError):
        return NOTHING
    facts = _stated(args, ranks_in_text(args.ranks))
    peer = args.target if facts.collective == "send" else args.source if facts.collective == "recv" else None
    return replace(facts, seq=_count(args.seq), root=_count(args.root), peer=_count(peer))


def _stated(record: "_Args | _Details", listed: list[int] | None) -> CommFacts:
    """What both the device trace and the host trace state of an operation."""
    dtype = _dtype(record.dtype)
    return CommFacts(
        collective=stated_collective(record.collective or ""),
        process_group=None if record.group in (None, "") else str(record.group),
        description=record.description or None,
        ranks=_ranks(listed, record.start, record.stride, record.size),
        group_size=_count(record.size),
        dtype=None if dtype is None else dtype[0],
        in_bytes=_bytes(record.num_in, dtype),
        out_bytes=_bytes(record.num_out, dtype),
    )


def _ranks(listed: list[int] | None, start: int | None, stride: int | None, size: int | None) -> tuple[int, ...] | None:
    """Members as listed; of a list that was cut, as start, stride and size tell."""
    if listed:
        return sound_ranks(listed)
    if start is None or stride is None or size is None or stride < 1 or not 0 < size <= MOST_RANKS:
        return None
    return sound_ranks(range(start, start + stride * size, stride))


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < _LARGEST else None


def bytes_of(count: int | None, dtype: str | None) -> int | None:
    """Bytes of so many elements of a type; None where one is not known."""
    return _bytes(count, _dtype(dtype))


def _bytes(count: int | None, dtype: tuple[str, int] | None) -> int | None:
    count = _count(count)
    return None if count is None or dtype is None else count * dtype[1]


class _Details(msgspec.Struct):
    """Attributes that the observer writes to ``record_param_comms`` (host trace schema 1.1.0 on)."""

    collective: str | None = msgspec.field(name="collective_name", default=None)
    dtype: str | None = None
    num_in: int | None = msgspec.field(name="in_msg_nelems", default=None)
    num_out: int | None = msgspec.field(name="out_msg_nelems", default=None)
    group: str | None = msgspec.field(name="pg_name", default=None)
    description: str | None = msgspec.field(name="pg_desc", default=None)
    size: int | None = msgspec.field(name="pg_size", default=None)
    start: int | None = msgspec.field(name="global_rank_start", default=None)
    stride: int | None = msgspec.field(name="global_rank_stride", default=None)


def facts_of_record(
    details: str | None, inputs: str | None, types: str | None, outputs: str | None, group_names: dict[int, str]
) -> CommFacts:
    """Facts in a ``record_param_comms`` node: its attributes, else its inputs (schemas 1.0.1 to 1.0.3).

    The inputs are the tensors, the sequence number, the group (an address, then ``[name, description]``), the rank,
    the name of the collective and its splits; ``wait`` has no tensors.

    Args:
        group_names: names of groups by the address that schema 1.0.2 writes.
    """
    return _of_details(details).or_else(_of_inputs(inputs, types, outputs, group_names))


@lru_cache(maxsize=_MOST_KEPT)
def _of_details(details: str | None) -> CommFacts:
    if not details or "collective_name" not in details:
        return NOTHING
    try:
        return _stated(msgspec.json.decode(details, type=_Details), None)
    except (msgspec.DecodeError, RecursionError):
        return NOTHING


def _of_inputs(inputs: str | None, types: str | None, outputs: str | None, group_names: dict[int, str]) -> CommFacts:
    values, kinds = _listed(inputs), _listed(types)
    name_at = next((i for i, value in enumerate(values) if isinstance(value, str)), None)
    if name_at is None or name_at < 3:
        return NOTHING
    seq, group = values[name_at - 3], values[name_at - 2]
    if isinstance(seq, list):  # later torch: the number, and whether it is one of point-to-point
        seq = seq[0] if seq else None
    named = isinstance(group, list) and len(group) == 2 and all(isinstance(part, str) for part in group)
    name = group[0] if named else group_names.get(group) if isinstance(group, int) else None
    tensors = values[: name_at - 3]
    return CommFacts(
        collective=stated_collective(values[name_at]),
        process_group=name or None,
        description=(group[1] or None) if named else None,
        dtype=_first_dtype(kinds[: len(tensors)]),
        in_bytes=_tensor_bytes(tensors),
        out_bytes=_tensor_bytes(_listed(outputs)),
        seq=_count(seq) if isinstance(seq, int) else None,
    )


def _listed(text: str | None) -> list[Any]:
    try:
        found: object = msgspec.json.decode(text) if text else []
    except (msgspec.DecodeError, RecursionError):
        return []
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class _Signature:
    """Where an op of c10d takes what (torch/csrc/distributed/c10d/Ops.cpp); None: not at all."""

    inputs: int
    outputs: int
    root: int | None = None
    peer: int | None = None
    tag: int | None = None


_IN_PLACE, _OUT_FIRST = _Signature(0, 0), _Signature(1, 0)
_SIGNATURES = {
    "allreduce_": _IN_PLACE, "allreduce_coalesced_": _IN_PLACE,
    "broadcast_": _Signature(0, 0, root=2), "reduce_": _Signature(0, 0, root=3),
    "allgather_": _OUT_FIRST, "_allgather_base_": _OUT_FIRST, "allgather_coalesced_": _OUT_FIRST,
    "allgather_into_tensor_coalesced_": _OUT_FIRST,
    "reduce_scatter_": _OUT_FIRST, "_reduce_scatter_base_": _OUT_FIRST, "reduce_scatter_tensor_coalesced_": _OUT_FIRST,
    "gather_": _Signature(1, 0, root=3), "scatter_": _Signature(1, 0, root=3),
    "alltoall_base_": _OUT_FIRST, "alltoall_": _OUT_FIRST,
    "send": _Signature(0, 0, peer=2, tag=3), "recv_": _Signature(0, 0, peer=2, tag=3),
    "recv_any_source_": _Signature(0, 0, tag=2),
}  # fmt: skip


def facts_of_op(name: str, inputs: str | None, types: str | None) -> CommFacts:
    """Facts in a node of the host trace: an op of c10d, or an annotation that a backend puts around its work.

    Args:
        name: name of the op, such as ``c10d::allreduce_`` or ``gloo:all_reduce``.
        inputs, types: JSON text of its inputs' values and types; a tensor is ``[id, storage, offset, number of
            elements, bytes of an element, device]``.
    """
    values, kinds = _listed(inputs), _listed(types)
    signature = _SIGNATURES.get(name.removeprefix("c10d::"))
    if signature is None:  # an annotation states what the rank puts in
        return CommFacts(dtype=_first_dtype(kinds), in_bytes=_tensor_bytes(values) if values else None)
    return CommFacts(
        dtype=_first_dtype([_at(kinds, signature.inputs), _at(kinds, signature.outputs)]),
        in_bytes=None if name == "c10d::recv_" else _tensor_bytes([_at(values, signature.inputs)]),
        out_bytes=None if name == "c10d::send" else _tensor_bytes([_at(values, signature.outputs)]),
        group_root=_rank_at(values, signature.root),
        group_peer=_rank_at(values, signature.peer),
        tag=_rank_at(values, signature.tag),
    )


def facts_of_dims(name: str, dims: str | None, types: str | None, concrete: Sequence[object]) -> CommFacts:
    """The same from what Kineto records with shapes: dimensions and element types, where it writes both.

    Args:
        concrete: Kineto's "Concrete Inputs": plain values as text.
    """
    shapes, kinds = _listed(dims), _listed(types)
    signature = _SIGNATURES.get(name.removeprefix("c10d::"))
    if signature is None:
        return CommFacts(dtype=_first_dtype(kinds), in_bytes=_shape_bytes(shapes, kinds) if shapes else None)
    ends = [slice(at, at + 1) for at in (signature.inputs, signature.outputs)]
    in_bytes, out_bytes = (_shape_bytes(shapes[end], kinds[end]) for end in ends)
    return CommFacts(
        dtype=_first_dtype([*kinds[ends[0]], *kinds[ends[1]]]),
        in_bytes=None if name == "c10d::recv_" else in_bytes,
        out_bytes=None if name == "c10d::send" else out_bytes,
        group_root=_rank_at(concrete, signature.root),
        group_peer=_rank_at(concrete, signature.peer),
        tag=_rank_at(concrete, signature.tag),
    )


def _at(values: list[Any], at: int) -> Any:
    return values[at] if at < len(values) else None


def _rank_at(values: Sequence[object], at: int | None) -> int | None:
    value = values[at] if at is not None and at < len(values) else None
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None
    return _count(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _first_dtype(kinds: Sequence[object]) -> str | None:
    """Element type of the first tensor; ``GenericList[Tensor(float),...]`` is a list of tensors."""
    for kind in kinds:
        if isinstance(kind, str) and kind:
            plain = kind.replace("GenericList[", "").split(",")[0].rstrip("]")
            if found := dtype_name(plain):
                return found
    return None


def _tensor_bytes(values: object) -> int | None:
    """Bytes of all tensors in values of a host trace; None where one cannot be told."""
    total, todo = 0, [values]
    while todo:
        value = todo.pop()
        if not isinstance(value, list):
            if value is None or value == "<None>":
                return None
            continue
        if len(value) == 6 and isinstance(value[5], str) and all(type(v) is int for v in value[:5]):
            count, width = value[3:5]
            if not (0 <= count < _LARGEST and 0 <= width < 1 << 10):
                return None
            total += count * width
        else:
            todo += value
    return total if total < _LARGEST else None


def _shape_bytes(shapes: list[Any], kinds: list[Any]) -> int | None:
    """Bytes of tensors of these shapes and element types; None where an element type is not known."""
    total = 0
    for shape, kind in zip(shapes, kinds, strict=False):
        dtype = _dtype(kind) if isinstance(kind, str) else None
        if dtype is None or not isinstance(shape, list):
            return None
        count = 1
        for size in shape:
            if type(size) is not int or not 0 <= size < _LARGEST:
                return None
            count *= size
        total += count * dtype[1]
    return total if shapes and total < _LARGEST else None
