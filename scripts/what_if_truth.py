"""What-ifs against the truth: trainings that are recorded as they are, and recorded again with the change really made.

    what_if_truth.py                          all cases, each run three times, before and after in turn
    what_if_truth.py --cases layer --tries 5  some of them, more often
    what_if_truth.py --json

Cases: a dataset's sleep removed, loaded by the loop (``input``) or by a worker (``worker``); a block of matrix products
halved (``layer``); an all-reduce of a tenth of the size (``network``) and a rank that is late each step no longer late
(``straggler``), both with two ranks on gloo. Of each try the median step of the run as it is, of the prediction from
it, and of the changed run is printed, with the signed error of the prediction and that of predicting no change, both as
parts of the changed step. The machine must be quiet: runs of one case differ by more than the bar when it is not.
Exit status: 0 the middle try of each case is within the bar and better than predicting no change, 1 not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BAR = 0.10
STEPS, FIRST, LAST = 34, 5, 32
SLEEP_S, LATE_S = 0.02, 0.03


@dataclass(frozen=True)
class Case:
    """A change, as what-if is asked for it; how many ranks train; what the change is called in reports."""

    asked: tuple[str, ...]
    ranks: int
    meaning: str


CASES = {
    "input": Case(("--remove", "input_wait"), 1, "sleep in the dataset removed, no workers"),
    "worker": Case(("--remove", "input_wait"), 1, "sleep in the dataset removed, one worker"),
    "layer": Case(("--scale", "op~^block$=0.5"), 1, "half of a block of matrix products"),
    "network": Case(("--scale", "comm~all_?reduce=0.1"), 2, "a tenth of what is reduced, two ranks"),
    "straggler": Case(("--scale", "op~^late$@1=0"), 2, "a late rank of two no longer late"),
}


@dataclass(frozen=True)
class Try:
    """Median steps, ns: recorded as it is, predicted (two ends of a range), and recorded with the change."""

    before: float
    fastest: float
    slowest: float
    after: float

    @property
    def error(self) -> float:
        """Signed error as a part of the changed step; inside a range it is none."""
        nearest = min(max(self.after, self.fastest), self.slowest)
        return (nearest if self.fastest != self.slowest else self.fastest) / self.after - 1

    @property
    def error_of_no_change(self) -> float:
        """The same of predicting what was there before."""
        return self.before / self.after - 1


def train(case: str, *, is_changed: bool, folder: Path, rank: int) -> None:
    """Train for some steps and record a window of them."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    from chakra_capture import ChakraProfileConfig, capture

    torch.set_num_threads(1)
    sleep_s = 0.0 if is_changed or case not in ("input", "worker") else SLEEP_S

    class Data(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(sleep_s)
            return torch.ones(64) * index

    if CASES[case].ranks > 1:
        store = dist.FileStore(str(folder / "store"), CASES[case].ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=CASES[case].ranks)
    network, weight = torch.nn.Linear(64, 64), torch.ones(300, 300)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    reduced = torch.ones((400_000 if is_changed else 4_000_000) if case == "network" else 1000)
    products = (20 if is_changed else 40) if case == "layer" else 10
    config = ChakraProfileConfig(
        enabled=True, start_step=FIRST, end_step=LAST, trace_dir=str(folder / "traces"), phases=False
    )
    data = DataLoader(Data(), batch_size=1, num_workers=1 if case == "worker" else 0)
    with capture(config) as session:
        for _, batch in session.steps(data):
            with torch.profiler.record_function("block"), torch.no_grad():
                for _ in range(products):
                    torch.mm(weight, weight)
            if case == "straggler" and rank == 1 and not is_changed:
                with torch.profiler.record_function("late"):
                    time.sleep(LATE_S)
            network(batch).sum().backward()
            if CASES[case].ranks > 1:
                dist.all_reduce(reduced)
            optimizer.step()
            optimizer.zero_grad()
    if CASES[case].ranks > 1:
        dist.destroy_process_group()


def recorded(case: str, *, is_changed: bool, folder: Path) -> Path:
    """Train in processes of their own, merge, and return the folder of the run."""
    folder.mkdir(parents=True)
    call = [sys.executable, __file__, "--job", case, "--folder", str(folder), *(["--changed"] if is_changed else [])]
    ranks = range(CASES[case].ranks)
    noise = folder / "stderr"
    with noise.open("wb") as file:
        jobs = [
            subprocess.Popen([*call, "--rank", str(rank)], env=_environment(case, rank), stderr=file) for rank in ranks
        ]
        ended = [job.wait(timeout=180) for job in jobs]
    if any(ended):
        raise SystemExit(f"a training of {case} did not run:\n{noise.read_text()[-2000:]}")
    command("merge", folder / "traces")
    return folder / "traces"


def _environment(case: str, rank: int) -> dict[str, str]:
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(CASES[case].ranks), "OMP_NUM_THREADS": "1"}


