"""The Lightning callback in real training: what is a step, and every way training can end."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import pytorch_lightning as pl
import torch
import warm
from recording.recorded import check_pair, entries, files, manifest, names, settings
from torch.utils.data import DataLoader

from chakra_capture.annotations import parse_step
from chakra_capture.errors import SettingsError
from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations.models import Model, Stream, TwoOptimizers, loader, trainer


def batches(trace_dir, cycle=0):
    """The training batches in both files, which must agree."""
    name = f"rank-0.cycle-{cycle}.json" if cycle else "rank-0.json"
    host, device = (names(trace_dir / folder / name, "batch ") for folder in ("0_chakra", "0_kineto"))
    assert host == device
    return [found.removeprefix("batch ") for found in host]


def spans(trace_dir, is_wanted):
    events = entries(trace_dir / "0_kineto/rank-0.json")
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if "dur" in e and is_wanted(e["name"])]


def in_no_step(trace_dir, name):
    steps = spans(trace_dir, lambda n: parse_step(n) is not None)
    found = spans(trace_dir, lambda n: n == name)
    assert found
    return all(end <= first or start >= last for start, end in found for first, last in steps)


def inside_steps(trace_dir, name):
    steps = spans(trace_dir, lambda n: parse_step(n) is not None)
    found = spans(trace_dir, lambda n: n.startswith(name))
    return sum(any(first <= start and end <= last for first, last in steps) for start, end in found)


def test_nemos_sample_records_steps_5_to_10(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 5, 10, warmup_steps=0, active_steps=1))).fit(Model(), loader())

    check_pair(tmp_path, [5, 6, 7, 8, 9, 10])
    assert batches(tmp_path) == [f"0.{n}" for n in (5, 6, 7, 8, 9, 10)]
    assert manifest(tmp_path)["complete"]
    # The request for a batch is in its step.
    assert inside_steps(tmp_path, "enumerate(DataLoader)") == 6


def test_a_step_under_accumulation_holds_all_its_batches(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, 2, 3))
    trainer(callback, accumulate_grad_batches=4).fit(Model(), loader())

    check_pair(tmp_path, [2, 3])
    assert batches(tmp_path) == [f"0.{n}" for n in range(8, 16)]


def test_nemos_sample_under_accumulation_records_steps_5_to_10(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, 5, 10))
    trainer(callback, accumulate_grad_batches=2).fit(Model(), loader(26))

    check_pair(tmp_path, [5, 6, 7, 8, 9, 10])
    assert batches(tmp_path) == [f"0.{n}" for n in range(10, 22)]


def test_rest_of_an_epoch_is_a_step_of_its_own(tmp_path):
    # 10 batches in groups of 4: 4, 4 and 2.
    callback = ChakraProfileCallback(settings(tmp_path, 2, 3))
    trainer(callback, max_epochs=2, accumulate_grad_batches=4).fit(Model(), loader(10))

    check_pair(tmp_path, [2, 3])
    assert batches(tmp_path) == ["0.8", "0.9", "1.0", "1.1", "1.2", "1.3"]


def test_accumulation_may_change_during_training(tmp_path):
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    callback = ChakraProfileCallback(settings(tmp_path, 3, 5))
    trainer(callback, schedule, max_epochs=2).fit(Model(), loader(4))

    check_pair(tmp_path, [3, 4, 5])
    assert batches(tmp_path) == ["0.3", "1.0", "1.1", "1.2", "1.3"]


def test_two_optimizers_are_one_step(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 3, 3))).fit(TwoOptimizers(), loader())

    check_pair(tmp_path, [3])
    assert batches(tmp_path) == ["0.3"]


def test_manual_accumulation_ends_a_step_where_the_optimizers_step(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 1, 2))).fit(TwoOptimizers(every=3), loader())

    check_pair(tmp_path, [1, 2])
    assert batches(tmp_path) == [f"0.{n}" for n in range(3, 9)]


def test_validation_inside_the_window_is_recorded_and_in_no_step(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, 2, 6))
    trainer(callback, val_check_interval=4, limit_val_batches=2).fit(Model(), loader(), loader(2))

    check_pair(tmp_path, [2, 3, 4, 5, 6])
    assert in_no_step(tmp_path, "validation")


def merged_names(trace_dir):
    """Names of all rows after a merge, which runs in a process of its own: it must not meet torch."""
    script = """if True:
        import subprocess, sys, polars
        merge = [sys.executable, "-m", "chakra_capture", "merge", sys.argv[1]]
        subprocess.run(merge, check=True, stdout=subprocess.DEVNULL)
        print(polars.read_parquet(sys.argv[1] + "/0_merged/rank=0/nodes.parquet")["name"].to_list())
    """
    done = subprocess.run([sys.executable, "-c", script, str(trace_dir)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


def test_validation_that_is_excluded_is_left_out_by_merge(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, 2, 6, validation="exclude"))
    trainer(callback, val_check_interval=4, limit_val_batches=2).fit(Model(), loader(), loader(2))

    check_pair(tmp_path, [2, 3, 4, 5, 6])  # nothing is paused: both files hold it
    assert in_no_step(tmp_path, "validation")
    found = merged_names(tmp_path)
    assert [name for name in found if "validation" in name] == []
    assert sorted(name for name in found if name.startswith("batch ")) == [f"batch 0.{n}" for n in range(2, 7)]


def test_validation_that_fails_ends_the_recording_like_any_other_failure(tmp_path):
    class Broken(Model):
        def validation_step(self, batch, batch_idx):
            raise ValueError

    callback = ChakraProfileCallback(settings(tmp_path, 2, 6, validation="exclude"))
    with pytest.raises(ValueError):
        trainer(callback, val_check_interval=4, num_sanity_val_steps=0).fit(Broken(), loader(), loader(2))

    check_pair(tmp_path, [2, 3])
    assert manifest(tmp_path)["reason"] == "exception"


def test_batch_end_hooks_of_other_callbacks_are_in_no_step(tmp_path):
    class Slow(pl.Callback):
        def on_train_batch_end(self, *_):
            with torch.profiler.record_function("other callback"):
                torch.ones(2).sum()

    fitted = trainer(first := Slow(), callback := ChakraProfileCallback(settings(tmp_path, 2, 4)))
    fitted.fit(Model(), loader())

    assert in_no_step(tmp_path, "other callback")
    assert fitted.callbacks[:2] == [first, callback]  # the user's order is back


def test_window_spans_epochs(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 2, 5)), max_epochs=3).fit(Model(), loader(3))

    check_pair(tmp_path, [2, 3, 4, 5])
    assert batches(tmp_path) == ["0.2", "1.0", "1.1", "1.2"]


def test_loader_without_a_length(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 2, 5)), max_epochs=3).fit(
        Model(), DataLoader(Stream(4), batch_size=1)
    )

    check_pair(tmp_path, [2, 3, 4, 5])
    assert batches(tmp_path) == ["0.2", "0.3", "1.0", "1.1"]


def test_data_loader_workers_started_in_the_window(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 2, 5)), max_epochs=3).fit(Model(), loader(3, num_workers=1))

    check_pair(tmp_path, [2, 3, 4, 5])


def test_max_steps_inside_the_window(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 6, 20)), max_steps=8, max_epochs=-1).fit(Model(), loader())

    check_pair(tmp_path, [6, 7])
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"]) == (False, "training ended")


class Failing(pl.Callback):
    def __init__(self, error, at):
        self.error, self.at = error, at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.at:
            raise self.error


def test_exception_in_the_window_propagates_unchanged(tmp_path):
    error = RuntimeError("training failed")
    fitted = trainer(ChakraProfileCallback(settings(tmp_path, 1, 5)), Failing(error, 3))
    with pytest.raises(RuntimeError) as caught:
        fitted.fit(Model(), loader())

    assert caught.value is error
    check_pair(tmp_path, [1, 2, 3])
    said = manifest(tmp_path)
    assert (said["reason"], said["detail"]) == ("exception", "RuntimeError")
    assert (said["windows"][0]["steps"], said["windows"][0]["partial_step"]) == ([1, 2], 3)


def test_keyboard_interrupt_in_the_window(tmp_path):
    import signal

    before = signal.getsignal(signal.SIGINT)
    fitted = trainer(ChakraProfileCallback(settings(tmp_path, 1, 5)), Failing(KeyboardInterrupt(), 3))
    try:
        with pytest.raises(SystemExit):
            fitted.fit(Model(), loader())
    finally:
        signal.signal(signal.SIGINT, before)

    check_pair(tmp_path, [1, 2, 3])
    assert manifest(tmp_path)["detail"] == "KeyboardInterrupt"


def test_epoch_cut_short_by_minus_one_closes_its_step_without_counting_it(tmp_path):
    class Cut(Model):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 and self.current_epoch == 0 else None

    trainer(ChakraProfileCallback(settings(tmp_path, 1, 3)), max_epochs=2).fit(Cut(), loader(5))

    check_pair(tmp_path, [1, 2, 2, 3])  # step 2 was begun twice: the skipped batch, and the next epoch's first
    assert batches(tmp_path) == ["0.1", "1.0", "1.1"]
    record = manifest(tmp_path)["windows"][0]
    assert (record["steps"], record["aborted_steps"]) == ([1, 2, 3], [2])


def test_fetch_that_brings_no_batch_is_not_a_step(tmp_path):
    class Short(torch.utils.data.IterableDataset):
        """Says five, has three."""

        def __len__(self):
            return 5

        def __iter__(self):
            return iter([(torch.randn(4),)] * 3)

    trainer(ChakraProfileCallback(settings(tmp_path, 2, 4)), max_epochs=3).fit(Model(), DataLoader(Short()))

    assert batches(tmp_path) == ["0.2", "1.0", "1.1"]
    assert manifest(tmp_path)["windows"][0]["steps"] == [2, 3, 4]


def checkpoint(tmp_path, model, num_steps, size=20, **changes):
    path = str(tmp_path / "model.ckpt")
    fitted = trainer(max_steps=num_steps, max_epochs=-1, **changes)
    fitted.fit(model, loader(size))
    fitted.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("make", "changes"), [(Model, {}), (Model, {"accumulate_grad_batches": 2}), (lambda: TwoOptimizers(every=1), {})]
)
def test_resume_inside_the_window_records_the_rest(tmp_path, make, changes):
    updates = 16 if make is not Model else 8
    path = checkpoint(tmp_path, make(), updates, **changes)
    fitted = trainer(ChakraProfileCallback(settings(tmp_path / "t", 5, 10)), max_epochs=3, **changes)
    fitted.fit(make(), loader(), ckpt_path=path)

    check_pair(tmp_path / "t", [8, 9, 10])
    assert manifest(tmp_path / "t")["reason"] == "resumed inside the window"


def test_resume_from_a_checkpoint_that_was_saved_in_the_middle_of_a_step(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(saver, enable_checkpointing=True).fit(Model(), loader(8))
    fitted = trainer(ChakraProfileCallback(settings(tmp_path / "t", 2, 4)))
    fitted.fit(Model(), loader(8), ckpt_path=str(tmp_path / "step=3.ckpt"))

    check_pair(tmp_path / "t", [3, 4])
    assert batches(tmp_path / "t") == ["0.3", "0.4"]


def test_resume_past_the_window_is_said(tmp_path, caplog):
    path = checkpoint(tmp_path, Model(), 12)
    fitted = trainer(ChakraProfileCallback(settings(tmp_path / "t", 5, 10)), max_steps=14, max_epochs=-1)
    fitted.fit(Model(), loader(), ckpt_path=path)

    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("chakra_capture")]
    assert [w for w in warnings if "already past at global_step 12" in w]
    assert manifest(tmp_path / "t")["reason"] == "window already past"


def test_second_fit_in_the_process_is_a_new_window_of_the_same_run(tmp_path):
    callback = ChakraProfileCallback(settings(tmp_path, 2, 3))
    for _ in range(2):
        trainer(callback).fit(Model(), loader(6))

    check_pair(tmp_path, [2, 3])
    check_pair(tmp_path, [2, 3], cycle=1)
    assert manifest(tmp_path)["complete"]


def test_window_never_reached_is_said_once(tmp_path, caplog):
    trainer(ChakraProfileCallback(settings(tmp_path, 50, 51))).fit(Model(), loader(4))

    said = [r.getMessage() for r in caplog.records if r.name.startswith("chakra_capture")]
    assert len(said) == 1
    assert "The profiling window 50..51 was never reached" in said[0]


def test_lightnings_own_profiler_is_refused_and_training_goes_on(tmp_path, caplog):
    callback = ChakraProfileCallback(settings(tmp_path, 2, 3))
    profiler = pl.profilers.PyTorchProfiler(dirpath=tmp_path / "pl", filename="p", export_to_chrome=False)
    fitted = trainer(callback, profiler=profiler)
    fitted.fit(Model(), loader(8))

    assert fitted.global_step == 8
    assert "another torch profiler is running" in caplog.text
    assert manifest(tmp_path)["reason"] == "fault"


def test_disabled_callback_does_nothing(tmp_path):
    fitted = trainer(callback := ChakraProfileCallback({"chakra_profile": {"enabled": False}}))
    fitted.fit(Model(), loader(3))

    assert fitted.callbacks[0] is callback
    assert files(tmp_path) == []


def test_validate_alone_records_nothing(tmp_path):
    trainer(ChakraProfileCallback(settings(tmp_path, 0, 1))).validate(Model(), loader(3), verbose=False)

    assert files(tmp_path) == []


def test_wrong_settings_raise_before_training():
    with pytest.raises(SettingsError, match="trace_dir is null"):
        ChakraProfileCallback({"enabled": True})


def test_callback_can_be_copied_and_pickled_before_and_during_training(tmp_path):
    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copy.deepcopy(trainer.callbacks[0])
            pickle.loads(pickle.dumps(trainer.callbacks[0]))

    callback = pickle.loads(pickle.dumps(copy.deepcopy(ChakraProfileCallback(settings(tmp_path, 2, 3)))))
    trainer(callback, Copying()).fit(Model(), loader(6))

    check_pair(tmp_path, [2, 3])


def test_weights_are_the_same_with_and_without_a_recording(tmp_path):
    weights = []
    for callbacks in ([], [ChakraProfileCallback(settings(tmp_path, 2, 5))]):
        pl.seed_everything(1, verbose=False)
        model = Model()
        trainer(*callbacks).fit(model, loader(8))
        weights.append((model.layer.weight.detach().clone(), torch.random.get_rng_state()))

    assert torch.equal(weights[0][0], weights[1][0])
    assert torch.equal(weights[0][1], weights[1][1])


def test_lightning_that_hides_its_fetch_hook_is_said_once_and_steps_begin_at_the_batch(tmp_path, monkeypatch, caplog):
    from chakra_capture.integrations.lightning import steps

    monkeypatch.setattr(steps, "_FETCH_HOOK", "_hook_of_another_version")
    trainer(ChakraProfileCallback(settings(tmp_path, 2, 4))).fit(Model(), loader(8))

    check_pair(tmp_path, [2, 3, 4])
    assert inside_steps(tmp_path, "enumerate(DataLoader)") == 0
    assert len([r for r in caplog.records if "waiting for input is in no step" in r.getMessage()]) == 1


def run_python(script, modules=warm.TRAINING, **environ):
    """Run a script in a process that has imported ``modules``, which it would import anyhow."""
    return warm.run([sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, **environ}, modules=modules)


def test_import_without_lightning_names_the_extra():
    done = run_python("""
        import sys
        class Absent:
            def find_spec(self, name, *_):
                if name.split(".")[0] in ("lightning", "pytorch_lightning"):
                    raise ModuleNotFoundError(name)
        import importlib.util
        importlib.util.find_spec = lambda name: None
        from chakra_capture.errors import MissingDependencyError
        try:
            import chakra_capture.integrations.lightning
        except MissingDependencyError as error:
            print(error)
    """)

    assert 'pip install "chakra-capture[lightning]"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("imported", "expected"),
    [
        ("pytorch_lightning", ["pytorch_lightning"]),
        ("lightning.pytorch", ["lightning.pytorch"]),
        ("json", ["pytorch_lightning", "lightning.pytorch"]),
    ],
)
def test_callback_belongs_to_the_package_the_job_has_imported(tmp_path, imported, expected):
    # The packages are copies of each other; stand-ins show which one is chosen, and import at once.
    for package in ("pytorch_lightning", "lightning/pytorch"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("class Callback:\n    pass\n")
    (tmp_path / "lightning/__init__.py").write_text("")
    done = run_python(
        f"""
        import {imported}
        from chakra_capture.integrations.lightning import ChakraProfileCallback
        import importlib, sys
        names = ["pytorch_lightning", "lightning.pytorch"]
        print([n for n in names if n in sys.modules and issubclass(ChakraProfileCallback, sys.modules[n].Callback)])
        """,
        PYTHONPATH=str(tmp_path),
    )

    assert done.stdout.strip() == str(expected), done.stderr


def test_training_half_reaches_no_table_library(tmp_path):
    # Lightning itself may: it imports Transformers where that is installed, which imports what it finds.
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(__file__).rsplit("/integrations/", 1)[0]!r})
        from pathlib import Path
        from integrations.models import Model, loader, trainer
        trainer().fit(Model(), loader(4))
        before = set(sys.modules)
        from recording.recorded import settings
        from chakra_capture.integrations.lightning import ChakraProfileCallback
        trainer(ChakraProfileCallback(settings(Path({str(tmp_path)!r}), 1, 2))).fit(Model(), loader(4))
        offline = ("chakra_capture.trace", "chakra_capture.merge", "chakra_capture.analysis", "chakra_capture.cli",
                   "polars", "msgspec", "rich", "cyclopts", "jinja2")
        print(sorted(name for name in sys.modules if name.startswith(offline) and name not in before))
        """,
        modules=warm.LIGHTNING,
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    check_pair(tmp_path, [1, 2])
