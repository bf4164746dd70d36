"""Where is the bottleneck of a training on medical volumes, and where does it go? Six settings, each one flag apart.

    dataloading_study.py -o study --data-dir data           # data/Task09_Spleen, of the Segmentation Decathlon
    dataloading_study.py -o study --synthetic --repeats 3   # made here; three runs a setting, for a shared machine
    dataloading_study.py -o study --synthetic -- --patch 32 --epochs 8   # what follows -- goes to every training

Trains scripts/examples/monai_dataloading_bottleneck.py in each setting, one process after the other and in turns, has
chakra-capture summary say where the time of each run went and chakra-capture compare whether each pair differs, and
writes study.txt, study.json and the chart study.svg. A pair that compare cannot tell from noise is shown as just that.
Called again, it goes on with the runs that are still missing.
Exit status: 0 done, 1 bad input or a training that failed, 2 wrong usage, 130 stopped.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dataloading_chart import Bar, stacked_bars
from rich.console import Console

from chakra_capture.cli.output import count_of, make_table, number_ranges
from chakra_capture.layout import RunPaths

SCHEMA_VERSION = 1
TRAINING = Path(__file__).parent / "examples" / "monai_dataloading_bottleneck.py"
JOB = "study"
# What final_summary.json calls the parts of a step, in their order, and what people do.
PARTS = {
    "input_wait_ms": "input wait",
    "h2d_ms": "copies",
    "forward_ms": "forward",
    "backward_ms": "backward",
    "optimizer_ms": "optimizer",
    "residual_ms": "rest",
}


class StudyError(Exception):
    """What cannot be gone on with, in one sentence."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train: flags of the training with their values, none for a switch."""

    name: str
    flags: Mapping[str, str | None]
    about: str

    @property
    def options(self) -> list[str]:
        return [text for flag, value in self.flags.items() for text in (flag, value) if text is not None]

    def without(self, other: "Setting") -> str:
        """The flags that the other one has not."""
        new = {
            flag: value for flag, value in self.flags.items() if flag not in other.flags or other.flags[flag] != value
        }
        return " ".join(Setting("", new, "").options)


