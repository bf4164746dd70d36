"""Which communication of all ranks becomes which node: type, size and group, so that the ranks fit together.

Sizes are those of ASTRA-sim: of an all_gather what a rank puts in, of reduce_scatter and all_to_all its whole input.
What the ranks state of one operation is brought together: a simulator waits for ever where they differ.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import polars as pl

from chakra_capture.export.et_schema import CollectiveType, NodeType
from chakra_capture.export.making.turns import find_turns
from chakra_capture.trace.merged import MergedRun, MergedTrace

_T = CollectiveType
# Type in Chakra, the one that ASTRA-sim runs in its place, and what makes up comm_size.
_KINDS = {
    "all_reduce": (_T.ALL_REDUCE, _T.ALL_REDUCE, "own"),
    "reduce": (_T.REDUCE, _T.ALL_REDUCE, "own"),
    "broadcast": (_T.BROADCAST, _T.BROADCAST, "own"),
    "all_gather": (_T.ALL_GATHER, _T.ALL_GATHER, "share"),
    "gather": (_T.GATHER, _T.ALL_GATHER, "share"),
    "reduce_scatter": (_T.REDUCE_SCATTER, _T.REDUCE_SCATTER, "whole"),
    "scatter": (_T.SCATTER, _T.BROADCAST, "whole"),
    "all_to_all": (_T.ALL_TO_ALL, _T.ALL_TO_ALL, "input"),
    "barrier": (_T.BARRIER, _T.ALL_REDUCE, "none"),
}
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
_POINT_TO_POINT = ("send", "recv")
# Ranks may put in different amounts; the simulator takes one for all.
_MAY_DIFFER = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
_NEVER_NS = 1 << 62
_SMALLEST = 1  # bytes; a barrier that is simulated as an all_reduce

_READ = (
    "window", "node_id", "host_node_id", "process_group", "group_ranks", "collective", "comm_bytes", "in_bytes",
    "out_bytes", "root", "peer", "tag", "ts_ns", "dur_ns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Communication of a window of a run.

    Attributes:
        groups: id -> global ranks, for comm_group.json; ids are 1 to K, that of all ranks is 1.
        by_rank: per rank a table with a row for each node: ``node_id``, ``host_node_id``, ``collective``,
            ``node_type``, ``comm_type``, ``comm_size`` (bytes), ``group`` (-1 of send and recv), ``root``, ``src``,
            ``dst``, ``tag``, ``turn`` (null: none), in order of issue.
        counts: what was changed, or could not be told, and how often.
    """

    world_size: int
    groups: dict[int, tuple[int, ...]]
    by_rank: dict[int, pl.DataFrame]
    counts: Counter[str] = field(default_factory=Counter)


def plan_operations(run: MergedRun, traces: Sequence[MergedTrace], window: int, *, lower: bool) -> Plan:
    """Make the plan for one window of the given ranks.

    Args:
        lower: write only the types that ASTRA-sim runs.
    """
    tables = [_read(trace, window) for trace in traces]
    world = _world_size(traces, tables)
    named, counts = _Groups(tables, world), Counter[str]()
    rows = pl.concat([named.numbered(table) for table in tables], how="vertical")
    rows = _with_sizes(_with_operation(rows, run, window), lower=lower)
    rows = _brought_together(rows, counts)
    counts["ranks of the run not merged, which simulators will miss"] += world - len(traces)
    counts["process group not recorded, taken as all ranks"] += rows.filter("is_guess").height
    rows = _without_unknown(rows, counts)
    if lower:
        for name, (own, instead, _) in _KINDS.items():
            if own != instead:
                counts[f"{name} lowered to {instead.name}"] += rows.filter(pl.col("collective") == name).height
    ids = named.ids(rows.filter(pl.col("node_type") == NodeType.COMM_COLL_NODE)["key"].unique().to_list())
    rows = rows.with_columns(group=pl.col("key").replace_strict(ids, default=-1, return_dtype=pl.Int64))
    is_collective = pl.col("node_type") == NodeType.COMM_COLL_NODE
    rows = rows.with_columns(group=pl.when(is_collective).then("group").otherwise(-1))
    rows = _with_turns(rows, counts, lower=lower).select("rank", *_WRITTEN)
    by_rank = {trace.rank: rows.filter(pl.col("rank") == trace.rank).drop("rank") for trace in traces}
    groups = {number: named.members(key) for key, number in ids.items()}
    return Plan(world, dict(sorted(groups.items())), by_rank, +counts)


_WRITTEN = (
    "node_id", "host_node_id", "collective", "node_type", "comm_type", "comm_size", "group", "root",
    "src", "dst", "tag", "turn",
)  # fmt: skip


