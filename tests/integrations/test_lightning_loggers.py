"""``log_to_logger``: headline numbers and verdict at a Lightning trainer's loggers, when training has ended."""

import csv
import json
import logging
import os
import statistics
from pathlib import Path

import pytest
import warm
import yaml
from commands import taken_over
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from recording.recorded import settings

from chakra_capture.integrations.lightning import ChakraProfileCallback, ChakraProfilingMixin
from chakra_capture.integrations.lightning.loggers import headline_numbers
from chakra_capture.recording.summary_process import OFF_VARIABLE
from integrations.models import Model, loader, trainer

PARTS = ("input_wait", "forward", "backward", "optimizer")
NAMES = {f"{part}_mean_ms" for part in (*PARTS, "residual")} | {"step_time_mean_ms", "step_time_median_ms", "coverage"}


class Noting(Logger):
    """A logger of a user's own, through what Lightning asks of every one."""

    name, version = "noting", 0

    def __init__(self, refuses: bool = False, refuses_texts: bool = False) -> None:
        super().__init__()
        self.refuses, self.refuses_texts = refuses, refuses_texts
        self.metrics: list[tuple[dict, int]] = []
        self.parameters: list[dict] = []

    def log_metrics(self, metrics, step=None):
        if self.refuses and any(name.startswith("chakra") for name in metrics):
            raise ConnectionError("no route to the server")
        self.metrics.append((dict(metrics), step))

    def log_hyperparams(self, params, *args, **kwargs):
        if self.refuses_texts and "chakra_capture/summary" in params:
            raise ValueError("no place for texts")
        self.parameters.append(dict(params))


class Logging(Model):
    """Has hyperparameters and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 4})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class NemoStyle(ChakraProfilingMixin, Model):
    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg


@pytest.fixture(autouse=True)
def summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_VARIABLE, "0")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="chakra_capture.integrations")
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name.startswith("chakra_capture.integrations")]


def phases_only(folder: Path, **changes: object):
    return settings(folder, None, None, log_to_logger=True, **changes)


def by_hand(folder: Path) -> dict[str, float]:
    """The same numbers, from the lines of the phase file."""
    lines = [json.loads(line) for line in (folder / "0_phases/rank-0.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and not line.get("flags")]
    times = [step["ns"] / 1e6 for step in steps]
    parts = {part: [step["phases"].get(part, [0])[0] / 1e6 for step in steps] for part in PARTS}
    found = {f"{part}_mean_ms": statistics.fmean(values) for part, values in parts.items()}
    named = sum(map(sum, parts.values()))
    between = sum(ns for step in steps for ns, _ in step["gap"]["phases"].values()) / 1e6
    wall = sum(times) + sum(step["gap"]["ns"] for step in steps) / 1e6
    return found | {
        "step_time_mean_ms": statistics.fmean(times),
        "step_time_median_ms": statistics.median(times),
        "residual_mean_ms": (sum(times) - named) / len(steps),
        "coverage": (named + between) / wall,
    }


def ours(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("chakra_capture/"): value for name, value in found.items() if name.startswith("chakra")}


def final(folder: Path) -> dict:
    return json.loads((folder / "0_run/final_summary.json").read_text())


def test_every_logger_gets_the_numbers_and_the_verdict_and_one_that_raises_keeps_nobody(tmp_path, log):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own, lost, short = Noting(), Noting(refuses=True), Noting(refuses_texts=True)
    table, board = CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board", default_hp_metric=False)
    fit = trainer(
        ChakraProfileCallback(phases_only(tmp_path / "traces")),
        logger=[lost, short, table, board, own],
        log_every_n_steps=2,
    )
    fit.fit(Logging(), loader(8))
    expected, summary = by_hand(tmp_path / "traces"), final(tmp_path / "traces")
    verdict = f"{summary['primary_diagnosis']['kind']}: {summary['primary_diagnosis']['summary']}"
    assert set(expected) == NAMES  # no h2d: there is no device to copy to

    rows = list(csv.DictReader(Path(table.log_dir, "metrics.csv").read_text().splitlines()))
    assert ours({name: float(value) for name, value in rows[-1].items() if value}) == pytest.approx(expected)
    assert (rows[-1]["step"], len([row for row in rows if row["loss"]])) == ("8", 4)
    parameters = yaml.safe_load(Path(table.log_dir, "hparams.yaml").read_text())
    assert (parameters["width"], parameters["chakra_capture/diagnosis"]) == (4, verdict)

    events = EventAccumulator(board.log_dir)
    events.Reload()
    scalars = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    assert ours({tag: event.value for tag, event in scalars.items()}) == pytest.approx(expected, rel=1e-6)
    assert {event.step for tag, event in scalars.items() if tag.startswith("chakra")} == {8}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["chakra_capture/diagnosis/text_summary"].strip() == verdict
    lines = texts["chakra_capture/summary/text_summary"].splitlines()
    assert [line.removeprefix("    ") for line in lines] == summary["text"].rstrip().splitlines()

    (numbers, step) = own.metrics[-1]
    assert (ours(numbers), step) == (pytest.approx(expected), 8)
    assert own.parameters[-1]["chakra_capture/diagnosis"] == verdict
    assert short.metrics[-1] == own.metrics[-1]
    assert said(log) == [
        "The headline numbers were not attached to Noting, training goes on: ConnectionError: no route to the server",
        "The diagnosis and summary were not attached to Noting, training goes on: ValueError: no place for texts",
    ]


def test_training_without_a_logger_is_told_and_a_dry_run_is_not(tmp_path, log):
    trainer(ChakraProfileCallback(phases_only(tmp_path / "none"))).fit(Model(), loader(2))
    assert said(log) == [
        "chakra_profile.log_to_logger is on, but this trainer has no logger (logger=False): what it would get stands "
        "in final_summary.json alone. Give the Trainer a logger, or set log_to_logger to false."
    ]
    log.clear()
    own = Noting()
    trainer(ChakraProfileCallback(phases_only(tmp_path / "dry")), logger=own, fast_dev_run=2).fit(Model(), loader(2))
    assert (said(log), own.metrics) == ([], [])
    assert final(tmp_path / "dry")["step_time"]["metadata"]["training_total_steps"] == 2


def test_summary_of_an_earlier_training_is_not_taken_for_this_one(tmp_path, log, monkeypatch):
    own = Noting()
    callback = ChakraProfileCallback(phases_only(tmp_path))

    class Failing(Model):
        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(callback, logger=own).fit(Failing(), loader(5))
    assert [step for _, step in own.metrics] == [3]  # what failed has numbers, too

    monkeypatch.setenv(OFF_VARIABLE, "1")
    trainer(callback, logger=own).fit(Model(), loader(5))
    assert len(own.metrics) == 1
    file = tmp_path / "0_run/final_summary.json"
    assert said(log) == [f"Nothing was attached to the loggers of this training: {file} was not written."]


def test_module_with_the_mixin_has_them_too_and_without_the_setting_nobody_has(tmp_path):
    for name, number in (("on", 1), ("off", 0)):
        own = Noting()
        chosen = {"enabled": True, "start_step": None, "trace_dir": str(tmp_path / name), "log_to_logger": name == "on"}
        trainer(logger=own).fit(NemoStyle({"chakra_profile": chosen}), loader(4))
        assert len([found for found, _ in own.metrics if ours(found).keys() == NAMES]) == number


SCRIPT = """
import os, sys
import torch
from pytorch_lightning.loggers import Logger
sys.path.insert(0, sys.argv[1])
from integrations.models import Model, loader, trainer

