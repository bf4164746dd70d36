"""The communication of all ranks of a run in one frame, its process groups told apart by name and members."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
_INT32 = (1 << 31) - 1
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
            all ranks of the operation state alike), ``uneven`` (more goes in than comes out, or less), ``placed``
            (where it comes in the order of issue is known), and
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
        rows=pl.concat(rows, how="vertical_relaxed", rechunk=True) if rows else pl.DataFrame(schema=_ROWS),
        kinds=pl.concat(kinds, rechunk=True) if kinds else pl.DataFrame(schema=_KINDS),
        groups=tuple(codes),
        num_rows={rank: each.rows.height for rank, each in found.items()},
        unreadable=unreadable,
    )


_NARROWABLE = (*_NUMBERS, "equal_bytes")
_NOT_READ = ("algorithm", "group_ranks")
_READ = pl.Schema({c.name: c.dtype for c in COMMUNICATION.columns if c.name not in _NOT_READ})
_KINDS = pl.Schema({**{name: pl.String() for name in _TEXTS}, "group": pl.Int32()})
_ROWS = pl.Schema(
    {
        "rank": pl.Int64(),
        "kind": pl.Int32(),
        **{name: pl.Int64() for name in _NUMBERS},
        "equal_bytes": pl.Int64(),
        "uneven": pl.Boolean(),
        "placed": pl.Boolean(),
        "arrival": pl.Int64(),
        "end": pl.Int64(),
    }
)


def _read(rank: int, path: Path, world_size: int | None) -> _OfRank:
    with path.open("rb") as file:  # polars takes no path that is not valid UTF-8
        table = pl.read_parquet(file, columns=list(_READ)).cast(_READ)
        of_row, groups = _groups(file, table)
    table = table.with_columns(of_row.alias("group"))
    kinds = table.select(*_TEXTS, "group").unique(maintain_order=True)
    kinds = kinds.with_columns(kind=pl.int_range(pl.len(), dtype=pl.Int32))
    table = table.join(kinds, on=[*_TEXTS, "group"], how="left", nulls_equal=True, maintain_order="left")
    # Of a file that was cut some operations have no time: where they come among the others is not known.
    when = pl.coalesce("issued_ns", "ts_ns")
    mixed = (when.is_null().any() & when.is_not_null().any()).over("window")
    table = table.with_columns(placed=when.is_not_null() | ~mixed, place=pl.when(mixed).then(when))
    table = table.sort("window", "place", nulls_last=True, maintain_order=True)
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
        "placed",
        pl.when(timed).then(ts).alias("arrival"),
        pl.when(timed).then(ts + dur).alias("end"),
    )
    stated = groups["group_ranks"][kinds["group"]]
    members = [_members(rank, listed, world_size) for listed in stated]
    names = groups["process_group"][kinds["group"]]
    found = [Group(name, of_name) for name, of_name in zip(names, members, strict=True)]
    return _OfRank(_narrowed(rows.cast(_ROWS)), kinds.select(_TEXTS), found)


def _narrowed(rows: pl.DataFrame) -> pl.DataFrame:
    """The same in half the memory: few numbers of a run need 64 bits."""
    numbers = rows.select(_NARROWABLE)
    fits = numbers.select(pl.all().is_between(-_INT32, _INT32).all()).row(0)
    return rows.with_columns(pl.col(name).cast(pl.Int32) for name, fit in zip(_NARROWABLE, fits, strict=True) if fit)


def _groups(file: IO[bytes], table: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame]:
    """Position of every row in a table of process groups, and this table: name and stated members.

    In a window a name stands for one group. So its members are read where the name comes first: the lists of all rows
    would be as many numbers as there are operations times members.
    """
    named = table.select("window", "process_group").with_row_index("at")
    key = ("window", "process_group")
    firsts = named.group_by(key, maintain_order=True).agg(pl.col("at").first())
    wanted = table.height
    if not firsts["process_group"].has_nulls():
        wanted = int(firsts["at"].max() or 0) + 1  # type: ignore[arg-type]
    stated = _lists(file, wanted)
    if wanted < table.height and stated["group_ranks"].gather(firsts["at"]).has_nulls():
        stated = _lists(file, table.height)
    known = named.head(stated.height).hstack(stated)
    is_named = pl.col("process_group").is_not_null()
    first = pl.col("group_ranks").drop_nulls().first()
    groups = pl.concat(
        [
            known.filter(is_named).group_by(key, maintain_order=True).agg(first),
            known.filter(~is_named).select(*key, "group_ranks").unique(maintain_order=True),
        ]
    ).with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    of_named = named.join(groups.filter(is_named), on=key, how="left", nulls_equal=True, maintain_order="left")["group"]
    if not of_named.has_nulls():
        return of_named, groups
    unnamed = known.filter(~is_named).join(
        groups.filter(~is_named), on=[*key, "group_ranks"], how="left", nulls_equal=True, maintain_order="left"
    )
    return of_named.scatter(unnamed["at"], unnamed["group"]), groups


def _lists(file: IO[bytes], num_rows: int) -> pl.DataFrame:
    file.seek(0)
    return pl.read_parquet(file, columns=["group_ranks"], n_rows=num_rows).cast({"group_ranks": pl.List(pl.Int64)})


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
