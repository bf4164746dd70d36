"""The phases of a Hugging Face Trainer: times are known from naps and from a diary."""

from typing import Any

import pytest
import torch
from integrations.contract import our_warnings
from recording.recorded import settings
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from chakra_capture.integrations.huggingface import ChakraProfileCallback
from phases.phase_lines import NAP_NS, Diary, calls, gaps, measured, ns, place, steps

PARTS = ("input_wait", "forward", "backward", "optimizer")


class Items(Dataset):
    def __init__(self, size: int, diary: Diary, name: str) -> None:
        self.size, self.diary, self.name = size, diary, name

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.size:
            raise IndexError
        with self.diary(self.name):
            return torch.ones(4)


class Noted(torch.nn.Module):
    """Naps in forward and backward, and notes it."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.layer, self.diary = torch.nn.Linear(4, 1), diary

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        with self.diary("forward" if self.training else "validating"):
            loss = self.layer(inputs).sum()
        if loss.requires_grad:
            loss.register_hook(self.note_backward)
        return {"loss": loss, "out": inputs}

    def note_backward(self, _: Any) -> None:
        with self.diary("backward"):
            pass


class Silent(torch.nn.Module):
    """Can be compiled."""

    def __init__(self, _: Diary) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).sum()}


class SGD(torch.optim.SGD):
    diary: Diary

    def step(self, closure: Any = None) -> Any:
        with self.diary("optimizer"):
            return super().step(closure)


class NotedTrainer(Trainer):
    diary: Diary

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        with self.diary("loss"):
            return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.diary("saving"):
            super()._save_checkpoint(*args, **kwargs)


def train(
    folder,
    *callbacks: Any,
    size: int = 4,
    model: Any = None,
    kind: Any = NotedTrainer,
    enabled: bool = True,
    **more: Any,
) -> tuple[NotedTrainer, Diary]:
    diary = Diary()
    model = model(diary) if model is not None else Noted(diary)
    optimizer = SGD(model.parameters(), lr=0.01)
    optimizer.diary = diary
    chosen = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1}
    chosen |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "remove_unused_columns": False}
    made = kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder / "out"), **{**chosen, "logging_strategy": "no", **more}),
        data_collator=lambda rows: {"inputs": torch.stack(rows)},
        train_dataset=Items(size, diary, "fetch"),
        eval_dataset=Items(2, diary, "validation fetch"),
        optimizers=(optimizer, None),
        callbacks=[*callbacks, ChakraProfileCallback(settings(folder, None, None))],
    )
    made.diary = diary
    if not enabled:
        made.remove_callback(ChakraProfileCallback)
    made.train()
    return made, diary


def places(folder, diary: Diary, name: str) -> list[tuple[int, str | None]]:
    return [place(folder, interval) for interval in diary.of(name)]


def test_every_part_of_a_step_is_where_it_was(tmp_path):
    made, diary = train(tmp_path, size=3, gradient_accumulation_steps=2)

    found = steps(tmp_path)
    assert [step["step"] for step in found] == list(range(made.state.global_step)) == [0, 1]
    for name in ("forward", "backward"):
        assert places(tmp_path, diary, name) == [(0, name), (0, name), (1, name)]
        assert [calls(step, name) for step in found] == [2, 1]
        assert all(ns(step, name) >= calls(step, name) * NAP_NS for step in found)
    assert places(tmp_path, diary, "optimizer") == [(0, "optimizer"), (1, "optimizer")]
    assert places(tmp_path, diary, "loss") == [(0, None), (0, None), (1, None)]
    # The loader reads one batch ahead, so all three are read in the first request.
    assert places(tmp_path, diary, "fetch") == [(0, "input_wait")] * 3
    assert [calls(step, "input_wait") for step in found] == [1, 1]
    parts = dict.fromkeys((*PARTS, "validation", "checkpoint", "callbacks"))
    assert measured(tmp_path) == {**parts, "h2d": "there is no device to copy to"}


def test_validation_checkpoints_and_callbacks_between_steps_are_told_apart_and_leak_into_no_step(tmp_path):
    class Straying(TrainerCallback):
        """Between two steps, updates and reads a batch by itself, and naps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["optimizer"].step()
            next(iter(given["train_dataloader"]))
            given["model"](torch.ones(1, 4))

    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    _, diary = train(tmp_path, Straying(), **changes)

    found, between = steps(tmp_path), gaps(tmp_path)[1:]
    for name in PARTS:
        assert [calls(step, name) for step in found] == [1] * 4
    for name in ("validation fetch", "validating", "saving"):
        for interval in diary.of(name):
            with pytest.raises(AssertionError, match="in no step"):
                place(tmp_path, interval)
    assert [(calls(gap, "validation"), calls(gap, "checkpoint")) for gap in between] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert [calls(gap, "callbacks") for gap in between] == [1] * 4
    for gap in between:
        assert ns(gap, "callbacks") >= 2 * NAP_NS  # a fetch and a forward; its update is one more phase
        assert ns(gap, "validation") >= calls(gap, "validation") * 4 * NAP_NS
        assert ns(gap, "checkpoint") >= calls(gap, "checkpoint") * NAP_NS
    assert [name for name in ("forward", "optimizer", "input_wait") for gap in between if calls(gap, name)] == []


