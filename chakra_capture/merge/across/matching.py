"""Which operations of several ranks are one, and where the ranks differ.

Collectives of a process group are matched by sequence number where all its ranks state one, else k-th to k-th in order
of issue, windows told apart by their steps; sends and receives k-th to k-th per source, destination and tag. Without
sequence numbers a lost operation would shift all that follow, so nothing between two step beginnings that all ranks
agree on is used once the ranks differ there. An operation whose group nothing tells, in a run that names groups, is
matched with none; and as it may be of any group of its rank, the order of issue matches none of these there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.merge.across.run_operations import Group, Operations
from chakra_capture.trace.columns import MISSING, Bool, Int64

_NONE = -1
_LAST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Matches:
    """Operations of the run.

    Attributes:
        rows: those of ``Operations`` with their collective, dtype, mesh_dim and group, ``lane`` and ``order``, in order
            of operation and rank.
        starts: first row of each operation.
        doubtful: per operation, whether it is not certain that its rows are one operation, or they differ.
        num_ranks: per operation, how many ranks take part; ``MISSING`` where not known.
        full: per operation, whether every rank that takes part is recorded; never of one rank whose group is not known.
        mismatch: per operation, how the ranks differ or which of them lack it; null where they agree.
        differs: per operation, whether ranks contradict each other (and not merely end earlier or begin later).
        is_certain: per operation, whether the traces say that the ranks are of one process group.
        lanes: one row per lane, what is matched k-th to k-th: ``group``, ``src``, ``dst``, ``tag`` (null but for send
            and recv), ``by_seq``.
    """

    rows: pl.DataFrame
    starts: Int64
    doubtful: Bool
    num_ranks: Int64
    full: Bool
    mismatch: pl.Series
    differs: Bool
    is_certain: Bool
    lanes: pl.DataFrame

    @property
    def op(self) -> Int64:
        """Operation of each row."""
        return np.repeat(np.arange(len(self.starts)), self.num_found)

    @property
    def num_found(self) -> Int64:
        """Ranks of which each operation is recorded."""
        return np.diff(self.starts, append=self.rows.height)


def match_operations(operations: Operations) -> Matches:
    """Match the operations of all ranks; nothing is matched by nearest time."""
    kinds = operations.kinds.with_columns(pl.col(pl.String).cast(pl.Categorical))
    rows = operations.rows.hstack(kinds[operations.rows["kind"]])
    rows, lanes = _with_lanes(rows, operations.groups)
    rows = _with_keys(rows, lanes, operations.groups)
    lane, domain, key, again = (pl.col(name) for name in _KEY)
    rows = rows.sort(*_KEY, "rank")
    is_new = (lane != lane.shift()) | (domain != domain.shift()) | (key != key.shift()) | (again != again.shift())
    starts = np.flatnonzero(rows.select(is_new.fill_null(value=True)).to_series().to_numpy())
    by_seq = lanes["by_seq"].to_numpy()[rows["lane"].to_numpy()[starts]]
    differences = _differences(rows, starts, by_seq)
    present = np.array(sorted(operations.num_rows), dtype=np.int64)
    expected = _expected(rows, lanes, operations.groups, present)
    num_found = np.diff(starts, append=rows.height)
    op_lane = rows["lane"].to_numpy()[starts]
    num_ranks = lanes["num_ranks"].fill_null(MISSING).to_numpy()[op_lane]
    num_expected = expected.group_by("lane").len().sort("lane")["len"].to_numpy()[op_lane]
    unsure = rows["unsure"].to_numpy()[starts]
    incomplete = np.flatnonzero((num_found < num_expected) & ~unsure)
    lacking = _lacking(rows, starts, expected, incomplete)
    texts = _difference_texts(rows, starts, differences)
    contradicted = np.zeros(len(starts), dtype=np.bool_)
    contradicted[texts["op"].to_numpy()] = True
    doubtful = _doubtful(rows, starts, by_seq, contradicted, differences["step"])
    # It may differ only because what came before it on a rank is among the operations whose time is lost.
    shifted = contradicted & ~by_seq & np.logical_or.reduceat(rows["loses_some"].to_numpy(), starts)
    contradicted &= ~shifted
    texts = texts.filter(pl.Series(~shifted)[texts["op"]])
    contradicted[lacking.filter("within")["op"].to_numpy()] = True
    num_wanted = np.where(num_ranks == MISSING, np.maximum(num_expected, 2), num_ranks)
    return Matches(
        rows=rows,
        starts=starts,
        doubtful=doubtful | unsure,
        num_ranks=num_ranks,
        full=num_found == num_wanted,
        mismatch=_joined(len(starts), texts, _lacking_texts(lacking), _unsure_texts(unsure | shifted)),
        differs=contradicted,
        is_certain=num_ranks != MISSING,
        lanes=lanes,
    )


_KEY = ("lane", "domain", "key", "again")
_LANE = ("group", "src", "dst", "tag")


def _with_lanes(rows: pl.DataFrame, groups: tuple[Group, ...]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add ``lane``; a send or recv that names no peer has one where its group has but one other member."""
    pairs = [g.members if g.members and len(g.members) == 2 else (_NONE, _NONE) for g in groups]
    pair = pl.DataFrame(pairs, schema={"low": pl.Int64, "high": pl.Int64}, orient="row")[rows["group"]]
    rank, collective = pl.col("rank"), pl.col("collective")
    stated = pl.when((pl.col("peer") >= 0) & (pl.col("peer") != rank)).then(pl.col("peer"))
    other = pl.when(rank == pl.col("low")).then(pl.col("high")).when(rank == pl.col("high")).then(pl.col("low"))
    peer = pl.coalesce(stated, other)
    is_send, is_recv = collective.eq_missing("send"), collective.eq_missing("recv")
    rows = rows.hstack(pair).with_columns(
        src=pl.when(is_send).then(rank).when(is_recv).then(peer.fill_null(_NONE)),
        dst=pl.when(is_send).then(peer.fill_null(_NONE)).when(is_recv).then(rank),
        tag=pl.when(is_send | is_recv).then("tag"),
    )
    lanes = rows.select(_LANE).unique().sort(_LANE).with_row_index("lane").cast({"lane": pl.Int32})
    rows = rows.drop("low", "high").join(lanes, on=_LANE, how="left", nulls_equal=True, maintain_order="left")
    members = pl.Series([None if g.members is None else len(g.members) for g in groups], dtype=pl.Int64)
    is_p2p = pl.col("src").is_not_null()
    lanes = lanes.with_columns(num_ranks=pl.when(is_p2p).then(2).otherwise(members[lanes["group"]]))
    # Torch does not number a monitored barrier, which goes through the group's collectives.
    has_seq = pl.col("seq").is_not_null()
    by_rank = rows.group_by("lane", "rank").agg(
        by_seq=(has_seq | (collective == "barrier")).all() & has_seq.any() & pl.col("src").is_null().all()
    )
    by_seq = by_rank.group_by("lane").agg(pl.col("by_seq").all())
    return rows, lanes.join(by_seq, on="lane", how="left", maintain_order="left")


