"""Records one cycle: owns one torch profiler and one observer, and turns them into one published file pair."""

import inspect
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.annotations import step_name
from chakra_capture.config import ChakraProfileConfig
from chakra_capture.errors import RecordingError
from chakra_capture.layout import part_path
from chakra_capture.recording import files, registry
from chakra_capture.recording.manifest import ClockAnchor, CycleRecord, Reason
from chakra_capture.recording.observer import HostObserver, refuse_other_profilers
from chakra_capture.recording.run import Run
from chakra_capture.recording.window import Cycle

if TYPE_CHECKING:
    from torch.autograd.profiler import record_function
    from torch.profiler import profile

logger = logging.getLogger(__name__)

_STRAGGLERS_NS = 5_000_000


class Recorder:
    """One cycle: ``prepare``, then steps, then ``stop``, then ``settle`` when the observer may be closed."""

    def __init__(self, cycle: Cycle, settings: ChakraProfileConfig, run: Run) -> None:
        self.cycle = cycle
        self._settings = settings
        self._run = run
        self._thread = threading.get_ident()
        number = run.take_cycle_number()
        rank = run.manifest.rank
        self._host_final = run.paths.host_trace(rank, number)
        self._device_final = run.paths.device_trace(rank, number)
        window = cycle.window
        self.record = CycleRecord(
            cycle=number,
            start_step=window.start_step,
            end_step=window.end_step,
            warmup_steps=window.warmup_steps,
            active_steps=window.active_steps,
            first_step=cycle.first_step,
            last_step=cycle.last_step,
        )
        self._observer: HostObserver | None = None
        self._profiler: profile | None = None
        self._annotation: record_function | None = None
        self._open_step: int | None = None
        self._is_running = False
        self._reserved: list[Path] = []
        self._problems: list[str] = []

    @property
    def open_step(self) -> int | None:
        """The step that is being recorded."""
        return self._open_step

    def prepare(self) -> None:
        """Open the files and warm the profiler up.

        Raises:
            RecordingError: profiler or observer are in use, or the folder cannot be written to.
        """
        registry.acquire_recorder(self)
        try:
            refuse_other_profilers()
            for final in (self._host_final, self._device_final):
                files.reserve(part_path(final))
                self._reserved.append(part_path(final))
            observer = HostObserver(part_path(self._host_final))
            observer.register()
            self._observer = observer
            self._profiler = _make_profiler(self._settings, observer, self._run.manifest.unavailable_options)
            self._profiler.prepare_trace()
        except BaseException:
            self._drop()
            raise

    def enter_step(self, step: int) -> None:
        """Begin a step; ends the one before if its end was not told."""
        if self._open_step == step:
            return
        if self._open_step is not None:
            self.abort_step()
        if not self._is_running:
            self._start()
        from torch.autograd.profiler import record_function

        self._annotation = record_function(step_name(step))
        self._annotation.__enter__()  # type: ignore[no-untyped-call]
        self._open_step = step

    def leave_step(self, step: int) -> None:
        """End a step; another number than the open one ends nothing."""
        if self._open_step == step:
            self._close_annotation()
            self.record.steps.append(step)

    def abort_step(self) -> None:
        """End the open step without counting it."""
        if self._open_step is not None:
            self.record.aborted_steps.append(self._open_step)
            self._close_annotation()

    def stop(self, reason: Reason) -> None:
        """Stop both recordings and write the device trace; ``settle`` completes the host trace."""
        if not self._is_running:
            if self.record.started is None:
                self.record.reason = reason
                self._drop()
            return
        self._is_running = False
        self.record.reason = reason
        if self._open_step is not None:
            self.record.partial_step = self._open_step
            self._close_annotation()
        if self._run.manifest.world_size > 1:
            # gloo's threads end their annotations a little after the training thread has gone on; the observer writes
            # an annotation at its end, so one still open now would be in the device trace only.
            time.sleep(_STRAGGLERS_NS / 1e9)
            self.record.slept_ns += _STRAGGLERS_NS
        self.record.ended = ClockAnchor.now()
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        assert self._observer is not None
        self._observer.stop()
        problem = self._why_stolen()
        if problem:
            self._problems.append(problem)
            files.discard(part_path(self._device_final))
            return
        profiler.stop_trace()
        profiler.export_chrome_trace(str(part_path(self._device_final)))

    @property
    def settles_in_ns(self) -> int:
        """How long ``settle`` would sleep now."""
        return self._observer.settles_in_ns if self._observer is not None else 0

    def settle(self) -> None:
        """Close the host trace, sleeping first if its stop is too recent, and publish what is whole.

        Raises:
            RecordingError: a file is lost.
        """
        if self._observer is None:
            return
        wait_ns = self._observer.settles_in_ns
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)
            self.record.slept_ns += wait_ns
        try:
            self._observer.unregister()
        finally:
            self._observer = None
            registry.release_recorder(self)
        self._publish()
        if self._problems:
            self.record.reason = Reason.fault
            raise RecordingError(" ".join(self._problems))

    def forget_in_child(self) -> None:
        """Let go of the parent's profiler and files in a forked child."""
        if self._observer is not None:
            self._observer.forget_in_child()
        self._observer = None
        self._annotation = None
        self._open_step = None
        self._is_running = False

    def _start(self) -> None:
        import torch

        # Somebody may have started a profiler while ours was warming up, which no flag shows.
        refuse_other_profilers()
        assert self._profiler is not None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._is_running = True
        self._profiler.start_trace()
        self.record.started = ClockAnchor.now()

    def _why_stolen(self) -> str | None:
        """Say why the profiler must not be touched: either of these ends the process (torch 2.13)."""
        import torch.autograd.profiler

        if threading.get_ident() != self._thread:
            return (
                f"{self._device_final} is lost: the session was closed from another thread than the one that opened "
                "it, where torch cannot stop its profiler. Close it where the training loop runs."
            )
        if not torch.autograd.profiler._is_profiler_enabled:
            return (
                f"{self._device_final} is lost: another torch profiler was started or stopped inside the window and "
                "ended ours. Turn the other one off, or move the window to steps where it does not run."
            )
        return None

    def _close_annotation(self) -> None:
        annotation, self._annotation, self._open_step = self._annotation, None, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _drop(self) -> None:
        """Give everything back; nothing was recorded."""
        self._profiler = None
        if self._observer is not None:
            self._observer.unregister()
            self._observer = None
        files.discard(*self._reserved)
        self._reserved.clear()
        registry.release_recorder(self)

    def _publish(self) -> None:
        host, device = part_path(self._host_final), part_path(self._device_final)
        host_is_whole = self._judge(host, files.is_whole_host_trace)
        device_is_whole = device.exists() and self._judge(device, files.is_whole_device_trace)
        record, trace_dir = self.record, self._run.paths.trace_dir
        if host_is_whole:
            record.repaired_names += files.repair_host_names(host)
            files.publish_resources(host, self._host_final)
            path, record.host_bytes = self._finish(host, self._host_final)
            record.host_trace = str(path.relative_to(trace_dir))
        if device_is_whole:
            record.repaired_names += files.repair_device_names(device)
            files.rename_in_trace(device, self._device_final)
            path, record.device_bytes = self._finish(device, self._device_final)
            record.device_trace = str(path.relative_to(trace_dir))

    def _finish(self, part: Path, final: Path) -> tuple[Path, int]:
        if self._settings.compress:
            final = final.with_name(final.name + ".gz")
            part = files.compressed(part, final)
        return final, files.publish(part, final)

    def _judge(self, part: Path, is_whole: Callable[[Path], bool]) -> bool:
        if is_whole(part):
            return True
        self._problems.append(
            f"{part} is not whole: its end is missing, so torch could not write all of it; most likely the disk is "
            "full or a quota is used up. It keeps its .part name; free space or set chakra_profile.trace_dir to "
            "another disk."
        )
        return False