def test_an_update_that_the_scaler_skips_is_flagged(tmp_path):
    class Overflowing(TrainerCallback):
        """Says what a scaler says that has found infinite gradients."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            given["optimizer"]._is_overflow = state.global_step == 1

    train(tmp_path, Overflowing(), size=3)

    assert ["update_skipped" in step.get("flags", []) for step in steps(tmp_path)] == [False, True, False]


def test_a_compiled_model_is_timed_from_outside_and_compiled_as_without_us(tmp_path):
    counts = []
    for enabled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        backend = CompileCounter()

        class Compiling(NotedTrainer):
            """Calls its model through a compiled one, as ``torch_compile`` has it do."""

            def _wrap_model(self, model: Any, *args: Any, backend: Any = backend, **kwargs: Any) -> Any:
                return torch.compile(super()._wrap_model(model, *args, **kwargs), backend=backend)

        made, _ = train(tmp_path, kind=Compiling, model=Silent, size=2, enabled=enabled)
        assert isinstance(made.model_wrapped, torch._dynamo.OptimizedModule)
        counts.append((backend.frame_count, backend.op_count, dict(counters["stats"]), dict(counters["graph_break"])))

    assert counts[0] == counts[1]
    assert counts[0][0] > 0
    assert [calls(step, "forward") for step in steps(tmp_path)] == [1, 1]
    assert [calls(step, "backward") for step in steps(tmp_path)] == [1, 1]
    assert measured(tmp_path)["forward"] is None


def test_a_model_whose_calls_nobody_sees_is_not_measured(tmp_path, caplog):
    class Direct(NotedTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.nn.functional.linear(inputs["inputs"], model.layer.weight).sum()

    train(tmp_path, kind=Direct, size=2)

    assert "neither the model nor" in measured(tmp_path)["forward"]
    assert ["neither the model nor" in said for said in our_warnings(caplog)] == [True]


def test_a_trainer_is_as_it_was_when_training_has_raised(tmp_path):
    error = RuntimeError("training failed")
    seen: list[Any] = []

    class Failing(Noted):
        def note_backward(self, _: Any) -> None:
            raise error

    class Looking(TrainerCallback):
        def on_step_begin(self, *_: Any, **given: Any) -> None:
            seen.append(given["model"])

    with pytest.raises(RuntimeError) as caught:
        train(tmp_path, Looking(), model=Failing)

    assert caught.value is error
    (step,) = steps(tmp_path)
    assert "partial" in step["flags"]
    assert calls(step, "forward") == 1
    (model,) = seen
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_a_loop_of_ones_own_has_its_steps_timed_and_no_phase(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, None, None))
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control)
    for _ in range(2):
        callback.on_step_begin(None, state, control)
        state.global_step += 1
        callback.on_step_end(None, state, control)
    callback.on_train_end(None, state, control)

    assert [step["phases"] for step in steps(tmp_path)] == [{}, {}]
    assert {measured(tmp_path)[name] for name in PARTS} == {"the loop is not that of a transformers Trainer"}