def _with_keys(rows: pl.DataFrame, lanes: pl.DataFrame, groups: tuple[Group, ...]) -> pl.DataFrame:
    """Add what makes rows of several ranks one operation, and their order within the window."""
    number = pl.int_range(pl.len(), dtype=pl.Int32)
    order = number.over("rank", "window", "lane", "placed")
    rows = rows.with_columns(order=pl.when("placed").then(order))
    rows = rows.join(_windows(rows), on=["rank", "window"], how="left", maintain_order="left")
    rows = rows.hstack(lanes[rows["lane"]].select("by_seq", restarts=_restarts(rows)[rows["lane"]]))
    by_seq = pl.col("by_seq")
    named = pl.Series([g.name is not None for g in groups], dtype=pl.Boolean)
    unnamed = ~named[rows["group"]] if named.any() else pl.repeat(value=False, n=rows.height, eager=True)
    rows = _with_uncertain(rows.with_columns(unnamed=unnamed))
    rows = rows.with_columns(
        domain=pl.when(by_seq & pl.col("seq").is_null())
        .then(_NONE)
        .when(by_seq & ~pl.col("restarts"))
        .then(0)
        .when(by_seq)
        .then("window")
        .otherwise("domain")
    )
    mine = ("rank", "lane", "domain")
    rows = rows.with_columns(key=number.over(*mine, "placed"), before=pl.col("step").shift().over(mine))
    in_common = pl.when(pl.col("step") >= pl.col("common_step")).then("key")
    first = pl.coalesce(in_common.min().over(mine), pl.len().over(mine))
    first = pl.when(pl.col("common_step").is_null()).then(0).otherwise(first).cast(pl.Int32)
    rows = rows.with_columns(
        key=pl.when(by_seq).then(pl.coalesce("seq", "key")).otherwise(pl.col("key") - first),
        begins_step=pl.col("step").is_not_null() & pl.col("step").ne_missing(pl.col("before")),
    )
    again = pl.when(by_seq).then(number.over(*mine, "key")).otherwise(0)
    rows = _anchored(rows.with_columns(again=again), mine)
    return rows.drop("common_step", "before", "restarts", "by_seq", "marked", "uncertain")


