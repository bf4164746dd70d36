"""The NeMo-style mixin: settings in self.cfg, NeMo's names, whatever a subclass overrides."""

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from recording.recorded import check_pair, files, manifest

from chakra_capture.errors import SettingsError
from chakra_capture.integrations.lightning import ChakraProfileCallback, ChakraProfilingMixin
from integrations.models import Model, loader, trainer


class NemoStyle(ChakraProfilingMixin, Model):
    """Reads its settings where NeMo's ModelPT does."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self._setup_chakra_profiling()


def section(trace_dir, **changes):
    chosen = {"enabled": True, "start_step": 2, "end_step": 4, "warmup_steps": 0, "active_steps": 1}
    return {**chosen, "trace_dir": str(trace_dir), **changes}


def cfg(trace_dir, **changes):
    return OmegaConf.create(
        {"chakra_profile": section(trace_dir, **changes), "nsys_profile": {"enabled": False}, "hidden": 4}
    )


def test_window_is_recorded_and_nemos_attributes_are_set(tmp_path):
    model = NemoStyle(cfg(tmp_path))
    assert model._chakra_profile_enabled
    assert (model._chakra_trace_dir, model._kineto_trace_dir) == (tmp_path / "0_chakra", tmp_path / "0_kineto")
    trainer().fit(model, loader(8))

    check_pair(tmp_path, [2, 3, 4])


@pytest.mark.parametrize("make", [dict, OmegaConf.create], ids=["mapping", "DictConfig"])
def test_settings_may_stand_in_a_mapping_or_a_dictconfig(tmp_path, make):
    trainer().fit(NemoStyle(make({"chakra_profile": section(tmp_path)})), loader(8))

    check_pair(tmp_path, [2, 3, 4])


@pytest.mark.parametrize(
    "settings",
    [
        OmegaConf.create({}),
        OmegaConf.create({"chakra_profile": None}),
        OmegaConf.create({"chakra_profile": {"enabled": False, "trace_dir": "None"}}),
        {},
        None,
    ],
)
def test_without_a_section_or_disabled_nothing_happens(tmp_path, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = NemoStyle(settings)
    assert not model._chakra_profile_enabled
    assert model._chakra_trace_dir is None
    fitted = trainer()
    fitted.fit(model, loader(4))

    assert not any(isinstance(callback, ChakraProfileCallback) for callback in fitted.callbacks)
    assert files(tmp_path) == []


def test_absent_nsys_section_is_fine_in_a_struct_config(tmp_path):
    settings = OmegaConf.create({"chakra_profile": section(tmp_path)})
    OmegaConf.set_struct(settings, True)
    trainer().fit(NemoStyle(settings), loader(8))

    check_pair(tmp_path, [2, 3, 4])


def test_both_profilers_enabled_is_an_error_before_training(tmp_path):
    settings = OmegaConf.create({"chakra_profile": section(tmp_path), "nsys_profile": {"enabled": True}})
    with pytest.raises(SettingsError, match="nsys_profile"):
        NemoStyle(settings)


def test_hooks_overridden_without_super_change_nothing(tmp_path):
    class Stubborn(NemoStyle):
        def on_train_batch_start(self, batch, batch_idx, unused=0):
            pass

        def on_train_batch_end(self, outputs, batch, batch_idx, unused=0):
            pass

        def on_train_start(self):
            pass

        def on_train_end(self):
            pass

        def teardown(self, stage):
            pass

        def configure_callbacks(self):
            return [pl.callbacks.LambdaCallback()]

    fitted = trainer()
    fitted.fit(Stubborn(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3, 4])
    assert any(isinstance(callback, pl.callbacks.LambdaCallback) for callback in fitted.callbacks)


def test_hooks_called_with_super_as_nemo_models_do(tmp_path):
    class Polite(NemoStyle):
        def on_train_batch_start(self, batch, batch_idx, unused=0):
            return super().on_train_batch_start(batch, batch_idx, unused)

        def on_train_batch_end(self, outputs, batch, batch_idx, unused=0):
            super().on_train_batch_end(outputs, batch, batch_idx, unused)

        def configure_callbacks(self):
            return [*super().configure_callbacks(), pl.callbacks.LambdaCallback()]

    fitted = trainer()
    fitted.fit(Polite(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3, 4])
    assert sum(isinstance(callback, ChakraProfileCallback) for callback in fitted.callbacks) == 1


def test_mixin_may_come_last_and_setup_may_be_left_out(tmp_path):
    class Last(Model, ChakraProfilingMixin):
        def __init__(self, cfg):
            super().__init__()
            self.cfg = cfg

    trainer().fit(Last(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3, 4])


def test_configure_callbacks_of_another_base_is_kept(tmp_path):
    class Base:
        def configure_callbacks(self):
            return pl.callbacks.LambdaCallback()

    class Both(Base, NemoStyle):
        pass

    fitted = trainer()
    fitted.fit(Both(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3, 4])
    assert any(isinstance(callback, pl.callbacks.LambdaCallback) for callback in fitted.callbacks)


def test_exception_in_a_hook_of_the_module_keeps_the_window(tmp_path):
    class Failing(NemoStyle):
        def on_train_batch_end(self, outputs, batch, batch_idx, unused=0):
            if batch_idx == 3:
                raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        trainer().fit(Failing(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3])
    assert manifest(tmp_path)["reason"] == "exception"


def test_callback_of_the_trainer_and_of_the_module_record_once(tmp_path):
    fitted = trainer(ChakraProfileCallback(section(tmp_path)))
    fitted.fit(NemoStyle(cfg(tmp_path)), loader(8))

    check_pair(tmp_path, [2, 3, 4])
    assert [name for name in files(tmp_path) if "cycle" in name] == []


def test_module_can_be_copied_averaged_and_pickled_before_the_fit_and_in_the_window(tmp_path):
    copies = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                copies.extend([copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))])
                copies.append(torch.optim.swa_utils.AveragedModel(pl_module).module)

    model = pickle.loads(pickle.dumps(copy.deepcopy(NemoStyle(cfg(tmp_path)))))
    trainer(Copying(), pl.callbacks.WeightAveraging()).fit(model, loader(8))
    check_pair(tmp_path, [2, 3, 4])

    for cycle, copied in enumerate(copies, 1):
        trainer().fit(copied, loader(8))
        check_pair(tmp_path, [2, 3, 4], cycle=cycle)
    assert manifest(tmp_path)["complete"]


def test_names_of_a_taken_folder_are_told_to_the_module(tmp_path):
    (tmp_path / "0_chakra").mkdir(parents=True)
    (tmp_path / "0_chakra/rank-0.json").write_text("{}")
    model = NemoStyle(cfg(tmp_path))
    trainer().fit(model, loader(8))

    assert model._chakra_trace_dir == tmp_path / "0.1_chakra"
    check_pair(tmp_path, [2, 3, 4], job="0.1")


class RecordsItself(Model):
    """The parts of NeMo's ModelPT (3.0.0) that record, which it does on CUDA only."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.num_started = 0
        self._setup_chakra_profiling()
        self._chakra_profile_in_progress = False

    def _setup_chakra_profiling(self):
        if self.cfg.chakra_profile.get("enabled", False):
            self._chakra_profile_enabled = True
            self._chakra_profile_start_step = self.cfg.chakra_profile.get("start_step", 0)
            self._chakra_profile_end_step = self.cfg.chakra_profile.get("end_step", 0)

    def on_train_batch_start(self, batch, batch_idx, unused=0):
        if self._chakra_profile_enabled and not self._chakra_profile_in_progress:  # noqa: SIM102 (as there)
            if self._chakra_profile_start_step <= self.trainer.global_step <= self._chakra_profile_end_step:
                self.num_started += 1


class MixinFirst(ChakraProfilingMixin, RecordsItself):
    pass


class MixinLast(RecordsItself, ChakraProfilingMixin):
    pass


@pytest.mark.parametrize("make", [MixinFirst, MixinLast])
def test_base_that_records_by_itself_does_not_and_ours_takes_its_place(tmp_path, make):
    alone = RecordsItself(cfg(tmp_path))
    trainer().fit(alone, loader(8))
    assert alone.num_started == 3

    model = make(cfg(tmp_path))
    trainer().fit(model, loader(8))
    assert model.num_started == 0
    check_pair(tmp_path, [2, 3, 4])
