"""Records one cycle: owns one torch profiler and one observer, and turns them into one published file pair."""

import inspect
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.annotations import VALIDATION, step_name
from chakra_capture.config import ChakraProfileConfig
from chakra_capture.errors import RecordingError
from chakra_capture.layout import kineto_draft_path, part_path
from chakra_capture.recording import disk, files, registry
from chakra_capture.recording.device_profiler import DeviceProfiler, refuse_other_profilers
from chakra_capture.recording.issued import IssuedOperations
from chakra_capture.recording.manifest import ClockAnchor, CycleRecord, Manifest, ProfilerOptions, Reason
from chakra_capture.recording.memory_history import MemoryHistory, is_out_of_memory
from chakra_capture.recording.observer import HostObserver
from chakra_capture.recording.publish import Published, publish_device, publish_host
from chakra_capture.recording.relay import Relay, relay_to
from chakra_capture.recording.replay import ReplayData
from chakra_capture.recording.run import Run
from chakra_capture.recording.surroundings import surroundings
from chakra_capture.recording.window import Cycle

if TYPE_CHECKING:
    from torch.autograd.profiler import record_function
    from torch.profiler import profile

logger = logging.getLogger(__name__)

_STRAGGLERS_NS = 5_000_000
_SNAPSHOT_BYTES = 100_000_000