def _make_profiler(settings: ChakraProfileConfig, observer: HostObserver, unavailable: list[str]) -> "profile":
    """Build the profiler with the options this torch knows; the others are named in ``unavailable``."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile, supported_activities

    wanted = {"all_threads": "profile_all_threads", "sync_events": "enable_cuda_sync_events"}
    experimental: dict[str, Any] = {}
    for setting, option in wanted.items():
        if getattr(settings, setting):
            try:
                probe: dict[str, Any] = {option: True}
                _ExperimentalConfig(**probe)
                experimental[option] = True
            except TypeError:
                _report_unavailable(setting, unavailable)
    known = inspect.signature(profile.__init__).parameters
    options: dict[str, Any] = {}
    for setting in ("record_shapes", "with_stack", "profile_memory"):
        if getattr(settings, setting):
            if setting in known:
                options[setting] = True
            else:
                _report_unavailable(setting, unavailable)
    return profile(
        activities=supported_activities(),  # type: ignore[no-untyped-call]
        execution_trace_observer=observer.torch_observer,
        experimental_config=_ExperimentalConfig(**experimental),
        **options,
    )


def _report_unavailable(setting: str, unavailable: list[str]) -> None:
    if setting not in unavailable:
        unavailable.append(setting)
        logger.warning("chakra_profile.%s has no effect: this torch version does not have the option.", setting)
