"""The communication of all ranks of a run in one frame, its process groups told apart by name and members."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from chakra_capture import layout
from chakra_capture.trace.columns import LARGEST
from chakra_capture.trace.schema import COMMUNICATION

# As in nodes: longer is no duration (104 days).
_LONGEST = 1 << 53
# What all ranks of an operation state alike; other sizes differ by rank (roots, uneven splits).
_EQUAL_SIZE = {
    "comm_bytes": ("all_reduce", "broadcast", "reduce", "gather", "send", "recv"),
    "out_bytes": ("all_gather", "scatter"),
    "in_bytes": ("reduce_scatter",),
}
_TEXTS = ("collective", "dtype", "mesh_dim")
_NUMBERS = ("window", "node_id", "host_node_id", "comm_bytes", "seq", "root", "peer", "tag", "step")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group; ``name`` and ``members`` (sorted) are None where nothing tells."""

    name: str | None
    members: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Operations:
    """Communication operations of all ranks, by rank and in order of issue.

    Attributes:
        rows: ``rank``, numbers as in ``COMMUNICATION``, ``kind`` (row of ``kinds``), ``equal_bytes`` (the size that
            all ranks of the operation state alike), ``uneven`` (more goes in than comes out, or less), and
            ``arrival`` and ``end`` on the rank's own clock, null where either is not known.
        kinds: one row per ``collective``, ``dtype``, ``mesh_dim`` and ``group`` (position in ``groups``).
        num_rows: operations of each rank whose table could be read.
        unreadable: of the others, why not.
    """

    rows: pl.DataFrame
    kinds: pl.DataFrame
    groups: tuple[Group, ...]
    num_rows: Mapping[int, int]
    unreadable: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _OfRank:
    rows: pl.DataFrame
    kinds: pl.DataFrame
    groups: list[Group]


def read_operations(ranks: Mapping[int, Path], world_size: int | None = None) -> Operations:
    """Read ``communication.parquet`` of every rank; one that cannot be read costs only that rank.

    Args:
        ranks: folder of each rank.
        world_size: ranks of the job where that is stated; an empty list of members means all of them.
    """
    found: dict[int, _OfRank] = {}
    unreadable: dict[int, str] = {}
    for rank, folder in sorted(ranks.items()):
        try:
            found[rank] = _read(rank, folder / layout.COMMUNICATION_FILE, world_size)
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            unreadable[rank] = f"{layout.COMMUNICATION_FILE} cannot be used: {reason}"
    known: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for each in found.values():
        for group in each.groups:
            if group.name is not None and group.members is not None:
                known[group.name].add(group.members)
    codes: dict[Group, int] = {}
    rows, kinds, num_kinds = [], [], 0
    for rank, each in found.items():
        resolved = (_resolved(rank, group, known) for group in each.groups)
        group_codes = [codes.setdefault(group, len(codes)) for group in resolved]
        kinds.append(each.kinds.with_columns(pl.Series("group", group_codes, dtype=pl.Int32)))
        rows.append(each.rows.with_columns(pl.col("kind") + num_kinds))
        num_kinds += each.kinds.height
    return Operations(
        rows=pl.concat(rows, rechunk=True) if rows else pl.DataFrame(schema=_ROWS),
        kinds=pl.concat(kinds, rechunk=True) if kinds else pl.DataFrame(schema=_KINDS),
        groups=tuple(codes),
        num_rows={rank: each.rows.height for rank, each in found.items()},
        unreadable=unreadable,
    )


_KINDS = pl.Schema({**{name: pl.String() for name in _TEXTS}, "group": pl.Int32()})
_ROWS = pl.Schema(
    {
        "rank": pl.Int64(),
        "kind": pl.Int32(),
        **{name: pl.Int64() for name in _NUMBERS},
        "equal_bytes": pl.Int64(),
        "uneven": pl.Boolean(),
        "arrival": pl.Int64(),
        "end": pl.Int64(),
    }
)


def _read(rank: int, path: Path, world_size: int | None) -> _OfRank:
    wanted = [c.name for c in COMMUNICATION.columns if c.name not in ("algorithm", "issued_ns")]
    keys = [*_TEXTS, "process_group", "group_ranks"]
    with path.open("rb") as file:  # polars takes no path that is not valid UTF-8
        table = pl.read_parquet(file, columns=wanted)
    table = table.select(pl.col(name).cast(COMMUNICATION.schema[name]) for name in wanted)
    kinds = table.select(keys).unique(maintain_order=True).with_columns(kind=pl.int_range(pl.len(), dtype=pl.Int32))
    table = table.join(kinds, on=keys, how="left", nulls_equal=True, maintain_order="left").drop("group_ranks")
    members = [_members(rank, listed, world_size) for listed in kinds["group_ranks"]]
    groups = [Group(name, found) for name, found in zip(kinds["process_group"], members, strict=True)]
    ts, dur = pl.col("ts_ns"), pl.col("dur_ns")
    timed = ts.is_between(0, LARGEST) & dur.is_between(0, _LONGEST)
    equal = pl.coalesce(
        pl.when(pl.col("collective").is_in(names)).then(pl.col(size)) for size, names in _EQUAL_SIZE.items()
    )
    rows = table.select(
        pl.lit(rank, pl.Int64).alias("rank"),
        "kind",
        *(pl.col(name).cast(pl.Int64) for name in _NUMBERS),
        equal.alias("equal_bytes"),
        (pl.col("in_bytes") != pl.col("out_bytes")).fill_null(value=False).alias("uneven"),
        pl.when(timed).then(ts).alias("arrival"),
        pl.when(timed).then(ts + dur).alias("end"),
    )
    return _OfRank(rows.cast(_ROWS), kinds.select(_TEXTS), groups)


def _members(rank: int, listed: Iterable[int | None] | None, world_size: int | None) -> tuple[int, ...] | None:
    """Members as stated; None for a list that cannot be that of a group of this rank."""
    if listed is None:
        return None
    stated = set(listed)
    if not stated and world_size:
        stated = set(range(world_size))
    members = sorted(member for member in stated if member is not None and member >= 0)
    return tuple(members) if len(members) == len(stated) and rank in stated else None


def _resolved(rank: int, group: Group, known: Mapping[str, set[tuple[int, ...]]]) -> Group:
    """Give a group its members where another rank states them, and only one group of this name has this rank."""
    if group.name is None or group.members is not None:
        return group
    candidates = [members for members in known.get(group.name, ()) if rank in members]
    return Group(group.name, candidates[0]) if len(candidates) == 1 else group