class Recorder:
    """One cycle: ``prepare``, then steps, then ``stop``, then ``settle`` when the observer may be closed."""

    def __init__(self, cycle: Cycle, settings: ChakraProfileConfig, run: Run) -> None:
        self.cycle = cycle
        self._settings = settings
        self._run = run
        self.thread = threading.get_ident()
        number = run.take_cycle_number()
        rank = run.manifest.rank
        self._issued_final = run.paths.issued_operations(rank, number)
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
            asked_by=cycle.asked_by,
        )
        self._relay: Relay | None = None
        self._observer: HostObserver | None = None
        self._profiler: DeviceProfiler | None = None
        self._annotation: record_function | None = None
        self._validation: record_function | None = None
        self._open_step: int | None = None
        self._is_running = False
        self._has_device_trace = False
        self._is_settled = False
        self._has_failed = False
        self._reserved: list[Path] = []
        self._problems: list[str] = []
        self._replay = None
        if settings.replay_data:
            self._replay = ReplayData(self._host_final)
        self._memory = MemoryHistory() if settings.memory_snapshot else None
        self._issued = IssuedOperations() if run.manifest.world_size > 1 else None

    @property
    def open_step(self) -> int | None:
        """The step that is being recorded."""
        return self._open_step

    def is_in(self, step: int) -> bool:
        """Say whether ``step`` is being recorded and has not failed."""
        return self._open_step == step and not self._has_failed

    def prepare(self) -> None:
        """Open the files and warm the profiler up.

        Raises:
            RecordingError: profiler or observer are in use, or the folder cannot be written to.
        """
        registry.acquire_recorder(self)
        try:
            refuse_other_profilers()
            for final in (self._host_final, self._device_final):
                self._run.disk.do(partial(files.reserve, part_path(final)))
                self._reserved.append(part_path(final))
            part = part_path(self._host_final)
            self._relay = self._run.disk.do(lambda: relay_to(part))
            if self._replay is not None:
                target = part if self._relay is None else self._relay.path
                self._run.disk.do(partial(self._replay.prepare, target))
            self._observer = observer = HostObserver(part, relay=self._relay, replay=self._replay)
            observer.register()
            manifest = self._run.manifest
            self._profiler = DeviceProfiler(lambda: _make_profiler(self._settings, observer, manifest))
            self._profiler.prepare()
            if self.cycle.opens_window or manifest.surroundings is None:
                manifest.surroundings = surroundings()
            if self._memory is not None:
                self._memory.start()
        except BaseException:
            self._drop()
            raise

    def enter_step(self, step: int) -> None:
        """Begin a step; ends the one before if its end was not told, or if the same step failed and begins again."""
        if self.is_in(step):
            return
        if self._relay is not None and self._relay.is_stuck(disk.LIMIT_S):
            raise self._run.disk.give_up()
        self.end_validation()
        if self._open_step is not None:
            self.abort_step()
        if not self._is_running:
            self._start()
        from torch.autograd.profiler import record_function

        self._annotation = record_function(step_name(step))
        self._open_step = step
        self._annotation.__enter__()  # type: ignore[no-untyped-call]

    def leave_step(self, step: int) -> None:
        """End a step; another number than the open one ends nothing."""
        if self._open_step == step:
            self.record.steps.append(step)
            self._close_annotation()
            if self._relay is not None:
                self._relay.hurry()

    def fail_step(self, step: int) -> None:
        """Note that the open step raised; it stays open, for only what follows tells whether it is tried again."""
        self._has_failed = self._open_step == step

    def start_validation(self) -> None:
        """Mark what follows as validation, which merge leaves out."""
        if self._is_running and self._validation is None:
            from torch.autograd.profiler import record_function

            self._validation = record_function(VALIDATION)
            self._validation.__enter__()  # type: ignore[no-untyped-call]

    def end_validation(self) -> None:
        """End the mark, if there is one."""
        annotation, self._validation = self._validation, None
        self._leave(annotation)

    def note_error(self, error: BaseException | None) -> None:
        """Write a memory snapshot if the job ran out of memory, and that is asked for."""
        if self._memory is None or not self._is_running or self.record.memory_snapshot is not None:
            return
        if is_out_of_memory(error):
            path = self._run.paths.memory_snapshot(self._run.manifest.rank)
            try:
                memory, content = self._memory, self._memory.snapshot()
                self._run.disk.do(lambda: memory.write(content, path), num_bytes=_SNAPSHOT_BYTES)
                self.record.memory_snapshot = self._relative(path)
            except RecordingError as fault:  # The traces may still fit.
                logger.warning("The memory snapshot is lost: %s", fault)
                self._run.manifest.faults.append(f"{path} is lost: {fault}")

    def abort_step(self) -> None:
        """End the open step without counting it."""
        if self._open_step is not None:
            self.record.aborted_steps.append(self._open_step)
            self._close_annotation()

    def stop(self, reason: Reason) -> None:
        """Stop both recordings and write the device trace; ``settle`` completes the host trace.

        Interrupted anywhere, it can be called again and goes on.
        """
        if not self._is_running:
            if self.record.started is None:
                self.record.reason = reason
                self._drop()
            return
        self.record.reason = reason
        if self._open_step is not None and self._open_step not in self.record.steps:
            self.record.partial_step = self._open_step
        self._close_annotation()
        if self._run.manifest.world_size > 1 and self.record.ended is None:
            # gloo's threads end their annotations a little after the training thread has gone on; the observer writes
            # an annotation at its end, so one still open now would be in the device trace only.
            time.sleep(_STRAGGLERS_NS / 1e9)
            self.record.slept_ns += _STRAGGLERS_NS
        if self._issued is not None and self.record.ended is None:
            self._issued.end()
        self.record.ended = self.record.ended or ClockAnchor.now()
        if self._memory is not None:
            self._memory.stop()
        assert self._profiler is not None
        assert self._observer is not None
        self._check_disk()
        self._observer.stop()
        loss = self._profiler.stop()
        self._is_running = False
        if loss is None and not self._run.disk.is_lost:
            self._has_device_trace = True
            self._export(self._profiler)
        elif loss is None:
            self._profiler.drop()
        else:
            self._problems.append(f"{self._device_final} is lost: {loss}")
            self._discard(part_path(self._device_final))

    def _export(self, profiler: DeviceProfiler) -> None:
        """Write the device trace; Kineto would follow a symbolic link in place of its draft, so that is reserved."""
        part = part_path(self._device_final)
        try:
            self._run.disk.do(partial(files.reserve, kineto_draft_path(part)))
        except RecordingError as fault:
            self._problems.append(f"{self._device_final} is lost: {fault}")
            self._has_device_trace = False
            profiler.drop()
            self._discard(part)
            return
        profiler.export(part)

    def _check_disk(self) -> None:
        """Look whether Kineto may be let write."""
        if self._run.disk.is_lost:
            return
        try:
            self._run.disk.check(part_path(self._host_final))
        except RecordingError as fault:
            self._problems.append(str(fault))

    def _discard(self, *paths: Path) -> None:
        with suppress(RecordingError):  # The file system does not answer: said already.
            self._run.disk.do(lambda: files.discard(*paths))

    @property
    def settles_in_ns(self) -> int:
        """How long ``settle`` would sleep now."""
        return self._observer.settles_in_ns if self._observer is not None else 0

    def settle(self) -> None:
        """Close the host trace, sleeping first if its stop is too recent, and publish what is whole.

        Raises:
            RecordingError: a file is lost.
        """
        if self._is_settled:
            return
        if self._is_running:
            self.stop(self.record.reason)
        if self._observer is not None:
            self._end_observer(self._observer)
            self._observer = None
        registry.release_recorder(self)
        if self.record.started is not None and not self._run.disk.is_lost:
            self._publish()
        self._is_settled = True
        if self._problems:
            self.record.reason = Reason.fault
            raise RecordingError(" ".join(self._problems))

    def _end_observer(self, observer: HostObserver) -> None:
        wait_ns = observer.settles_in_ns
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)
            self.record.slept_ns += wait_ns
        observer.unregister()
        self._end_relay()
        if observer.was_taken:
            self._problems.append(
                f"{self._host_final} ends early: another ExecutionTraceObserver of this process ended ours. Turn the "
                "other one off, or move the window to steps where it does not run."
            )

    def _end_relay(self) -> None:
        """Have the rest of the host trace put on the disk."""
        relay = self._relay
        if relay is None:
            return
        if self._run.disk.is_lost:
            relay.leave()
            return
        try:
            self._run.disk.do(relay.finish, num_bytes=relay.num_waiting)
        except RecordingError as fault:
            self._add_problem(str(fault))

    def forget_in_child(self) -> None:
        """Let go of the parent's profiler and files in a forked child."""
        if self._observer is not None:
            self._observer.forget_in_child()
        if self._relay is not None:
            self._relay.forget_in_child()
        if self._profiler is not None:
            self._profiler.forget_in_child()
        self._observer = self._profiler = None
        self._annotation = self._validation = None
        self._open_step = None
        self._is_running = False

    def _start(self) -> None:
        assert self._profiler is not None
        self._is_running = True
        try:
            self._profiler.start()
        except RecordingError:
            self._is_running = False
            raise
        if self._issued is not None:
            self._issued.start()
        self.record.started = ClockAnchor.now()

    def _close_annotation(self) -> None:
        self.end_validation()  # Begun inside the step, it must not outlive it.
        annotation, self._annotation, self._open_step = self._annotation, None, None
        self._has_failed = False
        self._leave(annotation)

    def _leave(self, annotation: "record_function | None") -> None:
        if annotation is not None and threading.get_ident() != self.thread:
            # Its end, and its destructor too, would take it from the stack of the wrong thread.
            registry.keep_for_ever(annotation)
        elif annotation is not None:
            annotation.__exit__(None, None, None)

    def _drop(self) -> None:
        """Give everything back; nothing was recorded."""
        if self._memory is not None:
            self._memory.stop()
        if self._profiler is not None:
            self._profiler.drop()
        self._profiler = None
        if self._observer is not None:
            self._observer.unregister()
            self._observer = None
        self._end_relay()
        self._discard(*self._reserved)
        if self._replay is not None and not self._run.disk.is_lost:
            self._run.disk.do(self._replay.discard)
        self._reserved.clear()
        registry.release_recorder(self)

    def _publish(self) -> None:
        for publish in (self._publish_host, self._publish_device, self._publish_issued):
            try:
                publish()
            except RecordingError as fault:
                self._add_problem(str(fault))

    def _publish_host(self) -> None:
        part, final, record = part_path(self._host_final), self._host_final, self.record
        done = self._in_time(part, lambda: publish_host(part, final, compress=self._settings.compress))
        self._note(done)
        if done.path is None:
            return
        record.host_trace, record.host_bytes = self._relative(done.path), done.size
        resources = self._run.disk.do(self._replay.publish) if self._replay is not None else None
        record.resources = self._relative(resources) if resources is not None else record.resources

    def _publish_device(self) -> None:
        if not self._has_device_trace:
            return
        part, final, record = part_path(self._device_final), self._device_final, self.record
        done = self._in_time(part, lambda: publish_device(part, final, compress=self._settings.compress))
        self._note(done)
        if done.path is not None:
            record.device_trace, record.device_bytes = self._relative(done.path), done.size
        self._discard(kineto_draft_path(part))  # which it leaves where the disk is full

    def _publish_issued(self) -> None:
        content, final = self._issued.content if self._issued is not None else None, self._issued_final
        if content is not None:
            self._run.disk.do(lambda: files.write_json(final, content))
            self.record.collectives = self._relative(final)

    def _in_time(self, part: Path, action: Callable[[], Published]) -> Published:
        size = self._run.disk.do(lambda: files.size_of(part))
        return self._run.disk.do(action, num_bytes=size)

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._run.paths.trace_dir))

    def _note(self, done: Published) -> None:
        self.record.repaired_names += done.repairs.names
        self.record.repaired_parents += done.repairs.parents
        if done.problem is not None:
            self._add_problem(done.problem)

    def _add_problem(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)