def _with_uncertain(rows: pl.DataFrame) -> pl.DataFrame:
    """Add which rows are matched with none.

    What names no group may be of any group of its rank: where the order of issue counts it would shift all that follow.
    """
    may_shift = pl.col("unnamed").any().over("rank", "domain", pl.col("src").is_not_null(), "tag")
    rows = rows.with_columns(uncertain=may_shift)
    shifted = pl.col("uncertain").any().over("lane", "domain")
    return rows.with_columns(uncertain=pl.when("by_seq").then(pl.col("seq").is_null()).otherwise(shifted))


def _anchored(rows: pl.DataFrame, mine: tuple[str, str, str]) -> pl.DataFrame:
    """Where no step says where ranks begin, and some have fewer operations: find out which ones these are.

    If the operations of a rank are, by kind and size, a stretch of the longest list in one place alone, that is their
    place; in several, they are matched with none (``unsure``). In no place: the k-th are compared and the difference is
    named.
    """
    signature = pl.struct("collective", "dtype", "equal_bytes", "root").rank("dense").cast(pl.Int64)
    loose = rows.filter(~pl.col("by_seq") & ~pl.col("marked") & pl.col("placed")).select(
        *mine, "key", signature=signature
    )
    lists = loose.sort(*mine, "key").group_by(mine, maintain_order=True).agg("signature")
    uneven = lists.filter(pl.col("signature").list.len().n_unique().over("lane", "domain") > 1)
    too_many = (loose["signature"].max() or 0) > _MOST_SIGNATURES  # type: ignore[operator]
    found = []
    for key, ranks in uneven.partition_by("lane", "domain", as_dict=True, maintain_order=True).items():
        texts = [_as_text(listed) for listed in ranks["signature"]]
        longest = max(texts, key=len)
        at = [longest.find(text) for text in texts]
        # Which of two longest lists that differ to look in?
        several = too_many or any(len(text) == len(longest) and text != longest for text in texts)
        several |= any(longest.find(text, first + 1) >= 0 for text, first in zip(texts, at, strict=True) if first >= 0)
        found += [(*key, rank, max(first, 0), several) for rank, first in zip(ranks["rank"], at, strict=True)]
    of_rows = {name: rows.schema[name] for name in ("lane", "domain", "rank", "key")}
    schema = pl.Schema({**of_rows, "unsure": pl.Boolean()})
    shifts = pl.DataFrame(found, schema=schema, orient="row").rename({"key": "shift"})
    rows = rows.join(shifts, on=["lane", "domain", "rank"], how="left", maintain_order="left")
    rows = rows.with_columns(loses_some=(~pl.col("placed")).any().over(mine))
    unsure = pl.col("unsure").fill_null(value=False) | (~pl.col("placed") & ~pl.col("by_seq")) | pl.col("uncertain")
    return rows.with_columns(
        unsure=unsure,
        key=pl.col("key") + pl.col("shift").fill_null(0),
        again=pl.when(unsure).then(pl.col("rank") + 1).otherwise("again"),
    ).drop("shift")