def _read(trace: MergedTrace, window: int) -> pl.DataFrame:
    table = trace.communication.filter(pl.col("window") == window).select(_READ)
    return table.with_columns(rank=pl.lit(trace.rank, pl.Int64))


def _world_size(traces: Sequence[MergedTrace], tables: Iterable[pl.DataFrame]) -> int:
    """As the traces state it; at least so large that every rank that is named is in it."""
    found = [trace.rank + 1 for trace in traces]
    for trace in traces:
        devices = [one.get("device") or {} for one in trace.link["windows"]]
        found += [size for one in devices if isinstance(size := one.get("world_size"), int)]
    for table in tables:
        highest = table["group_ranks"].list.max().max()
        found += [int(highest) + 1] if highest is not None else []  # type: ignore[arg-type]
    return max(found, default=0)


class _Groups:
    """Process groups of the run: a name stands for different members on different ranks."""

    def __init__(self, tables: Sequence[pl.DataFrame], world: int) -> None:
        self._world = tuple(range(world))
        self._keys: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self._stated: dict[str | None, set[tuple[int, ...]]] = {}
        for table in tables:
            for name, members in table.select("process_group", "group_ranks").unique().iter_rows():
                if members is not None:
                    self._stated.setdefault(name, set()).add(tuple(members) or self._world)

    def numbered(self, table: pl.DataFrame) -> pl.DataFrame:
        """Add ``key``, ``num_members`` and ``is_guess`` (nothing tells the members)."""
        distinct = table.select("rank", "process_group", "group_ranks").unique(maintain_order=True)
        found = [self._of(*row) for row in distinct.iter_rows()]
        keys, guessed = ([one[at] for one in found] for at in (0, 1))
        distinct = distinct.with_columns(
            key=pl.Series(keys, dtype=pl.Int64),
            is_guess=pl.Series(guessed, dtype=pl.Boolean),
            num_members=pl.Series([len(self.members(key)) for key in keys], dtype=pl.Int64),
        )
        on = ["rank", "process_group", "group_ranks"]
        return table.join(distinct, on=on, how="left", nulls_equal=True, maintain_order="left").drop(on[1:])

    def _of(self, rank: int, name: str | None, listed: list[int] | None) -> tuple[int, bool]:
        stated = None if listed is None else tuple(listed) or self._world
        if stated is None:
            candidates = [members for members in self._stated.get(name, ()) if rank in members]
            stated = candidates[0] if len(candidates) == 1 else None
        members = self._world if stated is None else stated
        return self._keys.setdefault((name, members), len(self._keys)), stated is None

    def members(self, key: int) -> tuple[int, ...]:
        """Ranks of a group."""
        return [*self._keys][key][1]

    def ids(self, used: Iterable[int]) -> dict[int, int]:
        """Number the groups that are used from 1: one of all ranks first, which is there in any case."""
        wanted = set(used)
        ordered = sorted(
            (members != self._world, members, name or "", key) for (name, members), key in self._keys.items()
        )
        chosen = [key for _, _, _, key in ordered if key in wanted]
        if len(self._world) > 1 and not (chosen and self.members(chosen[0]) == self._world):
            chosen.insert(0, self._keys.setdefault((None, self._world), len(self._keys)))
        return {key: number for number, key in enumerate(chosen, 1)}


def _with_operation(rows: pl.DataFrame, run: MergedRun, window: int) -> pl.DataFrame:
    """Add ``op``: equal on all ranks for one operation, and a number of its own for what was matched with none."""
    on = ["rank", "node_id", "host_node_id"]
    matched = pl.DataFrame(schema={**dict.fromkeys(on, pl.Int64), "op": pl.Int64})
    if run.collectives is not None:
        of_window = run.collectives.filter(pl.col("window") == window)
        matched = of_window.select(*on, op=pl.col("collective_id").cast(pl.Int64)).unique(on, maintain_order=True)
    rows = rows.join(matched, on=on, how="left", nulls_equal=True, maintain_order="left")
    return rows.with_columns(op=pl.coalesce("op", -1 - pl.int_range(pl.len(), dtype=pl.Int64)))


