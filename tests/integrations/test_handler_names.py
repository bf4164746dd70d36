"""Handlers and callbacks that a framework calls inside a step: each by its name in the recorded steps alone."""

import functools
import json
import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from commands import run
from ignite.engine import Engine, EventEnum, Events
from monai.engines.utils import IterationEvents
from phases.monai_runs import trainer
from recording.recorded import entries, settings
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from chakra_capture.annotations import is_handler
from chakra_capture.integrations import huggingface, ignite, lightning, monai
from chakra_capture.integrations.handler_names import name_of, overridden
from integrations.models import Model, loader
from integrations.models import trainer as lightning_trainer

NAP_S, NAP_NS = 0.02, 20_000_000
STEPS = (1, 2)
pytestmark = pytest.mark.filterwarnings("ignore")


def nap(*_: Any) -> None:
    time.sleep(NAP_S)


class Napper:
    def __call__(self, *_: Any) -> None:
        nap()

    def rest(self, *_: Any) -> None:
        nap()


def rest_of(folder: Any) -> dict[str, float]:
    """The parts of the rest of the recorded steps, which sum to what their phases leave."""
    done = run("summary", folder, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    (whole,) = [row["wall_ns"] for row in said["phase_times"] if row["phase"] is None]
    parts = {row["part"]: row["wall_ns"] for row in said["rest_parts"]}
    assert round(len(STEPS) * sum(parts.values())) == round(len(STEPS) * whole)
    return parts


def handlers_in(parts: dict[str, float]) -> dict[str, bool]:
    """The handlers among the parts, and whether each took a nap in every step."""
    return {name.removeprefix("handler:"): ns >= NAP_NS for name, ns in parts.items() if is_handler(name)}


def check_only_recorded_steps_name(folder: Any, label: str, times: int = 1) -> None:
    """The annotation is in every recorded step, ``times`` times, and phase files know nothing of it."""
    found = [each for each in entries(folder / "0_kineto/rank-0.json") if each.get("name") == label]
    assert len([each for each in found if each["cat"] == "user_annotation"]) == times * len(STEPS)
    assert label not in (folder / "0_phases/rank-0.jsonl").read_text()


def test_handlers_of_a_monai_step_are_parts_of_its_rest_and_so_are_decollate_and_postprocessing(tmp_path):
    handler = monai.ChakraProfileHandler(settings(tmp_path, *STEPS))
    made = trainer(handler, postprocessing=lambda data: nap() or data)
    made.add_event_handler(IterationEvents.FORWARD_COMPLETED, Napper())
    made.add_event_handler(IterationEvents.LOSS_COMPLETED(every=1), Napper().rest)
    made.add_event_handler(IterationEvents.MODEL_COMPLETED, functools.partial(nap, None))
    heard = made._event_handlers
    sizes = []
    made.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: sizes.append(len(heard[IterationEvents.MODEL_COMPLETED]))
    )
    before = {event: list(listed) for event, listed in heard.items()}
    made.run()

    parts = rest_of(tmp_path)
    parts.pop("decollate")
    assert handlers_in(parts) == {"Napper": True, "Napper.rest": True, "nap": True, "postprocessing": True}
    check_only_recorded_steps_name(tmp_path, "handler:Napper.rest")
    # Three handlers, and two more around each from the first to the last recorded step.
    assert sizes == [3, 9, 3, 3]
    assert {event: heard[event] for event in before} == before


class Own(EventEnum):
    WORKED = "worked"


def test_handlers_of_events_that_an_ignite_engine_fires_by_itself_are_named_inside_its_iteration(tmp_path):
    def work(engine: Engine, batch: Any) -> int:
        nap()
        engine.fire_event(Own.WORKED)
        return 7

    made = Engine(work)
    made.register_events(*Own)
    ignite.ChakraProfileHandler(settings(tmp_path, *STEPS)).attach(made)
    made.add_event_handler(Own.WORKED, Napper().rest)
    made.run([0] * 4)
    assert handlers_in(rest_of(tmp_path)) == {"Napper.rest": True}


