"""What-ifs against the truth: trainings in which the change is really made, in every other step.

    what_if_truth.py                          all cases, each run three times
    what_if_truth.py --cases layer --tries 5  some of them, more often
    what_if_truth.py --json

Cases: a dataset's sleep removed, loaded by the loop (``input``) or by a worker (``worker``); a block of matrix products
halved (``layer``); an all-reduce of a tenth of the size (``network``) and a rank that is late each step no longer late
(``straggler``), both with two ranks on gloo. Steps of even number are as they are, those of odd number changed, so that
a busy machine is busy for both; of ``worker``, whose batches come ahead of their step, the change is a run of its own.
Of each try the median of the steps as they are, of their prediction and of the changed steps is printed, with the
signed error of the prediction and that of predicting no change, both as parts of the changed step.
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
    alternates: bool = True


CASES = {
    "input": Case(("--remove", "input_wait"), 1, "sleep in the dataset removed, no workers"),
    "worker": Case(("--remove", "input_wait"), 1, "sleep in the dataset removed, one worker", alternates=False),
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


def train(case: str, *, all_changed: bool, folder: Path, rank: int) -> None:
    """Train for some steps and record a window of them; of cases that alternate, change those of odd number."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    from chakra_capture import ChakraProfileConfig, capture

    torch.set_num_threads(1)

    def is_changed(step: int) -> bool:
        return all_changed or (CASES[case].alternates and step % 2 == 1)

    class Data(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            if case in ("input", "worker") and not is_changed(index):
                time.sleep(SLEEP_S)
            return torch.ones(64) * index

    if CASES[case].ranks > 1:
        store = dist.FileStore(str(folder / "store"), CASES[case].ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=CASES[case].ranks)
    network, weight = torch.nn.Linear(64, 64), torch.ones(300, 300)
    whole, tenth = torch.ones(4_000_000), torch.ones(400_000)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    config = ChakraProfileConfig(
        enabled=True, start_step=FIRST, end_step=LAST, trace_dir=str(folder / "traces"), phases=False
    )
    data = DataLoader(Data(), batch_size=1, num_workers=1 if case == "worker" else 0)
    with capture(config) as session:
        for step, batch in session.steps(data):
            changed = is_changed(step)
            with torch.profiler.record_function("half block" if changed else "block"), torch.no_grad():
                for _ in range((20 if changed else 40) if case == "layer" else 10):
                    torch.mm(weight, weight)
            if case == "straggler" and rank == 1 and not changed:
                with torch.profiler.record_function("late"):
                    time.sleep(LATE_S)
            network(batch).sum().backward()
            if CASES[case].ranks > 1:
                dist.all_reduce(tenth if case != "network" or changed else whole)
            optimizer.step()
            optimizer.zero_grad()
    if CASES[case].ranks > 1:
        dist.destroy_process_group()


def recorded(case: str, folder: Path, *, all_changed: bool = False) -> Path:
    """Train in processes of their own, merge, and return the folder of the run."""
    folder.mkdir(parents=True)
    call = [sys.executable, __file__, "--job", case, "--folder", str(folder), *(["--changed"] if all_changed else [])]
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


def steps_of(run: Path, column: str, chosen: range, *asked: str) -> float:
    """Median over some steps of all ranks of a column that what-if gives."""
    rows = json.loads(command("what-if", run, *(asked or ("--scale", "cpu=1")), "--json"))["rows"]
    return statistics.median(row[column] for row in rows if row["step"] in chosen)


def tried(case: str, folder: Path) -> Try:
    """Record steps as they are and changed, predict the ones from the others."""
    # The first and the last step of a window have parts of the recording in them.
    even, odd = range(FIRST + 1, LAST, 2), range(FIRST + 2, LAST, 2)
    run = recorded(case, folder / "run")
    changed = run if CASES[case].alternates else recorded(case, folder / "changed", all_changed=True)
    asked = CASES[case].asked
    return Try(
        steps_of(run, "measured_ns", even),
        steps_of(run, "fastest_ns", even, *asked),
        steps_of(run, "slowest_ns", even, *asked),
        steps_of(changed, "measured_ns", odd),
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
        train(given.job, all_changed=given.changed, folder=Path(given.folder), rank=given.rank)
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