def _with_sizes(rows: pl.DataFrame, *, lower: bool) -> pl.DataFrame:
    """Add type and size of each operation, as far as its own rank tells."""
    collective, members = pl.col("collective"), pl.col("num_members")
    kinds = {name: int(instead if lower else own) for name, (own, instead, _) in _KINDS.items()}
    sizes = {name: size for name, (_, _, size) in _KINDS.items()}
    size_of = collective.replace_strict(sizes, default=None, return_dtype=pl.String)
    size = (
        pl.when(size_of == "share")
        .then(pl.coalesce("in_bytes", pl.col("out_bytes") // members))
        .when(size_of == "whole")
        .then(pl.coalesce("in_bytes", pl.col("out_bytes") * members))
        .when(size_of == "input")
        .then(pl.coalesce("in_bytes", "out_bytes"))
        .when(size_of == "none")
        .then(_SMALLEST if lower else 0)
        .otherwise("comm_bytes")
    )
    is_send, is_recv = collective == "send", collective == "recv"
    node_type = (
        pl.when(is_send)
        .then(int(NodeType.COMM_SEND_NODE))
        .when(is_recv)
        .then(int(NodeType.COMM_RECV_NODE))
        .otherwise(int(NodeType.COMM_COLL_NODE))
    )
    return rows.with_columns(
        node_type=node_type,
        comm_type=collective.replace_strict(kinds, default=None, return_dtype=pl.Int64),
        comm_size=size,
        root=pl.when(collective.is_in(_WITH_ROOT)).then("root"),
    )


def _brought_together(rows: pl.DataFrame, counts: Counter[str]) -> pl.DataFrame:
    """Have all ranks state the same of an operation, where one knows what another does not, or amounts may differ."""
    size, collective = pl.col("comm_size"), pl.col("collective")
    is_p2p, uneven = collective.is_in(_POINT_TO_POINT), collective.is_in(_MAY_DIFFER)
    largest = size.max().over("op")
    counts["uneven amounts, the largest taken for all ranks"] += rows.filter(uneven).filter(size < largest).height
    other = pl.when(pl.len().over("op") == 2).then(pl.col("rank").sum().over("op") - pl.col("rank"))
    stated = pl.when((pl.col("peer") >= 0) & (pl.col("peer") != pl.col("rank"))).then("peer")
    peer, is_send = pl.coalesce(stated, other), collective == "send"
    tag = pl.when(pl.col("tag") >= 0).then("tag")
    return rows.with_columns(
        comm_size=pl.when(uneven).then(largest).otherwise(pl.coalesce(size, largest)),
        root=pl.coalesce("root", pl.col("root").max().over("op")),
        src=pl.when(is_p2p).then(pl.when(is_send).then("rank").otherwise(peer)),
        dst=pl.when(is_p2p).then(pl.when(is_send).then(peer).otherwise("rank")),
        tag=pl.when(is_p2p).then(pl.coalesce(tag, tag.max().over("op"), pl.lit(0))),
    )


def _with_turns(rows: pl.DataFrame, counts: Counter[str], *, lower: bool) -> pl.DataFrame:
    """Add ``turn``: ASTRA-sim must be told in which order a rank communicates."""
    if not lower:
        return rows.with_columns(turn=pl.lit(None, pl.Int64))
    end = pl.col("ts_ns") + pl.col("dur_ns")
    is_recv = pl.col("node_type") == NodeType.COMM_RECV_NODE
    told = rows.with_columns(start=pl.col("ts_ns").fill_null(-_NEVER_NS), end=end.fill_null(_NEVER_NS), is_recv=is_recv)
    rows = told.with_columns(find_turns(told))
    counts["operations that ranks have in opposite orders, left without one"] += rows.filter(
        ~pl.col("is_recv") & pl.col("turn").is_null()
    ).height
    return rows


def _without_unknown(rows: pl.DataFrame, counts: Counter[str]) -> pl.DataFrame:
    """Leave out what no simulator can run, on all its ranks: it stays in the trace as computation of its duration."""
    is_p2p = pl.col("src").is_not_null() | pl.col("dst").is_not_null()
    reason = (
        pl.when(~is_p2p & (pl.col("num_members") < 2))
        .then(pl.lit("of a group of one rank"))
        .when(pl.col("collective").is_in(_POINT_TO_POINT) & pl.any_horizontal(pl.col("src", "dst").is_null()))
        .then(pl.lit("whose peer is not recorded"))
        .when(~is_p2p & pl.col("comm_type").is_null())
        .then(pl.lit("of an unknown kind"))
        .when(pl.col("comm_size").is_null())
        .then(pl.lit("whose size is not recorded"))
    )
    rows = rows.with_columns(reason=reason)
    rows = rows.with_columns(reason=pl.coalesce("reason", pl.col("reason").max().over("op")))
    for text, number in rows.drop_nulls("reason").group_by("reason").len().sort("reason").iter_rows():
        counts[f"operations {text}, written as computation"] += number
    return rows.filter(pl.col("reason").is_null())
