"""Generated runs with and without a slow rank: is it named, and are the planted clocks found?

    python scripts/straggler_seeds.py --seeds 20
    python scripts/straggler_seeds.py --seeds 200 --clean
    python scripts/straggler_seeds.py --seeds 20 --op aten::convolution_backward --factor 8

Each seed makes two runs (scripts/make_ranks.py) with clocks up to 50 ms and 50 ppm off, each rank on its own machine:
in one a rank works slower, in the other none does. Both are merged; what was planted is read only to compare. A line
says whom the tables name and for which phase and op, and by how much the clock of any rank is off at the worst moment,
beside the smallest collective. With --op only what is called so is slower on the slow rank. Exit 1 if a slow rank or
its op is missed, another one is named, or a clock is off by more than that collective; of runs without a slow rank 2 %
may name one.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from make_ranks import make_run, parse

from chakra_capture.analysis.late_ops import Cause
from chakra_capture.analysis.loop import loop_windows
from chakra_capture.analysis.own_times import LatePhase, own_times
from chakra_capture.analysis.stragglers import Stragglers, find_stragglers
from chakra_capture.layout import COLLECTIVES_FILE, RunPaths, rank_folder_name
from chakra_capture.merge.across.outcome import Alignment
from chakra_capture.merge.many.run import Watch, merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import find_run
from chakra_capture.trace.merged import MergedTrace

# Of runs without a slow rank so many may name one.
_FALSE = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave, beside what was planted."""

    planted: int | None
    named: tuple[int, ...]
    op: str | None
    op_found: str | None
    said: str
    clock_error_ns: float
    smallest_ns: int

    @property
    def is_right(self) -> bool:
        named = () if self.planted is None else (self.planted,)
        is_op = self.op is None or self.planted is None or self.op_found == self.op
        return self.named == named and is_op and self.clock_error_ns <= self.smallest_ns


def try_seed(folder: Path, seed: int, settings: argparse.Namespace, *, slow: bool) -> Outcome:
    rank = random.Random(seed).randrange(settings.ranks) if slow else None
    argv = [str(folder), "--ranks", str(settings.ranks), "--steps", str(settings.steps), "--seed", str(seed)]
    argv += ["--clock-offsets", "50", "--drift-ppm", "50", "--ranks-per-host", "1"]
    argv += ["--jitter", str(settings.jitter)]
    if rank is not None:
        argv += ["--straggler", f"{rank}:{settings.factor}" + (f":{settings.op}" if settings.op else "")]
    make_run(parse(argv))
    paths = RunPaths(folder, "0")
    aligned: list[Alignment | None] = []
    merge_run(find_run(folder), paths.merged_dir, MergeOptions(), workers=1, watch=Watch(aligned=aligned.append))
    (alignment,) = aligned
    assert alignment is not None
    found = located(paths, find_stragglers(pl.read_parquet(paths.merged_dir / COLLECTIVES_FILE), alignment.doubt_ns))
    truth = json.loads((folder / "truth.json").read_text())
    of_named = found.table.filter(pl.col("is_straggler"))["share"].to_list()
    said = found.reason or f"late by {max(of_named):.0%} of a step of {(found.step_ns or 0) / 1e6:.0f} ms"
    late = None if rank is None else found.late_in.get(rank)
    op = None if late is None else late.what.op
    said += "" if late is None else f", in {where(late)}"
    return Outcome(rank, found.ranks, settings.op, op, said, clock_error_ns(alignment, truth), smallest_ns(truth))


def located(paths: RunPaths, found: Stragglers) -> Stragglers:
    """What is found where a rank is named and its work is held against that of the others."""
    if not found.ranks:
        return found
    traces = {rank: MergedTrace(rank, paths.merged_dir / rank_folder_name(rank)) for rank in found.table["rank"]}
    return found.located({rank: own_times(trace, loop_windows(trace)) for rank, trace in traces.items()}, traces)


def where(late: LatePhase) -> str:
    if late.what.cause == Cause.SPREAD:
        return "all phases"
    return f"{late.phase or 'no phase'}: {late.what.op or late.what.cause}"


def clock_error_ns(alignment: Alignment, truth: dict[str, list[float]]) -> float:
    """How far any clock is from the planted one, at the start of the run or at its end."""
    ends = [max(op["end_ns"]) for op in truth["operations"]]
    worst = 0.0
    for rank, clock in alignment.clocks.items():
        if clock.offset_ns is None:
            return float("inf")
        for since in (0, max(ends)):
            planted = truth["clock_offset_ns"][rank] + truth["clock_drift_ppm"][rank] * 1e-6 * since
            found = clock.offset_ns + (clock.drift_ppm or 0) * 1e-6 * (truth["zero_ns"] + since - clock.t0_ns)
            worst = max(worst, abs(found - planted))
    return worst


def smallest_ns(truth: dict) -> int:
    """Shortest time from the last arrival at a collective to its last end."""
    return min(max(op["end_ns"]) - max(op["arrival_ns"]) for op in truth["operations"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--factor", type=float, default=1.3, help="how much longer the own work of the slow rank takes")
    parser.add_argument("--jitter", type=float, default=0.01, help="spread of the ranks' own work (0.01: 1 %%)")
    parser.add_argument("--op", help="only what has this name takes longer; the verdict has to name it")
    parser.add_argument("--clean", action="store_true", help="only runs without a slow rank")
    settings = parser.parse_args()
    kinds = (False,) if settings.clean else (True, False)
    right = {True: 0, False: 0}
    print("seed  planted  named  clocks off by    smallest collective  verdict")
    for seed in range(settings.seeds):
        for slow in kinds:
            with tempfile.TemporaryDirectory() as folder:
                got = try_seed(Path(folder), seed, settings, slow=slow)
            right[slow] += got.is_right
            planted = "-" if got.planted is None else got.planted
            named = ",".join(map(str, got.named)) or "-"
            times = f"{got.clock_error_ns / 1e3:10.1f} us {got.smallest_ns / 1e3:16.1f} us"
            print(f"{seed:4}  {planted:>7}  {named:>5}  {times}      {'' if got.is_right else 'WRONG: '}{got.said}")
    tried = settings.seeds
    print("; ".join(f"{'a slow rank' if slow else 'none'}: {right[slow]} of {tried} right" for slow in kinds))
    missed = right[False] < (1 - _FALSE) * tried
    return 1 if missed or (True in kinds and right[True] < tried) else 0


if __name__ == "__main__":
    sys.exit(main())
