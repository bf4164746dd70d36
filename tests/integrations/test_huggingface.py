"""What only the Hugging Face Trainer does: it tells callbacks little, and has a list of them."""

import pytest
import torch
from recording.recorded import check_pair, files, manifest, settings
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from chakra_capture.integrations.huggingface import ChakraProfileCallback, follower
from integrations.contract import Batches, Items, Plan, batches, our_warnings
from integrations.test_contract_huggingface import Model


def trainer(folder, *callbacks, size=6, model=None, **changes):
    model = model or Model(Batches(Plan()))
    chosen = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 1}
    chosen |= {"per_device_train_batch_size": 1, "remove_unused_columns": False, "logging_strategy": "no"}
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder / "out"), **{**chosen, **changes}),
        data_collator=lambda rows: {"inputs": torch.stack(rows)},
        train_dataset=Items(size),
        callbacks=list(callbacks),
    )


class Other(TrainerCallback):
    pass


class Raising(TrainerCallback):
    """Raises in one of its hooks."""

    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *_, **__):
        raise RuntimeError("training failed")


def test_rest_of_an_epoch_is_a_step_of_its_own(tmp_path):
    # 5 batches in groups of 2, twice.
    callback = ChakraProfileCallback(settings(tmp_path, 2, 3))
    trainer(tmp_path, callback, size=5, gradient_accumulation_steps=2, num_train_epochs=2).train()

    check_pair(tmp_path, [2, 3])
    assert batches(tmp_path) == [4, 5, 6]


def test_trainer_is_as_before_after_training(tmp_path):
    first, ours, last = Other(), ChakraProfileCallback(settings(tmp_path, 1, 2)), Raising("nothing")
    made = trainer(tmp_path, first, ours, last)
    made.training_step = made.training_step  # one that the user has replaced
    before, own = list(made.callback_handler.callbacks), made.training_step
    made.train()

    assert made.callback_handler.callbacks == before
    assert made.training_step is own
    wrapped = ("get_batch_samples", "_run_epoch", "_finalize_training", "evaluate", "predict")
    assert [name for name in vars(made) if name in wrapped] == []
    assert "call_event" not in vars(made.callback_handler)


def test_other_callbacks_step_ends_are_in_no_step(tmp_path):
    from recording.recorded import entries

    class Slow(TrainerCallback):
        def on_step_end(self, *_, **__):
            with torch.profiler.record_function("other callback"):
                torch.ones(2).sum()

    trainer(tmp_path, Slow(), ChakraProfileCallback(settings(tmp_path, 1, 3))).train()

    events = [e for e in entries(tmp_path / "0_kineto/rank-0.json") if "dur" in e]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep")]
    found = [e["ts"] for e in events if e["name"] == "other callback"]
    assert found
    assert not [ts for ts in found for first, last in steps if first <= ts <= last]


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_step_end", "on_epoch_end"])
def test_exception_of_another_callback_closes_the_window(tmp_path, hook):
    with pytest.raises(RuntimeError, match="training failed"):
        trainer(tmp_path, ChakraProfileCallback(settings(tmp_path, 0, 9)), Raising(hook)).train()

    assert manifest(tmp_path)["reason"] == "exception"
    assert [name for name in files(tmp_path) if name.endswith(".part")] == []


@pytest.mark.parametrize("has_epochs", [True, False])
def test_callback_added_later_and_a_trainer_without_its_epoch_method(tmp_path, monkeypatch, has_epochs):
    if not has_epochs:
        monkeypatch.setattr(follower, "_PARTS", ("_method_of_another_release",))
    model = Model(Batches(Plan(fail_at=3, error=RuntimeError("training failed"))))
    made = trainer(tmp_path, model=model)
    made.add_callback(ChakraProfileCallback(settings(tmp_path, 1, 9)))
    with pytest.raises(RuntimeError, match="training failed"):
        made.train()

    check_pair(tmp_path, [1, 2, 3])
    assert manifest(tmp_path)["windows"][0]["partial_step"] == 3


def test_training_stopped_in_the_middle_of_a_group(tmp_path):
    class Stopping(TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    callback = ChakraProfileCallback(settings(tmp_path, 1, 9))
    trainer(tmp_path, callback, Stopping(), size=12, gradient_accumulation_steps=2).train()

    said = manifest(tmp_path)
    assert (said["windows"][0]["steps"], said["windows"][0]["aborted_steps"]) == ([1], [2])
    assert said["reason"] == "training ended"


def test_training_inside_a_training_with_the_same_callback(tmp_path, caplog):
    shared = ChakraProfileCallback(settings(tmp_path, 1, 2))

    class Nested(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                trainer(tmp_path, shared, size=2).train()

    trainer(tmp_path, shared, Nested(), size=4).train()

    check_pair(tmp_path, [1, 2])
    assert ["is recording the outer one" in said for said in our_warnings(caplog)] == [True]


def test_loop_of_ones_own_that_calls_callbacks(tmp_path, caplog):
    callback, state, control = ChakraProfileCallback(settings(tmp_path, 1, 2)), TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control)
    for _ in range(4):
        callback.on_step_begin(None, state, control)
        torch.ones(2).sum()
        state.global_step += 1
        callback.on_step_end(None, state, control)
    callback.on_train_end(None, state, control)

    check_pair(tmp_path, [1, 2])
    assert ["not called by a transformers Trainer" in said for said in our_warnings(caplog)] == [True]
