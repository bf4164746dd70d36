"""What the phases of a Lightning loop are, rule by rule (L1 to L10); times are known from naps and from a diary."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch._dynamo
from integrations.contract import our_warnings
from integrations.models import Model, Stream, TwoOptimizers, loader, trainer
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy
from recording.recorded import check_pair, files, settings
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader, Dataset

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.integrations.lightning import ChakraProfileCallback
from phases.phase_lines import NAP_NS, Diary, calls, gaps, lines, measured, ns, place, steps


def fit(folder, model=None, *more: Any, size: int = 4, **changes: Any) -> pl.Trainer:
    """Train with the callback; the first further argument, if any, is what is validated with."""
    first, callbacks = changes.pop("first", []), changes.pop("callbacks", [])
    batches = changes.pop("batches") if "batches" in changes else loader(size)
    fitted = trainer(*first, ChakraProfileCallback(phases_only(folder)), *callbacks, **changes)
    fitted.fit(model or Model(), batches, *more)
    return fitted


def phases_only(folder, **changes: Any) -> ChakraProfileConfig:
    return settings(folder, None, None, **changes)


class Napping(Dataset):
    """Items that take a known time to read, and are noted."""

    def __init__(self, size: int, diary: Diary, name: str) -> None:
        self.size, self.diary, self.name = size, diary, name

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        with self.diary(self.name):
            return torch.ones(4)


class Noted(Model):
    """Naps in each of its parts, and notes them."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary = diary

    def forward(self, inputs: Any) -> torch.Tensor:
        with self.diary("forward"):
            return self.layer(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self(batch[0])
        with self.diary("loss"):
            loss = out.sum()
        loss.register_hook(self.note_backward)
        return loss

    def note_backward(self, _: Any) -> None:
        with self.diary("backward"):
            pass

    def on_before_backward(self, loss: Any) -> None:
        with self.diary("before backward"):
            pass

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with self.diary("zero_grad"):
            pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.diary("clipping"):
            pass

    def configure_optimizers(self) -> Any:
        diary = self.diary

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                with diary("optimizer"):
                    return result

        class Scheduler(torch.optim.lr_scheduler.ConstantLR):
            def step(self, *args: Any) -> None:
                with diary("scheduler"):
                    super().step(*args)

        optimizer = SGD(self.parameters(), lr=0.01)
        scheduler = Scheduler(optimizer)
        diary.entries.clear()  # it steps when it is made
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Nothing(pl.Callback):
    pass


class Layer(torch.nn.Linear):
    """A layer of the user's own: torch does not compile one of its own layers alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(inputs))


@pytest.mark.parametrize(("size", "expected"), [(1, [1, 1, 1, 1]), (3, [3, 1])])
def test_L1_a_step_is_an_update_and_sums_its_batches(tmp_path, size, expected):
    fitted = fit(tmp_path, accumulate_grad_batches=size, max_epochs=2)

    found = steps(tmp_path)
    assert [step["step"] for step in found] == list(range(fitted.global_step))
    for name in ("input_wait", "forward", "backward"):
        assert [calls(step, name) for step in found] == 2 * expected
    assert [calls(step, "optimizer") for step in found] == [1] * len(found)
    assert measured(tmp_path) == {
        **dict.fromkeys(("input_wait", "forward", "backward", "optimizer", "callbacks", "validation", "checkpoint")),
        "h2d": "there is no device to copy to",
    }


def test_L1_every_part_of_a_step_is_where_it_was(tmp_path):
    diary = Diary()
    fit(tmp_path, Noted(diary), batches=DataLoader(Napping(3, diary, "fetch")), accumulate_grad_batches=2)

    found = {name: [place(tmp_path, interval) for interval in diary.of(name)] for name, _, _ in diary.entries}
    every_batch, every_step = [0, 0, 1], [0, 1]
    assert found == {
        "fetch": [(step, "input_wait") for step in every_batch],
        "forward": [(step, "forward") for step in every_batch],
        "loss": [(step, None) for step in every_batch],
        "zero_grad": [(step, None) for step in every_step],
        "before backward": [(step, None) for step in every_batch],
        "backward": [(step, "backward") for step in every_batch],
        "clipping": [(step, None) for step in every_step],
        "optimizer": [(step, "optimizer") for step in every_step],
        "scheduler": [(step, None) for step in every_step],
    }
    # In no phase stands what naps there, and nothing of it in a phase: the sums say so, too.
    for step in steps(tmp_path):
        napped = {name: sum(at == step["step"] for at, _ in places) * NAP_NS for name, places in found.items()}
        residual = step["ns"] - sum(took for took, _ in step["phases"].values())
        assert residual >= sum(napped[n] for n in ("loss", "zero_grad", "before backward", "clipping", "scheduler"))
        for name, source in (("input_wait", "fetch"), ("forward",) * 2, ("backward",) * 2, ("optimizer",) * 2):
            assert ns(step, name) >= napped[source]


def test_L2_validation_and_sanity_fetches_are_not_input_wait(tmp_path):
    diary = Diary()
    validated = DataLoader(Napping(2, diary, "validation"))
    fit(tmp_path, None, validated, num_sanity_val_steps=2, val_check_interval=2, accumulate_grad_batches=3)

    first, second = steps(tmp_path)
    assert (calls(first, "input_wait"), calls(second, "input_wait")) == (3, 1)
    assert len(diary.of("validation")) == 2 + 2 + 2  # sanity check, in the middle of the first step, at the end
    inside = diary.of("validation")[2:4]
    assert [place(tmp_path, interval) for interval in inside] == [(0, "validation")] * 2
    assert ns(first, "validation") >= 2 * NAP_NS
    assert (calls(second, "validation"), calls(gaps(tmp_path)[-1], "validation")) == (0, 1)
    assert ns(gaps(tmp_path)[-1], "validation") >= 2 * NAP_NS


def test_L2_validation_alone_publishes_nothing(tmp_path):
    trainer(ChakraProfileCallback(phases_only(tmp_path))).validate(Model(), loader(2), verbose=False)

    assert files(tmp_path) == []


class Transferring(Model):
    """Moves batches itself, to a device that computes nothing."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary = diary

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        with self.diary("transfer"):
            for tensor in batch:
                tensor.to("meta")
                tensor.to(torch.float64)
            return batch


class Elsewhere(SingleDeviceStrategy):
    """Computes on the CPU and, in training, calls its device by another name."""

    name = "cpu"

    @property
    def root_device(self) -> torch.device:
        return torch.device(self.name)


class Renaming(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.name = "meta"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.name = "cpu"


def test_L3_a_step_opens_before_its_batch_is_transferred(tmp_path):
    diary = Diary()
    fit(tmp_path, Transferring(diary))

    assert [place(tmp_path, interval) for interval in diary.of("transfer")] == [(n, None) for n in range(4)]


def test_L3_transfers_of_training_batches_are_h2d_and_the_strategy_gets_its_method_back(tmp_path):
    diary = Diary()
    strategy = Elsewhere(device=torch.device("cpu"))
    changes = {"strategy": strategy, "first": [Renaming()], "val_check_interval": 2, "accumulate_grad_batches": 4}
    fit(tmp_path, Transferring(diary), loader(2), **changes)

    (step,) = steps(tmp_path)
    assert calls(step, "h2d") == 4  # of as many batches; a dtype is no device, and validation no training
    assert len(diary.of("transfer")) > 4
    assert measured(tmp_path)["h2d"] is None
    assert "batch_to_device" not in vars(strategy)


def test_L3_transfers_are_not_told_apart_where_the_job_transforms_batches_behind_them(tmp_path):
    class Transforming(Transferring):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    fit(tmp_path, Transforming(Diary()), strategy=Elsewhere(device=torch.device("cpu")), first=[Renaming()])

    assert "on_after_batch_transfer is the job's own" in measured(tmp_path)["h2d"]
    assert [calls(step, "h2d") for step in steps(tmp_path)] == [0] * 4
    assert [calls(step, "forward") for step in steps(tmp_path)] == [1] * 4


def test_L3_a_training_step_that_fetches_by_itself_has_its_wait_inside(tmp_path):
    diary = Diary()

    class Fetching(Model):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            with diary("own", nap=0):
                batch, _, _ = next(dataloader_iter)
            return self.layer(batch).sum()

    fit(tmp_path, Fetching(), batches=DataLoader(Napping(3, diary, "fetch")))

    found = steps(tmp_path)[: len(diary.of("fetch"))]
    assert [place(tmp_path, interval) for interval in diary.of("fetch")] == [(n, "input_wait") for n in range(3)]
    assert [place(tmp_path, interval) for interval in diary.of("own")[:3]] == [(n, None) for n in range(3)]
    assert [calls(step, "input_wait") for step in found] == [1] * 3


def training(step: Any, **parts: Any) -> Model:
    """A model whose training step is ``step(model, inputs)``."""

    class Trained(Model):
        def forward(self, inputs: Any) -> torch.Tensor:
            return self.layer(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.step(self, batch[0]).sum()

    made = Trained()
    made.step = step
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda model, x: model(x), 1),
        (lambda model, x: model.layer(x), 1),
        (lambda model, x: model(x) + model.layer(x), 2),
        (lambda model, x: model.blocks[1](model.blocks[0](x)), 2),
        (lambda model, x: model.layer(model.named["first"](x)), 2),
    ],
    ids=["self", "child", "both", "members of a list", "member of a dict"],
)
def test_L4_each_outermost_call_of_the_module_or_a_child_is_one_forward(tmp_path, step, expected):
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = training(step, blocks=torch.nn.ModuleList(layers[:2]), named=torch.nn.ModuleDict({"first": layers[2]}))
    fit(tmp_path, model, size=2)

    assert [calls(step, "forward") for step in steps(tmp_path)] == [expected] * 2


