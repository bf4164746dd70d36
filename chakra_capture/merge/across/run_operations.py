"""The communication of all ranks of a run in one frame, its process groups told apart by name and members."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
class _Part:
    """The operations of some ranks; ``kinds`` and ``groups`` go together row by row."""

    rows: pl.DataFrame
    kinds: pl.DataFrame
    ranks: list[int]
    groups: list[Group]


def read_operations(ranks: Mapping[int, Path], world_size: int | None = None) -> Operations:
    """Read ``communication.parquet`` of every rank; one that cannot be read costs only that rank.

    Args:
        ranks: folder of each rank.
        world_size: ranks of the job where that is stated; an empty list of members means all of them.
    """
    num_rows: dict[int, int] = {}
    unreadable: dict[int, str] = {}
    members = _Members(world_size)
    parts = [_part(table, members) for table in _tables(ranks, num_rows, unreadable)]
    known: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for part in parts:
        for group in part.groups:
            if group.name is not None and group.members is not None:
                known[group.name].add(group.members)
    codes: dict[Group, int] = {}
    rows, kinds, num_kinds = [], [], 0
    for part in parts:
        resolved = (_resolved(rank, group, known) for rank, group in zip(part.ranks, part.groups, strict=True))
        group_codes = [codes.setdefault(group, len(codes)) for group in resolved]
        kinds.append(part.kinds.with_columns(pl.Series("group", group_codes, dtype=pl.Int32)))
        rows.append(part.rows.with_columns(pl.col("kind") + num_kinds))
        num_kinds += part.kinds.height
    return Operations(
        rows=pl.concat(rows, how="vertical_relaxed", rechunk=True) if rows else pl.DataFrame(schema=_ROWS),
        kinds=pl.concat(kinds, rechunk=True) if kinds else pl.DataFrame(schema=_KINDS),
        groups=tuple(codes),
        num_rows=num_rows,
        unreadable=unreadable,
    )


# So much is read before it is worked on: of a small table most of the time would go into the calls.
_TOGETHER_BYTES = 1 << 24


def _tables(ranks: Mapping[int, Path], num_rows: dict[int, int], unreadable: dict[int, str]) -> Iterator[pl.DataFrame]:
    """The tables of all ranks, those of several small ones in one."""
    together: list[pl.DataFrame] = []
    num_bytes = 0
    for rank, folder in sorted(ranks.items()):
        try:
            table = _read(rank, folder / layout.COMMUNICATION_FILE)
        except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            unreadable[rank] = f"{layout.COMMUNICATION_FILE} cannot be used: {reason}"
            continue
        num_rows[rank] = table.height
        together.append(table)
        num_bytes += int(table.estimated_size())
        if num_bytes > _TOGETHER_BYTES:
            yield pl.concat(together)
            together, num_bytes = [], 0
    if together:
        yield pl.concat(together)


_NARROWABLE = (*_NUMBERS, "equal_bytes")
_NOT_READ = ("algorithm", "group_ranks")
_READ = pl.Schema({c.name: c.dtype for c in COMMUNICATION.columns if c.name not in _NOT_READ})
_LISTS = pl.Schema({"group_ranks": pl.List(pl.Int64())})
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


def _read(rank: int, path: Path) -> pl.DataFrame:
    """The table of a rank with the members of its groups, where these come first.

    In a window a name stands for one group. So its members are read where the name comes first: the lists of all rows
    would be as many numbers as there are operations times members.
    """
    with path.open("rb") as file:  # polars takes no path that is not valid UTF-8
        table = _columns(file, _READ)
        firsts = table.select(pl.struct("window", "process_group").is_first_distinct().arg_true()).to_series()
        wanted = table.height if table["process_group"].has_nulls() else int(firsts.max() or 0) + 1  # type: ignore[arg-type]
        stated = _columns(file, _LISTS, wanted)
        if wanted < table.height and stated["group_ranks"].gather(firsts).has_nulls():
            stated = _columns(file, _LISTS)
    stated = stated.vstack(stated.clear(table.height - stated.height))
    return table.with_columns(stated["group_ranks"], rank=pl.lit(rank, pl.Int64))


def _columns(file: IO[bytes], schema: pl.Schema, num_rows: int | None = None) -> pl.DataFrame:
    file.seek(0)
    table = pl.read_parquet(file, columns=list(schema), n_rows=num_rows)
    return table if table.schema == schema else table.cast(schema)


def _part(table: pl.DataFrame, members: "_Members") -> _Part:
    """Number the kinds and groups of the ranks in ``table``, and put their rows in order of issue."""
    of_row, groups = _groups(table)
    table = table.drop("group_ranks").with_columns(of_row.alias("group"))
    kinds = table.select(*_TEXTS, "group").unique(maintain_order=True)
    kinds = kinds.with_columns(kind=pl.int_range(pl.len(), dtype=pl.Int32))
    table = table.join(kinds, on=[*_TEXTS, "group"], how="left", nulls_equal=True, maintain_order="left")
    # Of a file that was cut some operations have no time: where they come among the others is not known.
    when = pl.coalesce("issued_ns", "ts_ns")
    mixed = (when.is_null().any() & when.is_not_null().any()).over("rank", "window")
    table = table.with_columns(placed=when.is_not_null() | ~mixed, place=pl.when(mixed).then(when))
    table = table.sort("rank", "window", "place", nulls_last=True, maintain_order=True)
    ts, dur = pl.col("ts_ns"), pl.col("dur_ns")
    timed = ts.is_between(0, LARGEST) & dur.is_between(0, _LONGEST)
    equal = pl.coalesce(
        pl.when(pl.col("collective").is_in(names)).then(pl.col(size)) for size, names in _EQUAL_SIZE.items()
    )
    rows = table.select(
        "rank",
        "kind",
        *(pl.col(name).cast(pl.Int64) for name in _NUMBERS),
        equal.alias("equal_bytes"),
        (pl.col("in_bytes") != pl.col("out_bytes")).fill_null(value=False).alias("uneven"),
        "placed",
        pl.when(timed).then(ts).alias("arrival"),
        pl.when(timed).then(ts + dur).alias("end"),
    )
    of_kind = groups[kinds["group"]].select("rank", "process_group", "group_ranks").rows()
    return _Part(
        _narrowed(rows.cast(_ROWS)),
        kinds.select(_TEXTS),
        [rank for rank, _, _ in of_kind],
        [Group(name, members.of(rank, listed)) for rank, name, listed in of_kind],
    )


def _narrowed(rows: pl.DataFrame) -> pl.DataFrame:
    """The same in half the memory: few numbers of a run need 64 bits."""
    numbers = rows.select(_NARROWABLE)
    fits = numbers.select(pl.all().is_between(-_INT32, _INT32).all()).row(0)
    return rows.with_columns(pl.col(name).cast(pl.Int32) for name, fit in zip(_NARROWABLE, fits, strict=True) if fit)


_GROUP = ("rank", "window", "process_group")


def _groups(table: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame]:
    """Position of every row in a table of process groups, and this table: rank, name and stated members."""
    is_named = pl.col("process_group").is_not_null()
    groups = pl.concat(
        [
            table.filter(is_named)
            .group_by(_GROUP, maintain_order=True)
            .agg(pl.col("group_ranks").drop_nulls().first()),
            table.filter(~is_named).select(*_GROUP, "group_ranks").unique(maintain_order=True),
        ]
    ).with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    named = groups.filter(is_named).drop("group_ranks")
    of_named = table.select(_GROUP).join(named, on=_GROUP, how="left", nulls_equal=True, maintain_order="left")["group"]
    if not of_named.has_nulls():
        return of_named, groups
    unnamed = table.select(*_GROUP, "group_ranks").with_row_index("at").filter(~is_named)
    found = unnamed.join(
        groups.filter(~is_named), on=[*_GROUP, "group_ranks"], how="left", nulls_equal=True, maintain_order="left"
    )
    return of_named.scatter(found["at"], found["group"]), groups


class _Members:
    """Members of process groups from the lists that ranks state; of thousands of ranks most state the same."""

    def __init__(self, world_size: int | None) -> None:
        self._world = range(world_size or 0)
        self._known: dict[tuple[int | None, ...], tuple[int, ...] | None] = {}

    def of(self, rank: int, listed: Iterable[int | None] | None) -> tuple[int, ...] | None:
        """Members as stated; None for a list that cannot be that of a group of this rank."""
        if listed is None:
            return None
        stated = tuple(listed) or tuple(self._world)
        if stated not in self._known:
            sound = {member for member in stated if member is not None and member >= 0}
            self._known[stated] = tuple(sorted(sound)) if sound == set(stated) else None
        members = self._known[stated]
        return members if members is not None and rank in members else None


def _resolved(rank: int, group: Group, known: Mapping[str, set[tuple[int, ...]]]) -> Group:
    """Give a group its members where another rank states them, and only one group of this name has this rank."""
    if group.name is None or group.members is not None:
        return group
    candidates = [members for members in known.get(group.name, ()) if rank in members]
    return Group(group.name, candidates[0]) if len(candidates) == 1 else group
