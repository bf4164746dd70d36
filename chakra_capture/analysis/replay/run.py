"""Replays of a merged run: every window, its ranks together where their collectives were matched."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from chakra_capture.analysis.replay.replay import RULES, Meeting, replay
from chakra_capture.analysis.replay.score import RankScore, score
from chakra_capture.merge.window import Rows, read_rows
from chakra_capture.trace.merged import MergedRun, MergedTrace


@dataclass(frozen=True, slots=True)
class WindowReplay:
    """Scores of the ranks of one window.

    Attributes:
        num_meetings: collectives that were replayed on several ranks together.
        without_times: ranks that have nothing to replay: a host trace alone has no times.
        without: rule -> scores with it left out; empty where that was not asked for.
    """

    window: int
    num_meetings: int
    without_times: list[int]
    ranks: list[RankScore]
    without: dict[str, list[RankScore]]


def replay_run(run: MergedRun, traces: list[MergedTrace], *, ablate: bool = False) -> Iterator[WindowReplay]:
    """Replay each window of a run and score it.

    Args:
        ablate: replay once more without each of the rules, to see what it buys.

    Raises:
        ReplayError: the dependencies of a window go round in a circle.
    """
    for (window, meetings, clocks), ranks in windows_of(run, traces):
        without = {rule: score(replay(ranks, meetings, clocks, without=frozenset({rule}))) for rule in RULES if ablate}
        missing = sorted({trace.rank for trace in traces} - ranks.keys())
        yield WindowReplay(window, len(meetings), missing, score(replay(ranks, meetings, clocks)), without)


def windows_of(
    run: MergedRun, traces: list[MergedTrace]
) -> Iterator[tuple[tuple[int, list[Meeting], dict[int, int]], dict[int, Rows]]]:
    """Give each window: its number, the collectives that ranks share, their clocks (ns to add), and their rows."""
    # Only what is on one clock can be replayed together.
    clocks = {rank: -(clock.offset_ns or 0) for rank, clock in run.clocks.items() if clock.reason is None}
    for window in sorted({window for trace in traces for window in trace.some_of_nodes("window")["window"].unique()}):
        ranks = {trace.rank: read_rows(trace, window) for trace in traces}
        ranks = {rank: rows for rank, rows in ranks.items() if rows.has_times}
        meetings = _meetings(run, window, {rank: rows for rank, rows in ranks.items() if rank in clocks})
        yield (window, meetings, clocks), ranks


def _meetings(run: MergedRun, window: int, ranks: dict[int, Rows]) -> list[Meeting]:
    """The collectives of a window that several ranks show."""
    if run.collectives is None:
        return []
    table = run.collectives.filter((pl.col("window") == window) & pl.col("node_id").is_not_null())
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    for collective, rank, node in table.select("collective_id", "rank", "node_id").iter_rows():
        if rank in ranks:
            rows[collective][rank] = node - ranks[rank].first
    return [Meeting(found) for found in rows.values() if len(found) > 1]
