"""The Lightning callback in loops that do not go the usual way: bare optimizers, nested fits, lists that change."""

import logging
import os
import signal

import pytest
import pytorch_lightning as pl
import torch
from recording.recorded import check_pair, files, manifest, names, settings

from chakra_capture import capture
from chakra_capture.integrations.lightning import ChakraProfileCallback, updates
from integrations.models import Model, loader, trainer


class BareOptimizer(Model):
    """Manual optimization past Lightning: trainer.global_step stays 0."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch, batch_idx) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()


class OwnUpdate(BareOptimizer):
    """Updates its weights without any optimizer."""

    def training_step(self, batch, batch_idx) -> None:
        self.manual_backward(Model.training_step(self, batch, batch_idx))
        with torch.no_grad():
            for weight in self.parameters():
                weight -= 0.01 * weight.grad
                weight.grad = None


def warnings(caplog):
    found = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("chakra_capture")]
    return [r.getMessage() for r in found]


@pytest.mark.parametrize(("every", "expected"), [(1, ["0.2", "0.3"]), (3, [f"0.{n}" for n in range(6, 12)])])
def test_optimizers_that_step_without_lightning_end_steps(tmp_path, caplog, every, expected):
    fitted = trainer(ChakraProfileCallback(settings(tmp_path, 2, 3)))
    fitted.fit(BareOptimizer(every), loader(20))

    assert fitted.global_step == 0
    check_pair(tmp_path, [2, 3])
    assert names(tmp_path / "0_kineto/rank-0.json", "batch ") == [f"batch {n}" for n in expected]
    assert manifest(tmp_path)["complete"]
    assert ["step without Lightning" in said for said in warnings(caplog)] == [True]


def test_loop_whose_updates_nobody_sees_does_not_record_for_ever(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(updates, "_MOST_BATCHES", 5)
    trainer(ChakraProfileCallback(settings(tmp_path, 1, 2))).fit(OwnUpdate(), loader(20))

    check_pair(tmp_path, [1, 2])
    assert names(tmp_path / "0_kineto/rank-0.json", "batch ") == ["batch 0.5", "batch 0.6"]
    assert warnings(caplog) == [
        "No optimizer has stepped in 5 batches of this manual optimization, so from here on every batch is one step."
    ]


def test_fit_inside_a_fit_with_the_same_callback_leaves_the_outer_recording_alone(tmp_path, caplog):
    shared = ChakraProfileCallback(settings(tmp_path, 2, 4))

    class Nested(pl.Callback):
        def on_train_epoch_start(self, trainer_, pl_module) -> None:
            if trainer_.current_epoch == 0:
                trainer(shared).fit(Model(), loader(3))

    fitted = trainer(shared, Nested(), max_epochs=2)
    fitted.fit(Model(), loader(5))

    check_pair(tmp_path, [2, 3, 4])
    assert names(tmp_path / "0_kineto/rank-0.json", "batch ") == ["batch 0.2", "batch 0.3", "batch 0.4"]
    assert (manifest(tmp_path)["complete"], len(manifest(tmp_path)["windows"])) == (True, 1)
    assert ["is recording the outer one" in said for said in warnings(caplog)] == [True]


class Other(pl.Callback):
    pass


def test_callbacks_that_others_add_and_remove_during_the_fit_stay_so(tmp_path):
    first, removed, added = Other(), Other(), Other()

    class Changing(pl.Callback):
        def on_train_epoch_start(self, trainer_, pl_module) -> None:
            trainer_.callbacks.append(added)
            trainer_.callbacks.remove(removed)

    ours, changing = ChakraProfileCallback(settings(tmp_path, 1, 1)), Changing()
    fitted = trainer(first, ours, removed, changing)
    fitted.fit(Model(), loader(3))

    assert fitted.callbacks == [first, ours, changing, added]


def test_list_of_callbacks_that_others_replace_stays_so(tmp_path):
    class Replacing(pl.Callback):
        def on_train_epoch_start(self, trainer_, pl_module) -> None:
            trainer_.callbacks = [self, *(c for c in trainer_.callbacks if c is not self)]

    first, ours, replacing = Other(), ChakraProfileCallback(settings(tmp_path, 1, 1)), Replacing()
    fitted = trainer(first, ours, replacing)
    fitted.fit(Model(), loader(3))

    assert fitted.callbacks == [replacing, ours, first]
    assert manifest(tmp_path)["complete"]


@pytest.mark.parametrize("changes", [{"limit_train_batches": 0}, {"max_time": {"seconds": 0}}, {"max_steps": 0}])
def test_fit_that_trains_nothing_says_that_the_window_was_not_reached(tmp_path, caplog, changes):
    trainer(ChakraProfileCallback(settings(tmp_path, 1, 2)), **changes).fit(Model(), loader(3))

    assert ["was never reached" in said for said in warnings(caplog)] == [True]
    assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (False, "window never reached")
    assert files(tmp_path) == ["0_phases/rank-0.jsonl", "0_run/rank-0.json", "0_run/run.json"]


class Terminated(pl.Callback):
    """SIGTERM comes in the middle of a batch, as a scheduler's would."""

    def __init__(self, at: int, session=None) -> None:
        self.at, self.session = at, session

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self.session is not None:
            self.session.start_step(batch_idx)
        if batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.session is not None:
            self.session.end_step(batch_idx)


def check_terminated(trace_dir, fitted) -> None:
    check_pair(trace_dir, [1, 2, 3])
    said = manifest(trace_dir)
    assert (said["complete"], said["reason"], said["faults"]) == (False, "SIGTERM", [])
    assert (said["windows"][0]["steps"], said["windows"][0]["partial_step"]) == ([1, 2], 3)
    # Lightning's handler has run too: the batch at hand was finished, the fit then left.
    assert fitted.received_sigterm
    assert fitted.global_step == 4


def test_sigterm_in_a_fit_with_nobody_elses_handler_ends_the_fit_and_not_the_process(tmp_path):
    fitted = trainer(ChakraProfileCallback(settings(tmp_path, 1, 9)), Terminated(3))
    with pytest.raises(pl.utilities.exceptions.SIGTERMException):
        fitted.fit(Model(), loader())

    check_terminated(tmp_path, fitted)


def test_sigterm_in_a_fit_that_took_the_signal_over_after_us(tmp_path):
    with capture(settings(tmp_path, 1, 9)) as session:
        fitted = trainer(Terminated(3, session))
        with pytest.raises(pl.utilities.exceptions.SIGTERMException):
            fitted.fit(Model(), loader())

    check_terminated(tmp_path, fitted)
