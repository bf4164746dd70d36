"""Phases of a running loop: spans to the phase file, annotations to the traces, and what is hooked up to hear of them.

Nothing here is guarded: the session is.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any

from chakra_capture.annotations import safe_name
from chakra_capture.config import DISABLED_VARIABLE, is_switched_off
from chakra_capture.errors import RecordingError
from chakra_capture.recording.device_clock import device_clock
from chakra_capture.recording.live_line import LiveLine
from chakra_capture.recording.run import Run
from chakra_capture.recording.step_phases import StepPhases

logger = logging.getLogger(__name__)

_TWO_AT_ONCE = (
    "another chakra-capture session of this process, still open, times its steps into {path}; expected one at a time, "
    "or the steps of both would be mixed, so those of this one are not timed. Close it first, or set "
    "chakra_profile.trace_dir or job_id of its own"
)


class LoopPhases:
    """The phases of one session, while they are recorded and while a step is."""

    def __init__(self) -> None:
        self.steps: StepPhases | None = None
        self._run: Run | None = None
        self._hooks: list[tuple[str, Callable[[], None]]] = []
        # What is hooked up in windows alone, and what takes it out of the one that is open.
        self._in_windows: list[Callable[[], Callable[[], None]]] = []
        self._of_window: list[Callable[[], None]] = []
        # Annotations that are open in the trace, innermost last, and the thread they belong to.
        self.annotations: list[tuple[str, Any]] = []
        self._thread = 0
        # Asked for in every step, where os.environ takes microseconds to say that it has no such variable.
        raw = getattr(os.environ, "_data", None)
        self.environ: Any = os.environ if raw is None else raw
        self.switch: Any = DISABLED_VARIABLE if raw is None else os.environ.encodekey(DISABLED_VARIABLE)

    def open(
        self,
        run: Run,
        max_steps: int | None,
        *,
        is_live: bool = False,
        watch: Callable[[int, int], None] | None = None,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        """Begin to record.

        Args:
            run: what is recorded.
            max_steps: stop after so many steps.
            is_live: show a line on the terminal meanwhile.
            watch: is told what steps take.
            guard: calls what may fail where nothing else would catch it.
        """
        path, goes_on = run.paths.phases_file(run.manifest.rank), run.has_phases
        if run.is_timing:
            _say_once(run, _TWO_AT_ONCE.format(path=path))
            return
        run.has_phases = run.is_timing = True
        self._run, device = run, device_clock()
        live = LiveLine.on_terminal(run.manifest.rank) if is_live else None
        self.steps = run.disk.do(
            lambda: StepPhases(
                path,
                run.manifest,
                max_steps=max_steps,
                goes_on=goes_on,
                device=device,
                live=live,
                watch=watch,
                guard=guard,
            )
        )

    def hook(self, name: str, install: Callable[[], Callable[[], None]]) -> None:
        """Hook up what times a phase; ``install`` returns what takes it out again."""
        self._hooks.append((name, install()))
        if self.steps is not None:
            self.steps.measures(name)

    def hook_in_windows(self, install: Callable[[], Callable[[], None]]) -> None:
        """Have ``install`` called where a window begins, and what it returns where the window ends."""
        self._in_windows.append(install)

    def enter_window(self) -> None:
        """A window begins."""
        for install in self._in_windows:
            self._of_window.append(install())

    def leave_window(self) -> None:
        """The window is over, if there is one."""
        removes, self._of_window = self._of_window, []
        for remove in reversed(removes):
            _remove("handlers", remove)

    def attend(self, steps: StepPhases) -> None:
        """Do what is due between two steps."""
        if steps.is_finished or is_switched_off(os.environ):
            self.close()
        elif steps.is_due:
            steps.write()
        else:
            steps.sum_up()

    def begin_annotated(self, name: str) -> None:
        """Enter a phase, and show in the traces that it begins."""
        # Nothing comes between the two, so that the file of phases and the trace say the same.
        self.begin_annotation(name, self.steps)

    def begin_annotation(self, name: str, steps: StepPhases | None = None) -> None:
        """Show in the traces that something begins; it is a phase of ``steps`` if they are given."""
        # What record_function does, without the 50 us that it takes to call an operator of torch's for that.
        from torch.autograd import _record_function_with_args_enter  # type: ignore[attr-defined]

        me, label = get_ident(), safe_name(name)
        is_shown = not self.annotations or self._thread == me
        if steps is not None:
            steps.begin(name)
        if is_shown:
            self.annotations.append((name, _record_function_with_args_enter(label)))
            self._thread = me

    def end_annotation(self, name: str | None = None) -> None:
        """Show that a phase ends, and what is open inside it; all, without a name."""
        if not self.annotations or self._thread != get_ident():
            return
        from torch.autograd import _record_function_with_args_exit  # type: ignore[attr-defined]

        depth = 0
        if name is not None:
            found = [at for at, (open_name, _) in enumerate(self.annotations) if open_name == name]
            depth = found[-1] if found else len(self.annotations)
        while len(self.annotations) > depth:
            _record_function_with_args_exit(self.annotations.pop()[1])

    def close(self) -> None:
        """Write the rest and take out what is hooked up."""
        steps, run = self.steps, self._run
        self._take_out()
        if run is not None:
            try:
                if steps is not None:
                    run.disk.do(steps.close)
            finally:
                run.is_timing = False

    def forget(self) -> None:
        """Record no more: what was not written is lost, whatever was hooked up is taken out."""
        steps, run = self.steps, self._run
        self._take_out()
        if run is not None:
            # What is wrong with the file system is known already.
            with contextlib.suppress(RecordingError):
                if steps is not None:
                    run.disk.do(steps.abandon)
            run.is_timing = False

    def _take_out(self) -> None:
        self.steps = self._run = None
        self.leave_window()
        hooks, self._hooks, self._in_windows = self._hooks, [], []
        for name, remove in reversed(hooks):
            _remove(name, remove)


def _remove(name: str, remove: Callable[[], None]) -> None:
    try:
        remove()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        logger.warning("What timed %s is still in place: %s: %s", name, type(fault).__name__, fault)


def _say_once(run: Run, message: str) -> None:
    if message not in run.manifest.faults:
        run.manifest.faults.append(message)
        logger.warning("Phases of steps are not recorded, training goes on: %s.", message)