_AFTER_SURROGATES = 0x10000
_MOST_SIGNATURES = 0x10FFFF - _AFTER_SURROGATES


def _as_text(signatures: pl.Series) -> str:
    """One character for each number, so that a stretch is found by searching text."""
    codes = np.minimum(signatures.to_numpy(), _MOST_SIGNATURES).astype(np.uint32) + _AFTER_SURROGATES
    return str(codes.view(f"<U{len(codes)}")[0]) if len(codes) else ""


def _restarts(rows: pl.DataFrame) -> pl.Series:
    """Per lane, whether sequence numbers begin anew in a later window: then windows are told apart."""
    spans = rows.group_by("rank", "lane", "window").agg(low=pl.col("seq").min(), high=pl.col("seq").max())
    before = pl.col("high").shift().over("rank", "lane", order_by="window")
    falls = (pl.col("low") < before).fill_null(value=False)
    return spans.with_columns(falls=falls).group_by("lane").agg(pl.col("falls").any()).sort("lane")["falls"]


def _windows(rows: pl.DataFrame) -> pl.DataFrame:
    """Which windows of the ranks are one (``domain``), and the step from which on all of them are there.

    Windows whose steps overlap are one. Where a window marks no step, or a rank records a step twice, the n-th windows
    are. ``common_step`` is null where the windows begin alike, or one of them is not ``marked`` by steps.
    """
    step = pl.col("step")
    spans = rows.group_by("rank", "window").agg(first=step.min(), last=step.max()).sort("rank", "window")
    overlaps = (pl.col("first") <= pl.col("last").cum_max().shift()).over("rank", order_by="first")
    if spans["first"].has_nulls() or spans.select(overlaps.any()).item():
        domain = pl.col("window")
    else:
        spans = spans.sort("first")
        domain = (pl.col("first") > pl.col("last").cum_max().shift()).fill_null(value=False).cum_sum()
    spans = spans.with_columns(domain=domain.cast(rows.schema["window"]))
    # Several windows of a rank may make up one domain.
    begins = spans.group_by("rank", "domain").agg(pl.col("first").min())
    begins = begins.group_by("domain").agg(
        common_step=pl.col("first").max(),
        differ=pl.col("first").n_unique() > 1,
        marked=pl.col("first").is_not_null().all(),
    )
    common = pl.when(pl.col("differ") & pl.col("marked")).then("common_step")
    return spans.join(begins, on="domain").select("rank", "window", "domain", "marked", common.alias("common_step"))


def _differences(rows: pl.DataFrame, starts: Int64, by_seq: Bool) -> dict[str, Bool]:
    """Per operation, whether its ranks state different things; a rank that states nothing does not count."""
    is_p2p = rows["src"].is_not_null().to_numpy()[starts]
    codes = {name: rows[name].cast(pl.Categorical).to_physical() for name in ("collective", "dtype")}
    return {
        "collective": differs(codes["collective"], starts) & ~is_p2p,
        "size": differs(rows["equal_bytes"], starts),
        "dtype": differs(codes["dtype"], starts) & ~is_p2p,
        "root": differs(rows["root"], starts) & ~is_p2p,
        "step": differs(rows["step"], starts) & ~is_p2p & ~by_seq,
    }