def test_handler_that_fails_in_a_recorded_step_fails_as_ever_and_no_name_is_left(tmp_path):
    def fail(engine: Engine) -> None:
        if engine.state.iteration == STEPS[0] + 1:
            raise Stop

    made = trainer(monai.ChakraProfileHandler(settings(tmp_path, *STEPS)))
    made.add_event_handler(IterationEvents.FORWARD_COMPLETED, fail)
    with pytest.raises(Stop):
        made.run()
    assert [entry[0] for entry in made._event_handlers[IterationEvents.FORWARD_COMPLETED]] == [fail]


class NappingCallback(pl.Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        nap()

    def on_after_backward(self, *_: Any) -> None:
        nap()


class NappingModel(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nap()


def test_hooks_of_lightning_callbacks_and_of_the_module_are_named_where_they_are_the_users(tmp_path):
    fitted = lightning_trainer(NappingCallback(), lightning.ChakraProfileCallback(settings(tmp_path, *STEPS)))
    fitted.fit(NappingModel(), loader(4))
    parts = rest_of(tmp_path)
    assert handlers_in(parts) == {
        "NappingCallback.on_before_zero_grad": True,
        "NappingCallback.on_after_backward": True,
        "NappingModel.on_before_optimizer_step": True,
    }
    assert [name for name in parts if "ChakraProfile" in name] == []
    check_only_recorded_steps_name(tmp_path, "handler:NappingCallback.on_after_backward")
    assert "profile" not in vars(fitted.profiler)


class NappingTrainerCallback(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        nap()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        nap()


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).sum()}


def train_rows(folder: Any, *callbacks: Any) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=1, max_steps=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    Trainer(
        model=Rows(),
        args=arguments,
        train_dataset=TensorDataset(torch.ones(4, 4)),
        data_collator=lambda batch: {"inputs": torch.stack([row[0] for row in batch])},
        callbacks=[*callbacks, huggingface.ChakraProfileCallback(settings(folder / "t", *STEPS))],
    ).train()


def test_callbacks_of_a_hugging_face_trainer_are_named(tmp_path):
    napping = NappingTrainerCallback()
    train_rows(tmp_path, napping)
    assert handlers_in(rest_of(tmp_path / "t")) == {
        "NappingTrainerCallback.on_step_begin": True,
        "NappingTrainerCallback.on_pre_optimizer_step": True,
    }
    check_only_recorded_steps_name(tmp_path / "t", "handler:NappingTrainerCallback.on_step_begin")
    assert vars(napping) == {}


class Stop(Exception):
    pass


class FailingCallback(pl.Callback):
    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS[0]:
            raise Stop


class FailingTrainerCallback(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == STEPS[0]:
            raise Stop


def test_callback_that_fails_in_a_recorded_step_fails_as_ever_and_nothing_of_ours_is_left(tmp_path):
    fitted = lightning_trainer(FailingCallback(), lightning.ChakraProfileCallback(settings(tmp_path / "l", *STEPS)))
    with pytest.raises(Stop):
        fitted.fit(Model(), loader(4))
    assert "profile" not in vars(fitted.profiler)
    failing = FailingTrainerCallback()
    with pytest.raises(Stop):
        train_rows(tmp_path, failing)
    assert vars(failing) == {}


def test_name_of_a_handler_is_read_from_nothing_that_may_raise():
    class Moody:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

        def hook(self) -> None:
            pass

    moody = Moody()
    assert [name_of(each) for each in (moody, moody.hook, functools.partial(moody.hook), lambda: 0, print, Napper)] == [
        "Moody", "Moody.hook", "Moody.hook", "<lambda>", "print", "type",
    ]  # fmt: skip
    assert name_of(functools.wraps(nap)(lambda: 0)) == "nap"


def test_name_that_would_spoil_a_trace_is_made_safe_and_short(tmp_path):
    def odd(_: Any) -> None:
        nap()

    odd.__name__ = 'a"b\\\udc80' + "c" * 200
    made = trainer(monai.ChakraProfileHandler(settings(tmp_path, *STEPS)))
    made.add_event_handler(IterationEvents.MODEL_COMPLETED, odd)
    made.run()
    assert handlers_in(rest_of(tmp_path))["a_b__" + "c" * 75]


def test_hooks_that_come_from_the_most_basic_class_alone_are_nobodys():
    assert overridden(NappingCallback()) == ["on_after_backward", "on_before_zero_grad"]
    assert overridden(pl.Callback()) == []
    callback = TrainerCallback()
    callback.on_step_begin = nap
    assert overridden(callback) == ["on_step_begin"]
