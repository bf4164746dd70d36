"""What each rule of the replay buys, per trace: the error without it, beside the error with all of them.

    python scripts/replay_table.py FOLDER ...

A FOLDER holds merged ranks (``rank=0`` and so on); they are replayed together. Prints a Markdown table: the worst error
of the window and its steps, and the mean error of the starts of device activities, largest over the ranks. The last
columns halve all device times, with and without the rules that derive waits for the device: a graph whose waits are
pinned has the right step time, and predicts nothing.
"""

import argparse
from pathlib import Path

from chakra_capture.analysis.replay.replay import RULES, replay
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.analysis.replay.score import RankScore, score
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedRun, MergedTrace

WAITS = frozenset({"sync", "blocking_copies", "full_queue"})


def half(rows: Rows, row: Int64) -> Int64:
    """Half the recorded duration of activities, ns."""
    return (rows.end[row] - rows.start[row]) // 2


def said(ranks: list[RankScore]) -> str:
    """Worst step error in %, and mean start error in us, of the worst rank."""
    worst = 100 * max(one.worst_error for one in ranks)
    starts = [one.start_error_mean_ns for one in ranks if one.start_error_mean_ns is not None]
    return f"{worst:.2f} / {max(starts) / 1000:.1f}" if starts else f"{worst:.2f} / -"


def ratio(base: list[RankScore], changed: list[RankScore]) -> str:
    """Window of the slowest rank after a change, against before."""
    before, after = (max(one.window.predicted_ns for one in ranks) for ranks in (base, changed))
    return f"{after / before:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    heads = [
        "trace (window)",
        "all rules",
        *(f"without {rule}" for rule in RULES),
        "device x 0.5",
        "same, waits pinned",
    ]
    print("Worst error of window and steps in % / mean error of device starts in us\n")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for folder in parser.parse_args().folders:
        traces = [MergedTrace(int(one.name.partition("=")[2]), one) for one in sorted(folder.glob("rank=*"))]
        for (window, meetings, clocks), ranks in windows_of(MergedRun(folder), traces):
            base = score(replay(ranks, meetings, clocks))
            cells = [f"{folder.name} ({window})", said(base)]
            for rule in RULES:
                cells.append(said(score(replay(ranks, meetings, clocks, without=frozenset({rule})))))
            for without in (frozenset[str](), WAITS):
                cells.append(ratio(base, score(replay(ranks, meetings, clocks, without=without, duration=half))))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
