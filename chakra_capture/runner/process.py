"""The process of a script: settings, what watches, the script, and what is said and made at its end."""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from chakra_capture.config import ChakraProfileConfig, settings_from
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.recording import registry
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.session import Session
from chakra_capture.runner.ending import runs_since, say, show_run
from chakra_capture.runner.frameworks import Frameworks
from chakra_capture.runner.imports import when_imported
from chakra_capture.runner.loop_watch import LoopWatch
from chakra_capture.runner.plan import Plan
from chakra_capture.runner.script import find_module, find_script
from chakra_capture.runner.torch_calls import TorchCalls

_NOTHING = (
    "{} made no optimizer step that could be seen in this process, so nothing was recorded; expected a training with "
    "torch.optim, Lightning, Ignite, MONAI or the Hugging Face Trainer. Where the training runs in processes that the "
    "script starts, or steps in another way, bracket its steps: with chakra_capture.capture(settings) as session."
)


def main(plan: str, arguments: Sequence[str]) -> None:
    """Run what a plan says, and leave as it leaves."""
    chosen = Plan(**json.loads(plan))
    try:
        settings = settings_from(chosen.settings)
        if chosen.is_module:
            script = find_module(chosen.target, is_path_safe=chosen.is_path_safe)
        else:
            script = find_script(chosen.target)
    except ChakraCaptureError as fault:
        say(str(fault))
        sys.exit(1)
    if not settings.enabled:  # CHAKRA_CAPTURE_DISABLED
        script.run(arguments, is_path_safe=chosen.is_path_safe)
        return
    recording = _Recording(chosen, settings)
    recording.watch()
    _run(partial(script.run, arguments, is_path_safe=chosen.is_path_safe), recording)


def _run(script: Callable[[], None], recording: "_Recording") -> None:
    me, error = os.getpid(), None
    try:
        script()
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() == me:  # a child that the script has forked may come here, too
            if _is_last_thread():
                recording.finish(error)
            else:  # Python waits for the others, which may train
                atexit.register(recording.finish, error)


def _is_last_thread() -> bool:
    return all(one.daemon or one is threading.current_thread() for one in threading.enumerate())


class _Recording:
    """What is recorded of a script: the trainings of frameworks, else the loop of its own."""

    def __init__(self, plan: Plan, settings: ChakraProfileConfig) -> None:
        self._plan, self._settings = plan, settings
        self._loop = LoopWatch(self._open_session)
        self._has_framework = self._is_refused = False
        self._began = time.time()

    def watch(self) -> None:
        """Look out for the frameworks a script may load."""
        calls = TorchCalls(self._loop)
        os.register_at_fork(after_in_child=self._forked)
        when_imported(
            {
                "torch": calls.torch_imported,
                "torch.utils.data.dataloader": calls.loader_imported,
                "torch.amp.grad_scaler": calls.scaler_imported,
                **Frameworks(self._settings, self._begin_framework, self._plan.command).actions(),
            }
        )

    def _forked(self) -> None:
        """A child that the script, or a loader, has forked: its batches and updates are none of this process."""
        self._loop.is_off = True

    def _open_session(self) -> Session | None:
        # A script that uses us by itself knows better where its steps are.
        if registry.is_idle() and registry.current_init() is None:
            session = Session(self._settings)
            session.open()
            if session.is_open:
                return session
        self._is_refused = True  # and said so, or nothing is to be said
        return None

    def _begin_framework(self) -> None:
        self._has_framework = True
        self._loop.is_off = True
        if self._loop.session is not None:
            self._end_loop(None)

    def finish(self, error: BaseException | None) -> None:
        """Close what is open, show what was recorded, and merge where that is asked for; whatever happens here, the
        script has ended as it has.
        """
        try:
            self._finish(error)
        except Exception as fault:  # noqa: BLE001
            say(f"the recording could not be ended: {type(fault).__name__}: {fault}")

    def _finish(self, error: BaseException | None) -> None:
        self._end_loop(error)
        runs = registry.runs_of_process()
        for run in runs:
            if run.manifest.rank == 0:
                show_run(run.paths, run.manifest.world_size, merge=self._plan.merge)
        if runs or os.environ.get("RANK", "0") != "0":
            return
        # Ranks that it has forked, as Lightning's ddp_fork does, have recorded for themselves.
        of_children = runs_since(self._settings, self._began)
        for paths in of_children:
            show_run(paths, 0, merge=self._plan.merge)
        if not of_children and not self._is_refused and (error is None or isinstance(error, SystemExit)):
            say(_NOTHING.format(self._plan.target))

    def _end_loop(self, error: BaseException | None) -> None:
        loop = self._loop
        loop.finish()
        loop.is_off = True
        session = loop.session  # a thread may still be in the loop
        if session is None:
            return
        if loop.num_steps:
            is_exit = error is None or isinstance(error, SystemExit)
            session.close(Reason.training_ended if is_exit else Reason.exception, None if is_exit else error)
        else:
            session.discard()