def differs(column: pl.Series, starts: Int64) -> Bool:
    """Per operation, whether the values that its rows have are not all one."""
    if column.null_count() == len(column):
        return np.zeros(len(starts), dtype=np.bool_)
    values = column.cast(pl.Int64)
    low = np.minimum.reduceat(values.fill_null(_LAST).to_numpy(), starts)
    return low < np.maximum.reduceat(values.fill_null(MISSING).to_numpy(), starts)


def _doubtful(rows: pl.DataFrame, starts: Int64, by_seq: Bool, contradicted: Bool, other_step: Bool) -> Bool:
    """Spread differences from one beginning of a step that all ranks share to the next one."""
    lane, domain = (rows[name].to_numpy()[starts] for name in ("lane", "domain"))
    shared = np.logical_and.reduceat(rows["begins_step"].to_numpy(), starts) & ~other_step
    begins = shared | by_seq
    begins[1:] |= (lane[1:] != lane[:-1]) | (domain[1:] != domain[:-1])
    stretch = np.cumsum(begins)
    return np.bincount(stretch, weights=contradicted)[stretch] > 0


def _expected(rows: pl.DataFrame, lanes: pl.DataFrame, groups: tuple[Group, ...], present: Int64) -> pl.DataFrame:
    """Per lane, the ranks that should have its operations: members that are there, else those that have any."""
    here = set(present.tolist())
    members = {at: sorted(here & set(g.members)) for at, g in enumerate(groups) if g.members is not None}
    listed = pl.DataFrame(
        {"group": list(members), "rank": list(members.values())},
        schema={"group": pl.Int32, "rank": pl.List(pl.Int64)},
    )
    whole = lanes.filter(pl.col("src").is_null()).join(listed, on="group").select("lane", "rank").explode("rank")
    ends = pl.concat(lanes.select("lane", rank=end).drop_nulls() for end in ("src", "dst"))
    ends = ends.filter(pl.col("rank").is_in(present.tolist()))
    found = rows.select("lane", "rank").unique()
    return pl.concat([whole, ends, found]).unique().sort("lane", "rank")


def _lacking(rows: pl.DataFrame, starts: Int64, expected: pl.DataFrame, incomplete: Int64) -> pl.DataFrame:
    """Which ranks lack which operations, and whether ``within`` what is recorded of them there."""
    first = rows[starts[incomplete]].select("lane", "domain", "key").with_columns(op=pl.Series(incomplete))
    op = pl.DataFrame({"op": np.repeat(np.arange(len(starts)), np.diff(starts, append=rows.height))})
    have = op.hstack(rows.select("rank")).filter(pl.col("op").is_in(incomplete))
    spans = rows.group_by("lane", "domain", "rank").agg(low=pl.col("key").min(), high=pl.col("key").max())
    lacking = first.join(expected, on="lane").join(have, on=["op", "rank"], how="anti")
    lacking = lacking.join(spans, on=["lane", "domain", "rank"], how="left")
    # What a rank recorded without its group or its time may be what it seems to lack.
    unplaced = rows.filter(pl.col("unnamed") | ~pl.col("placed"))["rank"].unique()
    within = ((pl.col("key") > pl.col("low")) & (pl.col("key") < pl.col("high"))).fill_null(value=False)
    within &= ~pl.col("rank").is_in(unplaced.implode())
    return lacking.select("op", "rank", within.alias("within")).sort("op", "rank")


_SHOWN = 8


def _lacking_texts(lacking: pl.DataFrame) -> pl.DataFrame:
    listed = pl.col("rank").head(_SHOWN).cast(pl.String).str.join(", ")
    more = pl.when(pl.len() > _SHOWN).then(pl.format(" and {} more", pl.len() - _SHOWN)).otherwise(pl.lit(""))
    what = pl.when(pl.len() > 1).then(pl.lit("ranks")).otherwise(pl.lit("rank"))
    said = pl.when("within").then(pl.lit("lacking on")).otherwise(pl.lit("not recorded on"))
    parts = lacking.group_by("op", "within", maintain_order=True).agg(listed=listed, more=more, what=what)
    return parts.select("op", text=pl.format("{} {} {}{}", said, "what", "listed", "more"))


