"""What is known of a slow network: how long the transfers of each group take, and whose links are slower than others'.

A transfer begins when the last rank has come, so nobody's lateness is in it. What a group takes does not say which of
its ranks has the slow link: all end together. Messages between two ranks (send, recv) do: where those of one rank take
several times as long as those of the others, it is named.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

LINKS = ("send", "recv")
# Transfers of a group are worth a word from this share of a step.
_MUCH = 0.10
# A rank is named if its links take so many times as long as those between others, known from so many messages.
_TIMES, _FEWEST, _FEWEST_LINKS = 3.0, 8, 2
_FEW_NS = 200_000


@dataclass(frozen=True, slots=True)
class GroupTransfers:
    """The transfers of a process group.

    Attributes:
        process_group: None: no name is recorded.
        ranks: that take part, as recorded.
        transfer_ns: median over steps of the time in which one is under way.
        share: of the time of a step.
    """

    process_group: str | None
    ranks: tuple[int, ...]
    transfer_ns: float
    share: float


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """A rank whose messages take long: median ns of a message from or to it, and between others."""

    rank: int
    message_ns: float
    others_ns: float


@dataclass(frozen=True, slots=True)
class SlowTransfers:
    """Groups that transfer for much of a step, longest first, and the rank whose links are slow, if messages tell."""

    groups: tuple[GroupTransfers, ...] = ()
    links: SlowLinks | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        groups = [{name: getattr(group, name) for name in GroupTransfers.__slots__} for group in self.groups]
        links = self.links and {name: getattr(self.links, name) for name in SlowLinks.__slots__}
        return {"groups": [group | {"ranks": list(group["ranks"])} for group in groups], "links": links}


def slow_transfers(collectives: pl.DataFrame, step_ns: float | None) -> SlowTransfers:
    """Look at the transfers of a run.

    Args:
        collectives: the table of the run.
        step_ns: time of a step; None: not known.
    """
    known = collectives.filter(pl.col("wait_ns").is_not_null() & (pl.col("num_found") > 1))
    return SlowTransfers(_groups(known, step_ns) if step_ns else (), _links(known))


def _groups(known: pl.DataFrame, step_ns: float) -> tuple[GroupTransfers, ...]:
    op = known.filter(~pl.col("collective").is_in(LINKS) & pl.col("step").is_not_null()).group_by("collective_id").agg(
        pl.col("process_group", "step", "window").sort_by("rank").first(),
        ranks=pl.col("rank").sort(),
        start=pl.col("arrival_ns").max(),
        # Who ends first has what all have had to transfer; who ends later may have been held by something else.
        end=(pl.col("arrival_ns") + pl.col("wait_ns") + pl.col("transfer_ns")).min(),
    )  # fmt: skip
    keys = ("process_group", "ranks", "window", "step")
    before = pl.col("end").cum_max().shift().over(keys[:3])
    steps = (
        op.with_columns(pl.max_horizontal("start", "end").alias("end"))
        .sort("start")
        .with_columns(ns=(pl.col("end") - pl.max_horizontal("start", before)).clip(lower_bound=0))
        .group_by(keys)
        .agg(pl.col("ns").sum())
    )
    medians = steps.group_by("process_group", "ranks").agg(pl.col("ns").median()).sort("ns", descending=True)
    return tuple(
        GroupTransfers(name, tuple(ranks), ns, ns / step_ns)
        for name, ranks, ns in medians.iter_rows()
        if ns >= _MUCH * step_ns
    )


def _links(known: pl.DataFrame) -> SlowLinks | None:
    messages = (
        known.filter(pl.col("collective").is_in(LINKS))
        .group_by("collective_id")
        .agg(
            low=pl.col("rank").min(),
            high=pl.col("rank").max(),
            ns=pl.col("end_ns").max() - pl.col("arrival_ns").max(),
            order=pl.col("order").min(),
        )
        .filter((pl.col("order") > 0) & (pl.col("low") != pl.col("high")))
    )
    pairs = (
        messages.group_by("low", "high").agg(pl.col("ns").median(), count=pl.len()).filter(pl.col("count") >= _FEWEST)
    )
    found = []
    for rank in sorted({*pairs["low"], *pairs["high"]}):
        is_own = (pl.col("low") == rank) | (pl.col("high") == rank)
        own, others = pairs.filter(is_own)["ns"], pairs.filter(~is_own)["ns"]
        if len(own) < _FEWEST_LINKS or not len(others):
            continue
        # Each of its links is slow: one that is not says that it is another rank's, or the pair's.
        mine, usual = float(np.median(own)), float(np.median(others))
        if own.to_numpy().min() > others.to_numpy().max() and mine >= _TIMES * max(usual, _FEW_NS):
            found.append(SlowLinks(rank, mine, usual))
    return max(found, key=lambda links: links.message_ns, default=None)
