"""What every integration does, tested alike: a framework gives a ``Job``, and its test class derives from ``Contract``.

A job trains a small network with real trainers of the framework. Every training batch is visible in a trace as
``batch <number>``, every item read for training as ``request``, validation as ``validation``.
"""

import copy
import json
import logging
import os
import pickle
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from handed import CASES, require
from omegaconf import OmegaConf
from recording.recorded import check_pair, entries, files, manifest, names, settings, steps
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

from chakra_capture.annotations import VALIDATION, parse_step
from chakra_capture.errors import SettingsError

HARD_TO_WRITE = 'a "quoted\\"\nname\x01 é'


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training."""

    batches: int = 6  # in an epoch
    epochs: int = 1
    accumulate: int = 1
    validates: bool = False  # after every second step and every epoch, as far as the framework can
    resume_at: int = 0  # the step at which an earlier training was saved
    fail_at: int | None = None  # number of a batch
    error: BaseException | None = None
    terminate_at: int | None = None  # SIGTERM comes in this batch


@dataclass
class Batches:
    """Counts the batches of one training and computes with them."""

    plan: Plan
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.plan.resume_at * self.plan.accumulate

    def loss(self, network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        number = self.number
        self.number += 1
        with record_function(f"batch {number}"):
            if number == self.plan.fail_at:
                assert self.plan.error is not None
                raise self.plan.error
            if number == self.plan.terminate_at:
                os.kill(os.getpid(), signal.SIGTERM)
            with record_function(HARD_TO_WRITE):
                return network(inputs).sum()


RECORDING = {"enabled": True, "trace_dir": "traces"}


def expected(case: str) -> Any:
    """What a handed case says is right."""
    return json.loads((require(CASES / case) / "expect.json").read_text())


def validate(network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with record_function("validation"), torch.no_grad():
        return network(inputs).sum()


@dataclass
class Result:
    """What a training leaves."""

    weights: list[torch.Tensor]
    random_states: tuple[Any, ...]
    num_steps: int

    @classmethod
    def of(cls, network: torch.nn.Module, num_steps: int) -> "Result":
        weights = [weight.detach().clone() for weight in network.parameters()]
        return cls(weights, (torch.get_rng_state().tolist(), random.getstate()), num_steps)


class Job(Protocol):
    """One framework's training, with and without us."""

    def adapter(self, chosen: object, accumulate: int = 1) -> Any:
        """What a user makes of the settings."""

    def train(self, adapter: Any, plan: Plan) -> Result:
        """Train as the plan says; without us where ``adapter`` is None."""


class Items(Dataset):
    """Seeded rows; reading one for training is visible in a trace."""

    def __init__(self, size: int, name: str | None = "request") -> None:
        self.rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
        self.name = name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.name is None:
            return self.rows[index]
        with record_function(self.name):
            return self.rows[index] + 0


def training_data(plan: Plan) -> DataLoader:
    return DataLoader(Items(plan.batches), batch_size=1, shuffle=True)


def validation_data() -> DataLoader:
    return DataLoader(Items(2, name=None), batch_size=1)


def make_network() -> torch.nn.Module:
    """Seed the process and make the network; dropout draws random numbers in every step."""
    random.seed(1)
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))


def make_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01)


def same(first: Result, second: Result) -> bool:
    weights = all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    return weights and first.random_states == second.random_states and first.num_steps == second.num_steps


def batches(folder: Path, cycle: int = 0) -> list[int]:
    """The batches in both files, which must agree."""
    name = f"rank-0.cycle-{cycle}.json" if cycle else "rank-0.json"
    host, device = (names(folder / kind / name, "batch ") for kind in ("0_chakra", "0_kineto"))
    assert host == device
    return [int(found.removeprefix("batch ")) for found in host]


def spans(folder: Path, is_wanted: Callable[[str], bool]) -> list[tuple[float, float]]:
    events = entries(folder / "0_kineto/rank-0.json")
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if "dur" in e and is_wanted(e["name"])]


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("chakra_capture")]
    return [r.getMessage() for r in found]