def _unsure_texts(unsure: Bool) -> pl.DataFrame:
    said = pl.lit("which operation of the other ranks it is cannot be told")
    return pl.DataFrame({"op": np.flatnonzero(unsure)}).select("op", text=said)


def _difference_texts(rows: pl.DataFrame, starts: Int64, differences: Mapping[str, Bool]) -> pl.DataFrame:
    """Say what each of the differing ranks has, like ones named once."""
    names = list(differences)
    flagged = np.flatnonzero(np.logical_or.reduce([differences[name] for name in names]))
    sizes = np.diff(starts, append=rows.height)[flagged]
    at = np.repeat(starts[flagged] - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())
    flags = pl.DataFrame({f"{name} differs": np.repeat(differences[name][flagged], sizes) for name in names})
    mine = rows[at].hstack(flags).with_columns(op=pl.Series(np.repeat(flagged, sizes)))
    unknown = pl.lit("unknown")
    size = pl.coalesce("equal_bytes", "comm_bytes")
    sized = pl.when(size.is_not_null()).then(pl.format(" of {} B", size)).otherwise(pl.lit(""))
    text = pl.concat_str(
        pl.coalesce("collective", unknown),
        sized,
        *(
            pl.when(pl.col(f"{name} differs"))
            .then(pl.format(f" {word} {{}}", pl.coalesce(pl.col(name).cast(pl.String), unknown)))
            .otherwise(pl.lit(""))
            for name, word in (("dtype", "of"), ("root", "with root"), ("step", "in step"))
        ),
    )
    mine = mine.select("op", "rank", text=text).group_by("op", "text", maintain_order=True).agg(pl.col("rank").first())
    said = pl.format("{} on rank {}", "text", "rank").head(_SHOWN).str.join(", ")
    return mine.group_by("op", maintain_order=True).agg(text=said)


def _joined(num_ops: int, *parts: pl.DataFrame) -> pl.Series:
    """One text per operation, null where nothing is said."""
    texts = pl.concat(parts).group_by("op", maintain_order=True).agg(pl.col("text").str.join("; "))
    every = pl.DataFrame({"op": np.arange(num_ops)})
    return every.join(texts, on="op", how="left", maintain_order="left")["text"]


def group_table(matches: Matches) -> pl.DataFrame:
    """One row per process group: how many operations, how many of them whole and alike, and the first difference."""
    rows, at = matches.rows, matches.starts
    number = pl.when("by_seq").then(pl.format("with seq {}", "seq")).otherwise(pl.format("{}", "order"))
    window = pl.when(pl.col("window") > 0).then(pl.format(" of window {}", "window")).otherwise(pl.lit(""))
    p2p = pl.format("from rank {} to {}: ", "src", "dst")
    ops = (
        rows[at]
        .select("group", "window", "order", "seq", "src", "dst", "lane")
        .with_columns(
            pl.Series("full", matches.full),
            pl.Series("differs", matches.differs),
            pl.Series("usable", matches.full & ~matches.doubtful),
            matches.lanes["by_seq"].gather(rows["lane"][at]),
            mismatch=matches.mismatch,
        )
    )
    said = pl.concat_str(
        pl.when(pl.col("src").is_null()).then(pl.lit("")).otherwise(p2p),
        pl.lit("operation "),
        number,
        window,
        pl.lit(" is "),
        "mismatch",
    )
    tables = ops.group_by("group", maintain_order=True).agg(
        pl.len().alias("num_operations"),
        pl.col("usable").sum().alias("num_matched"),
        (~pl.col("full")).sum().alias("num_incomplete"),
        pl.col("differs").sum().alias("num_mismatches"),
        said.filter("differs").first().alias("first_mismatch"),
        pl.col("by_seq").any(),
    )
    mesh = rows.group_by("group").agg(pl.col("mesh_dim").drop_nulls().first())
    return tables.join(mesh, on="group", how="left").sort("group")