def command(*args: object) -> str:
    """Run chakra-capture."""
    call = [sys.executable, "-m", "chakra_capture", *map(str, args)]
    return subprocess.run(call, check=True, capture_output=True, text=True, timeout=180).stdout


def steps_of(run: Path, column: str, *asked: str) -> float:
    """Median over the steps of all ranks of a column that what-if gives, the window's first and last step left out."""
    rows = json.loads(command("what-if", run, *(asked or ("--scale", "cpu=1")), "--json"))["rows"]
    return statistics.median(row[column] for row in rows if row["step"] is not None and FIRST < row["step"] < LAST)


def tried(case: str, folder: Path) -> Try:
    """Record as it is and with the change, predict the one from the other."""
    before = recorded(case, is_changed=False, folder=folder / "before")
    after = recorded(case, is_changed=True, folder=folder / "after")
    asked = CASES[case].asked
    return Try(
        steps_of(before, "measured_ns"),
        steps_of(before, "fastest_ns", *asked),
        steps_of(before, "slowest_ns", *asked),
        steps_of(after, "measured_ns"),
    )


def results(cases: list[str], tries: int, say: Callable[[str], None]) -> Iterator[tuple[str, list[Try]]]:
    """All tries of each case; cases take turns, so that a busy minute spoils a try of each and not all of one."""
    found: dict[str, list[Try]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(tries):
            for case in cases:
                one = tried(case, Path(folder, str(number), case))
                found[case].append(one)
                say(line(f"{case} {number + 1}", one))
    yield from found.items()


def line(name: str, one: Try) -> str:
    """A try for people, in ms."""
    until = "" if one.fastest == one.slowest else f" to {one.slowest / 1e6:.2f}"
    return (
        f"| {name} | {one.before / 1e6:.2f} | {one.fastest / 1e6:.2f}{until} | {one.after / 1e6:.2f} "
        f"| {100 * one.error:+.1f} % | {100 * one.error_of_no_change:+.1f} % |"
    )


def median_try(tries: list[Try]) -> Try:
    """The try whose error is in the middle."""
    return sorted(tries, key=lambda one: one.error)[len(tries) // 2]


def main() -> int:
    """Print a Markdown table of all tries and of the middle one of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    for option in ("--job", "--folder"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--changed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        train(given.job, is_changed=given.changed, folder=Path(given.folder), rank=given.rank)
        return 0
    say = (lambda _: None) if given.json else print
    say("| case | before, ms | predicted | after | error | of no change |\n|---|---|---|---|---|---|")
    middle = {case: median_try(tries) for case, tries in results(given.cases, given.tries, say)}
    good = {case: abs(one.error) <= min(BAR, abs(one.error_of_no_change)) for case, one in middle.items()}
    if given.json:
        shown = {
            case: {
                "before_ns": one.before, "fastest_ns": one.fastest, "slowest_ns": one.slowest, "after_ns": one.after,
                "error": one.error, "error_of_no_change": one.error_of_no_change, "good": good[case],
            }
            for case, one in middle.items()
        }  # fmt: skip
        print(json.dumps(shown, indent=2))
    for case, one in middle.items():
        say(line(f"**{case}**: {CASES[case].meaning}", one) + ("" if good[case] else " MISSED"))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