def test_L4_a_step_that_calls_functions_alone_is_warned_of_once_and_forward_is_missing(tmp_path, caplog):
    fit(tmp_path, training(lambda model, x: torch.nn.functional.linear(x, model.layer.weight)))

    assert [calls(step, "forward") for step in steps(tmp_path)] == [0] * 4
    assert [calls(step, "backward") for step in steps(tmp_path)] == [1] * 4
    assert "neither the module nor one of its children" in measured(tmp_path)["forward"]
    assert ["neither the module nor" in said for said in our_warnings(caplog)] == [True]


def test_L4_a_forward_that_comes_later_is_measured_from_there(tmp_path):
    seen: list[int] = []

    def step(model: Any, x: Any) -> torch.Tensor:
        seen.append(1)
        return torch.nn.functional.linear(x, model.layer.weight) if len(seen) < 3 else model(x)

    fit(tmp_path, training(step))

    assert [calls(step, "forward") for step in steps(tmp_path)] == [0, 0, 1, 1]
    said = [line["phases"]["forward"] is None for line in lines(tmp_path, "measures")]
    assert said == [False, True]


def test_L4_forwards_outside_the_training_step_are_not_charged(tmp_path):
    class Around(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.layer(batch[0])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.layer(torch.ones(4))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.layer(batch[0])

    fit(tmp_path, Around(), loader(2), val_check_interval=2, accumulate_grad_batches=4)

    (step,) = steps(tmp_path)
    assert calls(step, "forward") == 4


class Wrapping(SingleDeviceStrategy):
    """Trains through a module around the user's, as DDP does."""

    class Outer(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.model = self.Outer(self.model)


def test_L4_a_strategy_that_calls_the_module_for_the_training_step_adds_no_forward(tmp_path):
    diary = Diary()
    fit(tmp_path, Noted(diary), size=2, strategy=Wrapping(device=torch.device("cpu")))

    assert [calls(step, "forward") for step in steps(tmp_path)] == [1, 1]
    assert [place(tmp_path, interval)[1] for interval in diary.of("loss")] == [None, None]


@pytest.mark.parametrize("which", ["child", "member", "child, when training starts"])
def test_L4_a_compiled_child_is_compiled_as_without_us_and_its_calls_are_forwards(tmp_path, which):
    backends = [CompileCounter(), CompileCounter()]
    for folder, backend in zip((None, tmp_path), backends, strict=True):
        torch._dynamo.reset()
        model = training(lambda model, x: model.layer(model.blocks[0](x)))
        model.layer, model.blocks = Layer(4, 1), torch.nn.ModuleList([Layer(4, 4)])
        compile_layer = partial(model.layer.compile, backend=backend)
        if which == "member":
            model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
        elif which == "child":
            compile_layer()
        else:
            model.on_train_start = compile_layer
        for _ in range(2):
            if folder is None:
                trainer().fit(model, loader(3), loader(1))
            else:
                fit(folder, model, loader(1), size=3)

    assert backends[0].frame_count == backends[1].frame_count > 0
    assert [calls(step, "forward") for step in steps(tmp_path)] == [2] * 6
    assert measured(tmp_path)["forward"] is None


def test_L4_a_child_that_is_compiled_under_another_name_is_left_alone_and_the_reason_said(tmp_path):
    model = training(lambda model, x: model.compiled(x) + model.layer(x))
    model.compiled = torch.compile(model.layer, backend="eager")
    fit(tmp_path, model, size=2)

    assert "under another name" in measured(tmp_path)["forward"]


def test_L4_a_function_of_the_modules_own_that_is_compiled_is_left_alone_and_the_reason_said(tmp_path, caplog):
    backends = [CompileCounter(), CompileCounter()]
    for folder, backend in zip((None, tmp_path), backends, strict=True):
        torch._dynamo.reset()
        model = training(lambda model, x: model.both(x) + model.layer(x))
        model.hidden = Layer(4, 4)
        model.both = torch.compile(lambda x, model=model: model.layer(model.hidden(x)), backend=backend)
        for _ in range(2):
            trainer().fit(model, loader(3)) if folder is None else fit(folder, model, size=3)

    assert backends[0].frame_count == backends[1].frame_count > 0
    assert "both is compiled" in measured(tmp_path)["forward"]
    assert [calls(step, "forward") for step in steps(tmp_path)] == [0] * 6
    assert [calls(step, "backward") for step in steps(tmp_path)] == [1] * 6
    assert {"both is compiled" in said for said in our_warnings(caplog)} == {True}


def test_L5_a_scheduler_of_the_step_is_no_part_of_the_optimizer(tmp_path):
    diary = Diary()
    fit(tmp_path, Noted(diary), size=2)

    assert [place(tmp_path, interval) for interval in diary.of("scheduler")] == [(0, None), (1, None)]
    assert [place(tmp_path, interval) for interval in diary.of("optimizer")] == [(0, "optimizer"), (1, "optimizer")]


def test_L6_two_optimizers_in_one_batch_are_one_step_with_two_of_each(tmp_path):
    class Twice(TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).sum())
                optimizer.step()

    fit(tmp_path, Twice())

    for name in ("forward", "backward", "optimizer"):
        assert [calls(step, name) for step in steps(tmp_path)] == [2] * 4


def test_L6_the_work_of_a_closure_is_none_of_the_optimizers(tmp_path):
    diary = Diary()

    class Searching(Noted):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)

    fit(tmp_path, Searching(diary), size=2)

    assert len(diary.of("loss")) > 2  # LBFGS calls the closure as often as it likes
    assert {place(tmp_path, interval)[1] for interval in diary.of("loss")} == {None}
    assert all(ns(step, "optimizer") > 0 for step in steps(tmp_path))
    assert [calls(step, "forward") for step in steps(tmp_path)] == [calls(step, "backward") for step in steps(tmp_path)]