def six_settings(workers: int) -> tuple[Setting, ...]:
    """The settings of the study: each is the one before with one flag changed."""
    changes: tuple[tuple[str, dict[str, str | None], str], ...] = (
        ("baseline", {}, "the training's own process reads and transforms each volume when a step asks for it"),
        ("disk", {"--dataset": "persistent"}, "what the fixed transforms give is kept on disk, before the first step"),
        ("memory", {"--dataset": "cache"}, "it is kept in memory"),
        ("workers", {"--num-workers": str(workers)}, "processes of the loader do what is left, ahead of the step"),
        ("thread", {"--loader": "thread"}, "a thread fetches the next batch from the loader"),
        ("amp", {"--amp": None}, "mixed precision, on CUDA alone"),
    )
    flags: dict[str, str | None] = {}
    made = []
    for name, change, about in changes:
        flags = {**flags, **change}
        made.append(Setting(name, flags, about))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: options for every training, and each setting so many times."""

    output: Path
    training: tuple[str, ...]
    settings: tuple[Setting, ...]
    repeats: int = 1

    def folder(self, setting: Setting, number: int) -> Path:
        return self.output / setting.name / f"run-{number}"


@dataclass(frozen=True, slots=True)
class Run:
    """What one training says of itself.

    Attributes:
        parts: means of a step in ms, as its final_summary.json has them; None is not measured.
        printed: what it printed, by name.
    """

    folder: str
    printed: dict[str, str]
    num_steps: int
    step_ms: float
    parts: dict[str, float | None]
    verdict: str
    summary: str

    def share(self, part: str) -> float | None:
        value = self.parts[part]
        return None if value is None else value / self.step_ms


@dataclass(frozen=True, slots=True)
class Measured:
    """A setting with its runs."""

    setting: Setting
    runs: tuple[Run, ...]

    @property
    def middle(self) -> Run:
        """The run that is shown: of several the one with the middle step time, so that its parts make up its step."""
        return sorted(self.runs, key=lambda run: run.step_ms)[(len(self.runs) - 1) // 2]

    @property
    def verdict(self) -> str:
        verdict = self.middle.verdict
        number = sum(run.verdict == verdict for run in self.runs)
        return verdict if number == len(self.runs) else f"{verdict} ({number} of {len(self.runs)} runs)"


@dataclass(frozen=True, slots=True)
class Study:
    """All settings, and what compare says of each and the one before."""

    measured: tuple[Measured, ...]
    comparisons: tuple[dict[str, Any], ...]

    @property
    def pairs(self) -> Iterator[tuple[Measured, Measured, dict[str, Any]]]:
        for (first, second), comparison in zip(itertools.pairwise(self.measured), self.comparisons, strict=True):
            yield first, second, comparison

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "settings": [
                {
                    "name": each.setting.name,
                    "options": each.setting.options,
                    "about": each.setting.about,
                    "verdict": each.verdict,
                    "shown": each.runs.index(each.middle),
                    "runs": [asdict(run) for run in each.runs],
                }
                for each in self.measured
            ],
            "pairs": [
                {"first": a.setting.name, "second": b.setting.name, "changed": b.setting.without(a.setting), **said}
                for a, b, said in self.pairs
            ],
        }


def run_study(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Study:
    """Train what is missing, in turns, and compare.

    Raises:
        StudyError: a training or a command failed, or the folder holds runs of other options.
    """
    runs: dict[str, list[Run]] = {setting.name: [] for setting in plan.settings}
    todo = list(itertools.product(range(1, plan.repeats + 1), plan.settings))
    for at, (number, setting) in enumerate(todo, 1):
        say(f"[{at}/{len(todo)}] {setting.name}, run {number}: {setting.about}")
        runs[setting.name].append(_run(plan, setting, number))
    measured = tuple(Measured(setting, tuple(runs[setting.name])) for setting in plan.settings)
    say(f"comparing {count_of(len(measured) - 1, 'pair')}")
    study = Study(measured, tuple(_compare(*pair) for pair in itertools.pairwise(measured)))
    for name, content in (
        ("study.json", json.dumps(study.as_json(), indent=2, allow_nan=False) + "\n"),
        ("study.txt", as_text(study)),
        ("study.svg", as_svg(study)),
    ):
        (plan.output / name).write_text(content, encoding="utf-8")
    return study


def _run(plan: Plan, setting: Setting, number: int) -> Run:
    """A run that is there, or a new one."""
    folder, options = plan.folder(setting, number), [*plan.training, *setting.options]
    note = folder / "training.json"
    if not note.is_file():
        _train(folder, options, note)
    noted = json.loads(note.read_text())
    if noted["options"] != options:
        other = " ".join(noted["options"])
        raise StudyError(f"{folder} was trained with other options ({other}). Give another folder with -o.")
    summary = json.loads(RunPaths(folder, JOB).summary.read_text())
    overall, diagnosis = summary["step_time"]["global"], summary["step_time"]["diagnosis"]
    if not overall["average"]["step_time_ms"]:
        raise StudyError(f"{folder} has no whole step after the first one. Train for longer: -- --epochs N.")
    return Run(
        folder=str(folder),
        printed=noted["printed"],
        num_steps=overall["window"]["steps_analyzed"],
        step_ms=overall["average"]["step_time_ms"],
        parts={part: overall["average"][part] for part in PARTS},
        verdict=diagnosis["kind"],
        summary=diagnosis["summary"],
    )


def _train(folder: Path, options: Sequence[str], note: Path) -> None:
    # A training that was stopped half-way left a part of a run.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    where = ["--trace-dir", str(folder), "--run-name", JOB]
    out = _ask([sys.executable, str(TRAINING), *options, *where], what=f"the training of {folder}")
    (folder / "summary.txt").write_text(_product("summary", str(folder), "--phases-only"), encoding="utf-8")
    printed = {name: value.strip() for name, _, value in (line.partition(":") for line in out.splitlines())}
    # Last: a run without it is trained again.
    note.write_text(json.dumps({"options": list(options), "printed": printed}, indent=2) + "\n")


def _compare(first: Measured, second: Measured) -> dict[str, Any]:
    sides = [[run.folder for run in each.runs] for each in (first, second)]
    found: dict[str, Any] = json.loads(
        _product("compare", "--runs", *sides[0], "--vs", *sides[1], "--json", fine=(0, 3))
    )
    return found


def _product(*arguments: str, fine: Sequence[int] = (0,)) -> str:
    return _ask([sys.executable, "-m", "chakra_capture", *arguments], what=f"chakra-capture {arguments[0]}", fine=fine)


def _ask(command: Sequence[str], *, what: str, fine: Sequence[int] = (0,)) -> str:
    # The summary is asked for here, once.
    environ = {**os.environ, "CHAKRA_CAPTURE_NO_SUMMARY": "1"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environ)
    if done.returncode not in fine:
        last = (done.stderr.strip() or done.stdout.strip() or "without a word").splitlines()[-1]
        raise StudyError(f"{what} failed (exit {done.returncode}): {last}")
    return done.stdout


def sentence(first: Measured, second: Measured, said: Mapping[str, Any]) -> str:
    """What compare says of a pair, and where the bottleneck is before and after."""
    changed = second.setting.without(first.setting)
    verdicts = [each.verdict for each in (first, second)]
    moved = f"still {verdicts[1]}" if verdicts[0] == verdicts[1] else " -> ".join(verdicts)
    waits = " -> ".join(_percent(each.middle.share("input_wait_ms")) + " %" for each in (first, second))
    return f"{first.setting.name} -> {second.setting.name} ({changed}): {_result(said)}; {moved}, input wait {waits}"


def _result(said: Mapping[str, Any]) -> str:
    if said["verdict"] == "inconclusive":
        return f"inconclusive: {said['reason']}"
    if said["verdict"] == "same":
        return "as fast as before"
    mostly = f", mostly {said['dominant']}" if said["dominant"] else ""
    return f"{said['verdict']} by {100 * abs(said['change']):.1f} %{mostly}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def as_text(study: Study) -> str:
    """The tables, for people."""
    shown = [part for part in PARTS if any(each.middle.parts[part] is not None for each in study.measured)]
    heads = ["setting", "step ms", *(PARTS[part] for part in shown), "verdict", "prepare s"]
    table = make_table("Mean of a step in ms, and its parts in % of it", *heads)
    table.columns[0].justify = table.columns[-2].justify = "left"
    for each in study.measured:
        run = each.middle
        shares = [_percent(run.share(part)) for part in shown]
        table.add_row(each.setting.name, f"{run.step_ms:.1f}", *shares, each.verdict, run.printed.get("prepared in s"))
    out = StringIO()
    # A notebook makes rich take any file for a screen, or hand the text to its front end.
    console = Console(file=out, width=200, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(table)
    steps = sorted({run.num_steps for each in study.measured for run in each.runs})
    number = max(len(each.runs) for each in study.measured)
    console.print(f"of {count_of(number, 'run')} a setting, {number_ranges(steps)} steps each without the first one")
    console.print("prepare: before the first step, filling a cache included")
    console.print("\nEach setting and the one before")
    for pair in study.pairs:
        console.print(sentence(*pair), markup=False)
    if number == 1:
        console.print(
            "note: one run does not show how runs differ: where others use the machine, too, give --repeats 3"
        )
    if any(each.middle.printed.get("device") == "cpu" and "--amp" in each.setting.flags for each in study.measured):
        console.print("note: without CUDA --amp changes nothing: its pair shows how far two equal settings differ")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def as_svg(study: Study) -> str:
    """A bar for each setting, made up of the parts of its step, and between two bars what compare says."""
    bars = []
    for each in study.measured:
        run = each.middle
        parts = {name: run.parts[part] or 0.0 for part, name in PARTS.items()}
        bars.append(Bar(each.setting.name, parts, f"{run.step_ms:.1f} ms, {each.verdict}"))
    return stacked_bars("Mean of a step, in ms", bars, [_result(said) for _, _, said in study.pairs])


def choose(settings: Sequence[Setting], names: Sequence[str] | None) -> tuple[Setting, ...]:
    """The settings of these names, in the order of the study."""
    if unknown := sorted(set(names or ()) - {setting.name for setting in settings}):
        known = ", ".join(setting.name for setting in settings)
        raise StudyError(f"there is no setting {unknown[0]!r}. Choose of: {known}.")
    return tuple(setting for setting in settings if not names or setting.name in names)


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own, rest = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    settings = six_settings(min(4, os.cpu_count() or 1))
    pairs = zip((settings[0], *settings), settings, strict=False)
    listed = [f"  {each.name:9} {each.without(before):22} {each.about}" for before, each in pairs]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["settings, each with the flags of those above it:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s -o DIR [options] [-- ...]",
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for the runs and the results")
    add("--data-dir", type=Path, help="folder with Task09_Spleen in it (default, with --synthetic: DIR/data)")
    add("--synthetic", action="store_true", help="make the folder, if there is none")
    add("--only", nargs="+", metavar="NAME", help="these settings alone")
    add("--repeats", type=int, default=1, help="runs of a setting: 1, or 3 and more, as compare wants them")
    add("--workers", type=int, default=min(4, os.cpu_count() or 1), help="of the loader (default: %(default)s)")
    add("--json", action="store_true", help="print study.json instead of the tables")
    chosen = parser.parse_args(own)
    if chosen.repeats < 1 or chosen.repeats == 2:
        parser.error(f"--repeats {chosen.repeats}: give 1, or 3 and more; of two runs compare says nothing")
    if chosen.workers < 1:
        parser.error(f"--workers {chosen.workers}: give 1 or more")
    if chosen.data_dir is None and not chosen.synthetic:
        parser.error("no data: give --data-dir, or --synthetic")
    return chosen, rest


def main(arguments: Sequence[str]) -> int:
    chosen, rest = _options(arguments)
    data = chosen.data_dir or chosen.output / "data"
    training = ("--data-dir", str(data.resolve()), *(["--synthetic"] if chosen.synthetic else []), *rest)
    try:
        plan = Plan(chosen.output, training, choose(six_settings(chosen.workers), chosen.only), chosen.repeats)
        study = run_study(plan, _say if sys.stderr.isatty() else lambda _: None)
    except (StudyError, OSError) as fault:
        print(f"dataloading_study: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dataloading_study: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(json.dumps(study.as_json(), indent=2, allow_nan=False) if chosen.json else as_text(study), end="")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
