"""A mixin for LightningModules that keep their settings in ``self.cfg``, as NeMo's ModelPT does."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from chakra_capture.config import SECTION, ChakraProfileConfig, settings_from
from chakra_capture.integrations.lightning.callback import ChakraProfileCallback
from chakra_capture.layout import RunPaths
from chakra_capture.recording.run import planned_paths


class ChakraProfilingMixin:
    """Records the window of ``self.cfg.chakra_profile``, with NeMo's names and hooks.

    ``class Model(ChakraProfilingMixin, LightningModule)``. The work is done by a callback that joins what
    ``configure_callbacks`` returns; the hooks below exist for subclasses that call them, and may be overridden with or
    without ``super()``. Without a section, or with ``enabled: false``, nothing happens.

    A base that records by itself, as NeMo's ModelPT does on CUDA, is told not to: its hooks ask for
    ``_chakra_profile_enabled``, so there it is False. Name the mixin before such a base, whose own checks ask for more.
    """

    cfg: Any
    _chakra_settings: ChakraProfileConfig | None = None
    _chakra_profile_enabled: bool = False
    _chakra_trace_dir: Path | None = None
    _kineto_trace_dir: Path | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Whatever configure_callbacks this class ends up with, its own, an inherited one or Lightning's.
        configure = getattr(cls, "configure_callbacks", None)
        if configure is not None and not hasattr(configure, "_adds_chakra_callback"):
            cls.configure_callbacks = _adding_callback(configure)  # type: ignore[attr-defined]

    def _setup_chakra_profiling(self) -> None:
        """Read and check the settings, and name the trace folders; called again before training at the latest.

        Raises:
            SettingsError: a setting is wrong.
        """
        settings = settings_from(_settings_source(getattr(self, "cfg", None)))
        self._chakra_settings = settings
        self._chakra_profile_enabled = settings.enabled and not _has_hooks_of_nemo(type(self))
        if settings.enabled:
            self._set_chakra_paths(planned_paths(settings))

    def _set_chakra_paths(self, paths: RunPaths) -> None:
        self._chakra_trace_dir = paths.host_dir
        self._kineto_trace_dir = paths.device_dir

    def on_train_batch_start(self, batch: Any, batch_idx: int, unused: int = 0) -> int | None:
        """Keep NeMo's hook; the callback has begun the step already."""
        inherited = getattr(super(), "on_train_batch_start", None)
        return inherited(batch, batch_idx) if inherited is not None else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, unused: int = 0) -> None:
        """Keep NeMo's hook; the callback has ended the step already."""
        inherited = getattr(super(), "on_train_batch_end", None)
        if inherited is not None:
            inherited(outputs, batch, batch_idx)


def _has_hooks_of_nemo(cls: type) -> bool:
    """Say whether a base that does not know the mixin sets up a recording of its own."""
    return any("_setup_chakra_profiling" in vars(c) for c in cls.__mro__ if not issubclass(c, ChakraProfilingMixin))


def _settings_source(cfg: Any) -> object:
    """Give the whole configuration where possible: the other profiler's section (nsys_profile) stands beside ours."""
    if isinstance(cfg, Mapping):
        return cfg if SECTION in cfg.keys() else None  # noqa: SIM118 (a mandatory value is in keys() only)
    return getattr(cfg, SECTION, None)


def _adding_callback(configure: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    @wraps(configure)
    def configure_callbacks(self: Any) -> list[Any]:
        given = configure(self) or []
        callbacks = list(given) if isinstance(given, list | tuple) else [given]
        # By its class, for a base that stands before the mixin has a method of that name.
        ChakraProfilingMixin._setup_chakra_profiling(self)
        if self._chakra_settings.enabled and not any(isinstance(c, ChakraProfileCallback) for c in callbacks):
            callbacks.append(ChakraProfileCallback(self._chakra_settings))
        return callbacks

    configure_callbacks._adds_chakra_callback = True  # type: ignore[attr-defined]
    return configure_callbacks