def _make_profiler(settings: ChakraProfileConfig, observer: HostObserver, manifest: Manifest) -> "profile":
    """Build the profiler with the options this torch knows; ``manifest`` names them, and the others."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile, supported_activities

    unavailable = manifest.unavailable_options
    wanted = {"all_threads": "profile_all_threads", "sync_events": "enable_cuda_sync_events"}
    experimental: dict[str, Any] = {}
    if settings.profile_memory and settings.all_threads:
        # Allocators ask the thread that allocates for its profiler (c10's memoryProfilingEnabled), and with all threads
        # recorded by one profiler none has its own: not one allocation is noted (torch 2.13).
        del wanted["all_threads"]
        unavailable.append("all_threads")
        logger.warning(
            "chakra_profile.all_threads has no effect with chakra_profile.profile_memory: torch notes no allocation "
            "while it records all threads. Set profile_memory to false to record them."
        )
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
    activities = supported_activities()  # type: ignore[no-untyped-call]
    manifest.options = ProfilerOptions(sorted(activity.name for activity in activities), [*options, *experimental])
    return profile(
        activities=activities,
        execution_trace_observer=observer.torch_observer,
        experimental_config=_ExperimentalConfig(**experimental),
        **options,
    )


def _report_unavailable(setting: str, unavailable: list[str]) -> None:
    if setting not in unavailable:
        unavailable.append(setting)
        logger.warning("chakra_profile.%s has no effect: this torch version does not have the option.", setting)