class Scaled(Model):
    """Its gradients are infinite in the batches named."""

    def __init__(self, *infinite: int) -> None:
        super().__init__()
        self.infinite = infinite

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx in self.infinite else loss


def test_L6_a_step_that_the_scaler_skips_has_no_optimizer_and_says_so(tmp_path):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    fit(tmp_path, Scaled(0, 2), plugins=[plugin])

    found = steps(tmp_path)
    assert ["update_skipped" in step.get("flags", []) for step in found] == [True, False, True, False]
    assert [calls(step, "optimizer") for step in found] == [0, 1, 0, 1]
    assert measured(tmp_path)["optimizer"] is None


def test_L6_an_optimizer_that_replaces_another_is_timed_as_well(tmp_path):
    class Replacing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.strategy.optimizers = [torch.optim.Adam(pl_module.parameters())]

    fit(tmp_path, callbacks=[Replacing()])

    assert [calls(step, "optimizer") for step in steps(tmp_path)] == [1] * 4
    assert not any("update_skipped" in step.get("flags", []) for step in steps(tmp_path))


def test_L6_an_optimizer_whose_step_is_compiled_is_left_alone(tmp_path, caplog):
    class Compiled(Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            inner, plain = torch.compile(lambda: None, backend="eager"), optimizer.step

            def step(closure: Any = None) -> Any:
                return plain(closure)

            step._torchdynamo_orig_callable = inner._torchdynamo_orig_callable
            optimizer.step = step
            return optimizer

    fit(tmp_path, Compiled())

    assert [calls(step, "optimizer") for step in steps(tmp_path)] == [0] * 4
    assert not any("update_skipped" in step.get("flags", []) for step in steps(tmp_path))
    assert "is compiled" in measured(tmp_path)["optimizer"]
    assert ["is compiled" in said for said in our_warnings(caplog)] == [True]


def wrapped(fitted: pl.Trainer) -> list[str]:
    """What is still replaced, or hooked, of all that a fit goes through."""
    loop, strategy, model = fitted.fit_loop, fitted.strategy, fitted.lightning_module
    owners = (fitted, loop, loop.epoch_loop, loop.epoch_loop.val_loop, strategy, strategy.precision_plugin)
    methods = ("save_checkpoint", "on_advance_end", "_on_before_fetch", "_on_after_fetch", "run", "training_step")
    methods += ("optimizer_step", "batch_to_device", "backward")
    left = [f"{type(owner).__name__}.{name}" for owner in owners for name in methods if name in vars(owner)]
    left += [type(module).__name__ for module in model.modules() if "_compiled_call_impl" in vars(module)]
    for optimizer in strategy.optimizers:
        left += [n for n in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks") if getattr(optimizer, n)]
    return left + [name for name in ("training_step", "forward") if name in vars(model)]


class Failing(Model):
    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.at:
            raise self.error
        return loss


def test_L7_an_exception_keeps_the_steps_before_and_puts_everything_back(tmp_path):
    error = RuntimeError("training failed")
    fitted = trainer(ChakraProfileCallback(phases_only(tmp_path)), accumulate_grad_batches=2)
    model = Failing(4, error)
    during: list[list[str]] = []
    model.on_before_backward = lambda loss: during.append(wrapped(fitted))
    with pytest.raises(RuntimeError) as caught:
        fitted.fit(model, loader(8))

    assert caught.value is error
    assert [(step["step"], "partial" in step.get("flags", [])) for step in steps(tmp_path)] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert "SingleDeviceStrategy.training_step" in during[0]
    assert wrapped(fitted) == []


def test_L8_what_stays_dark_is_named_in_one_warning_and_the_rest_is_timed(tmp_path, caplog):
    class Dark(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            torch.nn.functional.linear(batch[0], self.layer.weight).sum().backward()
            self.optimizers().step()
            self.optimizers().zero_grad()

    fit(tmp_path, Dark())

    dark = ("forward", "backward")
    assert [[n in said for n in dark] for said in our_warnings(caplog)] == [[True, True]]
    assert [name for name, why in measured(tmp_path).items() if why] == [*dark, "h2d"]
    assert [(calls(s, "input_wait"), calls(s, "optimizer"), calls(s, "backward")) for s in steps(tmp_path)] == [
        (1, 1, 0)
    ] * 4


def test_L9_a_second_callback_does_nothing_and_is_warned_of_once(tmp_path, caplog):
    first, second = (
        ChakraProfileCallback(phases_only(tmp_path / "a")),
        ChakraProfileCallback(phases_only(tmp_path / "b")),
    )
    fitted = trainer(Nothing(), first, second)
    for fits in (1, 2):
        caplog.clear()
        fitted.fit_loop.max_epochs = fits
        fitted.fit(Model(), loader(4))

        assert ["two ChakraProfileCallbacks" in said for said in our_warnings(caplog)] == [True]
        assert [step["step"] for step in steps(tmp_path / "a")] == list(range(4 * fits))
        assert {calls(step, "forward") for step in steps(tmp_path / "a")} == {1}
        assert wrapped(fitted) == []
    assert files(tmp_path / "b") == []
    assert fitted.callbacks[1:3] == [first, second]


def test_L9_a_callback_that_is_switched_off_is_no_second_one(tmp_path, caplog):
    off = ChakraProfileCallback({"chakra_profile": {"enabled": False}})
    trainer(off, ChakraProfileCallback(phases_only(tmp_path))).fit(Model(), loader(2))

    assert our_warnings(caplog) == []
    assert len(steps(tmp_path)) == 2


def test_L10_max_steps_is_honoured_and_a_second_fit_inherits_nothing(tmp_path):
    callback = ChakraProfileCallback(phases_only(tmp_path))
    diary = Diary()
    for _ in range(2):
        fitted = trainer(callback, max_steps=3, max_epochs=-1)
        fitted.fit(Model(), DataLoader(Napping(8, diary, "fetch")))
        with diary("between"):
            pass

    found = steps(tmp_path)
    assert [step["step"] for step in found] == [0, 1, 2] * 2
    assert [calls(step, "input_wait") for step in found] == [1] * 6
    assert len(diary.of("fetch")) == 6
    with pytest.raises(AssertionError, match="in no step"):
        place(tmp_path, diary.of("between")[0])


def test_time_between_steps_is_told_apart(tmp_path):
    """Callbacks at the ends of batches and epochs, and checkpoints, which are not callbacks' time."""
    diary = Diary()

    class Slow(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            with diary("batch end"):
                pass

        def on_train_epoch_end(self, *_: Any) -> None:
            with diary("epoch end"):
                pass

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with diary("checkpoint", nap=0):
                trainer.save_checkpoint(tmp_path / "model.ckpt")

        def on_save_checkpoint(self, *_: Any) -> None:
            with diary("saving"):
                pass

    fit(tmp_path, None, callbacks=[Slow(), Saving()], size=2, max_epochs=2, accumulate_grad_batches=2)

    first, second = steps(tmp_path)
    end_of_epoch = gaps(tmp_path)[1:]
    for stretch, num_ends in ((first, 1), (second, 1), (end_of_epoch[0], 2), (end_of_epoch[1], 2)):
        assert (calls(stretch, "callbacks"), calls(stretch, "checkpoint")) == (1, 1)
        assert ns(stretch, "callbacks") >= num_ends * NAP_NS
        assert ns(stretch, "checkpoint") >= NAP_NS
    for step in (first, second):
        saved = [i for i in diary.of("saving") if step["begin_ns"] < i[0] < step["begin_ns"] + step["ns"]]
        assert [place(tmp_path, interval)[1] for interval in saved] == ["checkpoint"]
        # Exclusive: the callbacks' time is what the checkpoint leaves of the span around it.
        (around,) = [last - begin for name, begin, last in step["spans"] if name == "callbacks"]
        assert ns(step, "callbacks") == around - ns(step, "checkpoint")


def test_a_loader_without_a_length_waits_for_each_batch_once(tmp_path):
    fit(tmp_path, batches=DataLoader(Stream(4)), max_epochs=2, accumulate_grad_batches=2)

    found = steps(tmp_path)
    assert [step["step"] for step in found] == [0, 1, 2, 3]
    # The first batch of the first epoch is there before training starts; each epoch's last request brings nothing.
    assert sum(calls(step, "input_wait") for step in found) == 4 + (1 + 4)


def test_phases_that_end_early_are_put_back_and_the_window_goes_on(tmp_path):
    found: list[list[str]] = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            found.append(wrapped(trainer))

    callback = ChakraProfileCallback(settings(tmp_path, 3, 4, max_recorded_steps=2))
    trainer(callback, Looking()).fit(Model(), loader(6))

    assert len(steps(tmp_path)) == 2
    assert "_TrainingEpochLoop._on_after_fetch" in found[0]
    assert found[2:] == [["_TrainingEpochLoop._on_before_fetch"]] * 4  # what tells the window its steps
    check_pair(tmp_path, [3, 4])


class Copying(Model):
    """Copies a layer in the middle of a training step, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.nn.Module] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for copied in (copy.deepcopy(self.layer), pickle.loads(pickle.dumps(self.layer))):
            copied(batch[0])
            self.made.append(copied)
        return super().training_step(batch, batch_idx)


def test_a_copy_or_a_pickle_of_a_module_is_none_of_the_training(tmp_path):
    fit(tmp_path, model := Copying(), size=2)

    assert [calls(step, "forward") for step in steps(tmp_path)] == [1, 1]
    assert not any(b"chakra" in pickle.dumps(copied) for copied in model.made)
    model.made[0](torch.ones(4))


def test_a_copy_and_a_script_of_a_module_can_be_made_in_the_middle_of_a_training_step(tmp_path):
    def step(model: Any, x: Any) -> torch.Tensor:
        torch.jit.script(model.layer)  # refuses a module with hooks that it cannot compile
        return model.layer(x)

    fit(tmp_path, training(step), size=2)

    assert [calls(step, "forward") for step in steps(tmp_path)] == [1, 1]


def test_without_phases_nothing_is_hooked_up(tmp_path):
    found: list[list[str]] = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            found.append(wrapped(trainer))

    callback = ChakraProfileCallback(settings(tmp_path, 1, 1, phases=False))
    trainer(callback, Looking()).fit(Model(), loader(3))

    assert found == [["_TrainingEpochLoop._on_before_fetch"]] * 3
    check_pair(tmp_path, [1])


def test_what_is_recorded_in_the_window_carries_the_names_of_the_phases(tmp_path):
    from recording.recorded import entries

    trainer(ChakraProfileCallback(settings(tmp_path, 1, 2))).fit(Model(), loader(4))

    check_pair(tmp_path, [1, 2])
    found = entries(tmp_path / "0_kineto/rank-0.json")
    for name in ("input_wait", "forward", "backward", "optimizer"):
        assert len([e for e in found if e.get("name") == name and e.get("cat") == "user_annotation"]) == 2