@dataclass
class Recorded:
    """A training without us, and two with one adapter."""

    folder: Path
    bare: Result
    first: Result


WHOLE = Plan(batches=4, epochs=3, validates=True)
SHORT = Plan(batches=6)


class Contract:
    """The scenarios; a subclass names its ``job``."""

    job: Job
    error_of_sigterm: type[BaseException] | None = None  # what the framework itself ends a training with

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
        folder = tmp_path_factory.mktemp("recorded")
        bare = cls.job.train(None, WHOLE)
        adapter = cls.job.adapter(settings(folder, 2, 4, warmup_steps=0, active_steps=1, validation="exclude"))
        first = cls.job.train(adapter, WHOLE)
        cls.job.train(adapter, WHOLE)
        return Recorded(folder, bare, first)

    @pytest.fixture(scope="class")
    @classmethod
    def short(cls) -> Result:
        return cls.job.train(None, SHORT)

    @pytest.fixture(autouse=True)
    def _put_signals_back(self) -> Iterator[None]:
        # Lightning leaves SIGINT ignored after an interrupt.
        before = signal.getsignal(signal.SIGINT)
        yield
        signal.signal(signal.SIGINT, before)

    def test_both_files_hold_exactly_the_steps_of_the_window(self, recorded: Recorded) -> None:
        check_pair(recorded.folder, [2, 3, 4])
        assert batches(recorded.folder) == [2, 3, 4]
        wanted = expected("050-active1-window-keeps-last-step")
        assert [f"user_step#{number}.0" for number in batches(recorded.folder)] == wanted["et_steps"]
        assert wanted["et_steps"] == wanted["kineto_steps"]

    def test_second_training_is_a_new_window_of_the_same_run(self, recorded: Recorded) -> None:
        check_pair(recorded.folder, [2, 3, 4], cycle=1)
        assert batches(recorded.folder, cycle=1) == [2, 3, 4]
        said = manifest(recorded.folder)
        assert (said["complete"], said["reason"], len(said["windows"])) == (True, "complete", 2)
        assert [said["windows"][n]["aborted_steps"] for n in (0, 1)] == [[], []]
        assert [name for name in files(recorded.folder) if name.endswith(".part")] == []

    def test_weights_and_random_states_are_the_same_without_us(self, recorded: Recorded) -> None:
        assert recorded.bare.num_steps == 12
        assert same(recorded.bare, recorded.first)

    def test_validation_in_the_window_is_marked_and_in_no_step(self, recorded: Recorded) -> None:
        steps = spans(recorded.folder, lambda name: parse_step(name) is not None)
        found = spans(recorded.folder, lambda name: name == "validation")
        marks = spans(recorded.folder, lambda name: name == VALIDATION)
        assert found
        assert all(any(first <= start and end <= last for first, last in marks) for start, end in found)
        assert all(end <= first or start >= last for start, end in marks for first, last in steps)

    def test_every_request_for_a_batch_is_in_a_step(self, recorded: Recorded) -> None:
        steps = spans(recorded.folder, lambda name: parse_step(name) is not None)
        found = spans(recorded.folder, lambda name: name == "request")
        assert len(found) == 3
        assert all(any(first <= start and end <= last for first, last in steps) for start, end in found)

    def test_accumulated_batches_are_one_step_and_each_window_has_files_of_its_own(self, tmp_path: Path) -> None:
        windows = [
            {"start_step": 2, "end_step": 2},
            {"start_step": 3, "end_step": 5, "warmup_steps": 1, "active_steps": 2},
        ]
        chosen = {"enabled": True, "trace_dir": str(tmp_path), "windows": windows}
        adapter = self.job.adapter(chosen, accumulate=4)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(adapter)))
        result = self.job.train(copied, Plan(batches=24, accumulate=4))

        assert result.num_steps == 6
        check_pair(tmp_path, [2])
        wanted = [f"2.{number % 4}" for number in batches(tmp_path) if number // 4 == 2]
        assert [wanted] == expected("064-two-window-conventions")["2..2 accum 4"]
        # The warm-up is taken from the window, here one step later than in the case.
        recorded = [step - 1 for step in steps(tmp_path / "0_kineto/rank-0.cycle-1.json")]
        assert recorded == expected("051-warmup-eats-window")["2..4 warmup 1 active 2"]["kineto_steps"]
        check_pair(tmp_path, [4, 5], cycle=1)
        counted = expected("052-accumulation-steps-the-profiler-per-microbatch")
        assert len(recorded) == counted["profiler_steps"]
        assert len(batches(tmp_path, cycle=1)) == counted["et_steps_count"] == counted["kineto_steps_count"]
        assert batches(tmp_path, cycle=1) == [16, 17, 18, 19, 20, 21, 22, 23]
        assert manifest(tmp_path)["complete"]

    def test_exception_propagates_unchanged_and_what_was_recorded_is_kept(self, tmp_path: Path) -> None:
        error = RuntimeError("training failed")
        adapter = self.job.adapter(settings(tmp_path, 1, 4))
        with pytest.raises(RuntimeError) as caught:
            self.job.train(adapter, Plan(fail_at=3, error=error))

        assert caught.value is error
        check_pair(tmp_path, [1, 2, 3])
        said = manifest(tmp_path)
        assert (said["complete"], said["reason"], said["detail"]) == (False, "exception", "RuntimeError")
        assert (said["windows"][0]["steps"], said["windows"][0]["partial_step"]) == ([1, 2], 3)

        self.job.train(adapter, SHORT)
        check_pair(tmp_path, [1, 2, 3, 4], cycle=1)

    def test_keyboard_interrupt_in_the_window(self, tmp_path: Path) -> None:
        adapter = self.job.adapter(settings(tmp_path, 1, 4))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            self.job.train(adapter, Plan(fail_at=3, error=KeyboardInterrupt()))

        check_pair(tmp_path, [1, 2, 3])
        assert manifest(tmp_path)["detail"] == "KeyboardInterrupt"
        assert manifest(tmp_path)["windows"][0]["partial_step"] == 3

    def test_sigterm_ends_the_recording_and_goes_on_to_whoever_handles_it(self, tmp_path: Path, short: Result) -> None:
        adapter, plan, found = self.job.adapter(settings(tmp_path, 1, 4)), replace(SHORT, terminate_at=3), []
        before = signal.signal(signal.SIGTERM, lambda *_: found.append(files(tmp_path)))
        try:
            if self.error_of_sigterm is None:
                assert same(short, self.job.train(adapter, plan))
            else:
                with pytest.raises(self.error_of_sigterm):
                    self.job.train(adapter, plan)
        finally:
            signal.signal(signal.SIGTERM, before)

        assert [names[:2] for names in found] == [["0_chakra/rank-0.json", "0_kineto/rank-0.json"]]
        check_pair(tmp_path, [1, 2, 3])
        said = manifest(tmp_path)
        assert (said["reason"], said["windows"][0]["partial_step"]) == ("SIGTERM", 3)

    def test_training_that_ends_in_the_window(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.job.train(self.job.adapter(settings(tmp_path, 6, 20)), Plan(batches=8))

        wanted = expected("053-training-ends-inside-window")["max_steps"]
        check_pair(tmp_path, wanted["captured"])
        assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (False, wanted["reason"])
        assert our_warnings(caplog) == []

    def test_window_that_is_never_reached_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.job.train(self.job.adapter(settings(tmp_path, 50, 51)), SHORT)

        assert ["The profiling window 50..51 was never reached" in said for said in our_warnings(caplog)] == [True]

    def test_disabled_imports_no_profiler_and_changes_nothing(
        self, tmp_path: Path, short: Result, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import builtins

        ours = []

        def watching(name: str, globals: Any = None, *rest: Any, original: Any = builtins.__import__) -> Any:
            if str((globals or {}).get("__name__")).startswith("chakra_capture"):
                ours.append(name)
            return original(name, globals, *rest)

        monkeypatch.setattr(builtins, "__import__", watching)
        monkeypatch.chdir(tmp_path)
        result = self.job.train(self.job.adapter({"chakra_profile": {"enabled": False}}), SHORT)

        assert [name for name in ours if name.startswith("torch")] == []
        assert files(tmp_path) == []
        assert same(short, result)

    def test_resume_in_the_window_goes_on_counting(self, tmp_path: Path) -> None:
        wanted = expected("056-resume-past-window")["from8"]
        adapter = self.job.adapter(settings(tmp_path / "t", *wanted["requested"]))
        self.job.train(adapter, Plan(batches=12, resume_at=8))

        check_pair(tmp_path / "t", wanted["captured"])
        assert batches(tmp_path / "t") == wanted["captured"]
        assert manifest(tmp_path / "t")["reason"] == "resumed inside the window"

    def test_resume_past_the_window_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        adapter = self.job.adapter(settings(tmp_path / "t", 0, 1))
        self.job.train(adapter, Plan(batches=8, resume_at=3))

        assert ["already past at global_step 3" in said for said in our_warnings(caplog)] == [True]
        assert manifest(tmp_path / "t")["reason"] == "window already past"

    def test_profiler_and_observer_of_others_are_left_alone(
        self, tmp_path: Path, short: Result, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = self.job.adapter(settings(tmp_path, 1, 3))
        observer = ExecutionTraceObserver().register_callback(str(tmp_path / "theirs.json"))
        with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as theirs:
            result = self.job.train(adapter, SHORT)

        assert same(short, result)
        assert sum(event.name.startswith("batch ") for event in theirs.events()) == 6
        # Its names are as the observer writes them, which is no JSON.
        assert (tmp_path / "theirs.json").read_text(errors="replace").count('"name": "batch ') == 6
        assert "another torch profiler is running" in caplog.text
        assert manifest(tmp_path)["reason"] == "fault"

    def test_folder_that_cannot_be_used_stops_the_recording_alone(
        self, tmp_path: Path, short: Result, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        result = self.job.train(self.job.adapter(settings(tmp_path / "file", 1, 3)), SHORT)

        assert same(short, result)
        assert ["Recording stops" in r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [True]

    def test_wrong_settings_raise_before_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRACE_DIR", raising=False)
        folder = require(CASES / "060-config-values-that-lie")
        base = (folder / "base.yaml").read_text()
        for line, wanted in json.loads((folder / "expect.json").read_text()).items():
            changed = re.sub(rf"(?m)^  {line.split(':')[0]}:.*$", lambda _, line=line: f"  {line}", base, count=1)
            if changed == base:  # a key that the base has not
                changed = base.replace("  start_step", f"  {line}\n  start_step", 1)
            if wanted in ("disabled", "user expanded"):
                self.job.adapter(OmegaConf.create(changed))
            elif not any(choice in wanted for choice in ("accept as", "parsed as", "with warning")):
                with pytest.raises(SettingsError):
                    self.job.adapter(OmegaConf.create(changed))
        with pytest.raises(SettingsError, match="warmup_steps"):  # 051: nothing but warm-up
            self.job.adapter({**RECORDING, "start_step": 2, "end_step": 2, "warmup_steps": 1})

    def test_section_of_the_other_profiler_may_be_absent_and_not_be_on(self) -> None:
        folder = require(CASES / "061-nsys-section-absent")
        self.job.adapter(OmegaConf.load(folder / "no-nsys.yaml"))
        with pytest.raises(SettingsError, match="nsys_profile"):
            self.job.adapter(OmegaConf.load(folder / "both.yaml"))
