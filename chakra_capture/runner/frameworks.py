"""Puts the integration of a framework into each of its trainings, unless the script has done so."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.runner.imports import Action

logger = logging.getLogger(__name__)


class Frameworks:
    """Follows the trainings of frameworks.

    Args:
        settings: of the recording.
        on_training: called as a training of a framework begins: no loop of the script's own is looked for from then on.
        command: the command of a process that runs the same script so, with other arguments.
    """

    def __init__(
        self,
        settings: ChakraProfileConfig,
        on_training: Callable[[], None],
        command: Callable[[list[str]], list[str]],
    ) -> None:
        self._settings, self._on_training, self._command = settings, on_training, command
        self._num_engines_running = 0

    def actions(self) -> dict[str, Action]:
        """What to do as which module is imported."""
        return {
            "pytorch_lightning.trainer.trainer": self._lightning_imported,
            "lightning.pytorch.trainer.trainer": self._lightning_imported,
            "lightning_fabric.strategies.launchers.subprocess_script": self._launcher_imported,
            "lightning.fabric.strategies.launchers.subprocess_script": self._launcher_imported,
            "transformers.trainer": self._transformers_imported,
            "ignite.engine.engine": self._ignite_imported,
            "deepspeed.runtime.engine": self._deepspeed_imported,
        }

    def _lightning_imported(self, module: ModuleType) -> None:
        self._around(module.Trainer, "fit", self._fit)

    def _fit(self, original: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> Any:
        from chakra_capture.integrations.lightning import ChakraProfileCallback

        self._on_training()
        if any(isinstance(one, ChakraProfileCallback) for one in trainer.callbacks):
            return original(trainer, *arguments, **options)
        callback = ChakraProfileCallback(self._settings)
        trainer.callbacks.insert(0, callback)
        try:
            return original(trainer, *arguments, **options)
        finally:
            if callback in trainer.callbacks:
                trainer.callbacks.remove(callback)

    def _launcher_imported(self, module: ModuleType) -> None:
        """Lightning starts the script once more for each further rank."""
        for name in ("_basic_subprocess_cmd", "_hydra_subprocess_cmd"):
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, partial(self._command_of_rank, original))

    def _command_of_rank(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        command, folder = found if isinstance(found, tuple) else (found, None)
        first = 3 if "-m" in command[:2] else 2  # of the script's own arguments
        command = self._command(list(command[first:]))
        return command if folder is None else (command, folder)

    def _transformers_imported(self, module: ModuleType) -> None:
        self._around(module.Trainer, "train", self._train)

    def _train(self, original: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> Any:
        from chakra_capture.integrations.huggingface import ChakraProfileCallback

        self._on_training()
        if any(isinstance(one, ChakraProfileCallback) for one in trainer.callback_handler.callbacks):
            return original(trainer, *arguments, **options)
        callback = ChakraProfileCallback(self._settings)
        trainer.add_callback(callback)
        try:
            return original(trainer, *arguments, **options)
        finally:
            trainer.remove_callback(callback)

    def _ignite_imported(self, module: ModuleType) -> None:
        self._around(module.Engine, "run", self._run_engine)

    def _run_engine(self, original: Callable[..., Any], engine: Any, *arguments: Any, **options: Any) -> Any:
        # An engine inside another one validates, or is none of the loop that trains.
        handler = self._handler_of(engine) if not self._num_engines_running else None
        if handler is not None:
            self._on_training()
            handler.attach(engine)
        self._num_engines_running += 1
        try:
            return original(engine, *arguments, **options)
        finally:
            self._num_engines_running -= 1
            if handler is not None:
                handler.detach(engine)

    def _handler_of(self, engine: Any) -> Any:
        """The handler for an engine that trains; None for others, and where the script has attached one."""
        from torch.optim import Optimizer

        held = _held_by(engine._process_function)
        is_monai = _is_monai_trainer(engine)
        if not is_monai and not any(isinstance(one, Optimizer) for one in held.values()):
            return None
        from chakra_capture.integrations import ignite

        there = ignite.handlers_of(engine)
        if there:
            self._on_training()
        if is_monai:
            from chakra_capture.integrations import monai

            for handler in there:
                if isinstance(handler, monai.TraceMLHandler):  # made without settings: these are to be had now
                    handler.settings = self._settings
        if there:
            return None
        if is_monai:
            return monai.ChakraProfileHandler(self._settings)
        size = held.get("gradient_accumulation_steps", 1)
        return ignite.ChakraProfileHandler(self._settings, gradient_accumulation_steps=size)

    def _deepspeed_imported(self, module: ModuleType) -> None:
        self._around(module.DeepSpeedEngine, "__init__", self._make_deepspeed)

    def _make_deepspeed(self, original: Callable[..., Any], engine: Any, *arguments: Any, **options: Any) -> Any:
        logger.warning(
            "A DeepSpeed engine trains here, whose updates cannot be seen from outside, so steps may be missing. "
            "Bracket them in the script: with capture(settings) as session: ... with session.step(g)."
        )
        return original(engine, *arguments, **options)

    @staticmethod
    def _around(cls: type, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(cls, name)

        def replaced(self: Any, *arguments: Any, **options: Any) -> Any:
            return instead(original, self, *arguments, **options)

        # Frameworks read signatures and names of their own methods.
        replaced.__wrapped__ = original  # type: ignore[attr-defined]
        replaced.__name__, replaced.__qualname__ = original.__name__, original.__qualname__
        replaced.__doc__, replaced.__module__ = original.__doc__, original.__module__
        setattr(cls, name, replaced)


def _is_monai_trainer(engine: Any) -> bool:
    trainers = sys.modules.get("monai.engines.trainer")
    return trainers is not None and isinstance(engine, trainers.Trainer)


def _held_by(process: Any) -> dict[str, Any]:
    """What a function has at hand by name: in its closure, its defaults, its object, or among the globals it uses."""
    if isinstance(process, partial):
        given = {str(place): one for place, one in enumerate(process.args)}
        return {**_held_by(process.func), **given, **process.keywords}
    function = getattr(process, "__func__", process)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    used |= getattr(getattr(process, "__self__", None), "__dict__", {})
    used |= {str(place): one for place, one in enumerate(function.__defaults__ or ())}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            used[name] = cell.cell_contents
    return used