class Telling(Logger):
    name, version = "telling", 0

    def log_metrics(self, metrics, step=None):
        with open("said", "a") as file:
            file.write(f"{torch.distributed.get_rank()} {' '.join(metrics)}\\n")

    def log_hyperparams(self, params, *args, **kwargs):
        pass

trainer(logger=Telling(), devices=2, strategy="ddp_fork").fit(Model(), loader(8))
"""


def test_script_under_run_has_them_from_rank_0_alone(tmp_path):
    script, tests = tmp_path / "train.py", Path(__file__).parents[1]
    script.write_text(SCRIPT)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    options = ("--trace-dir", "traces", "--log-to-logger", "true")
    command = taken_over(tmp_path, "run", *options, script, "--", tests)
    assert isinstance(command, list), command
    done = warm.run(command, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "recorded in traces (job 0)" in done.stderr.replace(f"{tmp_path}/", "")
    assert "no optimizer step" not in done.stderr
    assert "attached" not in done.stderr  # rank 1 waits for no summary, and misses none
    rank, *names = (tmp_path / "said").read_text().split()
    assert (rank, {*names}) == ("0", {f"chakra_capture/{name}" for name in NAMES})
    assert len(list(tmp_path.glob("traces/*_phases/rank-*.jsonl"))) == 2


def test_means_are_over_the_ranks_that_measured():
    def rank(step, forward):
        rows = [{"place": "step", "phase": "forward", "mean_ns": forward}]
        rows += [{"place": "between", "phase": "validation", "mean_ns": 9e9}]
        return {"step_mean_ns": step, "step_median_ns": None, "coverage": 0.5, "table": rows}

    found = headline_numbers({"chakra_capture": {"phases": {"0": rank(4e6, 1e6), "1": rank(2e6, None)}}})
    assert ours(found) == {"step_time_mean_ms": 3.0, "forward_mean_ms": 1.0, "coverage": 0.5}
