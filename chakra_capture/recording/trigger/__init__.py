"""Windows on demand: a request comes by file, by a signal or from a slow step, and all ranks record the same steps.

A thread does what may take time, at most once a second: it looks for requests and talks to the other ranks. The loop
learns of it only through ``next_step``, so a step without a request costs nothing.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chakra_capture.config import ChakraProfileConfig, WindowConfig
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.recording.run import Run
from chakra_capture.recording.trigger.meeting import GO, Announcement, Meeting, OwnStore
from chakra_capture.recording.trigger.request_file import Request, RequestFile
from chakra_capture.recording.trigger.signals import on_signal
from chakra_capture.recording.trigger.slow_steps import SlowSteps
from chakra_capture.recording.window import ALWAYS, NEVER

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Every rank looks once a second: after this long all have heard of an announcement.
_NOTICE_NS = 2_500_000_000
# Steps are watched for so long before it is said how many of them that is.
_PACE_NS = 200_000_000
_VERDICT_S = 0.5
_CLOSE_S = 0.5
# Of a window that no file asks for.
_NUM_STEPS = 3


@dataclass(frozen=True, slots=True)
class DemandedWindow:
    """A window that opens now, and why."""

    window: WindowConfig
    why: str


class Trigger:
    """Windows on demand of one session.

    Args:
        settings: of the session.
        run: whose windows on demand are counted over all its sessions.
        wake: called from the thread when the loop should look at ``next_step`` again.
    """

    def __init__(self, settings: ChakraProfileConfig, run: Run, wake: Callable[[], None]) -> None:
        manifest = run.manifest
        self._settings, self._run, self._wake = settings, run, wake
        self._rank, self._is_alone = manifest.rank, manifest.world_size == 1
        recording = range(manifest.world_size) if settings.ranks is None else settings.ranks
        self._records = self._rank in recording
        num_ranks = sum(rank < manifest.world_size for rank in recording)
        own = OwnStore()
        self._meeting = (
            Meeting(manifest.run_id, num_ranks, lambda: own) if self._is_alone else Meeting(manifest.run_id, num_ranks)
        )
        self._file = (
            RequestFile(run.paths, settings.max_window_steps) if self._leads and settings.trigger.file else None
        )
        slow_factor = settings.trigger.slow_factor
        self._slow_steps = SlowSteps(slow_factor) if slow_factor is not None else None
        self._give_back: Callable[[], None] | None = None
        # What the thread is to do, in order; None ends it.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="chakra-capture-trigger", daemon=True)
        # Why this rank wants a window: from its signal, or a slow step.
        self._own_wish: str | None = None
        # Rank 0: a request the loop has not announced yet, and when the loop was first seen since.
        self._wanted: Request | None = None
        self._seen: tuple[int, int] | None = None
        # What is announced and not settled; put there by the loop of rank 0, or the thread of another rank.
        self._open: Announcement | None = None
        self._is_accepted = False
        # Which announcement another rank has decided against before this one is there, and why.
        self._refused: tuple[int, str] | None = None
        self._is_full_said = False

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    def start(self) -> None:
        """Begin to look for requests."""
        name = self._settings.trigger.signal
        if name is not None:
            try:
                self._give_back = on_signal(name, lambda: self._wish(f"asked for by {name} on rank {self._rank}"))
            except ChakraCaptureError as fault:
                logger.warning("%s", fault)
                self._run.manifest.faults.append(str(fault))
        self._thread.start()

    @property
    def next_step(self) -> int:
        """The smallest step that ``attend`` has to be told."""
        found = self._open
        if found is not None:
            return found.first_step if self._is_accepted and not self._is_refused(found) else ALWAYS
        return ALWAYS if self._wanted is not None else NEVER

    def attend(self, step: int, free_from: Callable[[int, int], int]) -> DemandedWindow | None:
        """Tell that ``step`` begins; returns the window that opens with it.

        Args:
            step: global step.
            free_from: gives the first step, from the one it is told on, that begins so many steps without a window.
        """
        wanted = self._wanted
        if wanted is not None and self._open is None:
            self._announce(step, wanted, free_from)
        found = self._open
        if found is None:
            return None
        if self._refused is not None and self._is_refused(found):
            return self._end(found, self._refused[1])
        if not self._is_accepted and step <= found.first_step:
            self._is_accepted = True
            self._tasks.put(lambda: self._meeting.accept(found.number))
        if step < found.first_step:
            return None
        return self._settle(found, step)

    @property
    def watch(self) -> Callable[[int, int], None] | None:
        """What wants number and time (ns) of each step that nothing disturbed; None if nothing does."""
        return self._note_step if self._slow_steps is not None else None

    def _note_step(self, step: int, ns: int) -> None:
        assert self._slow_steps is not None
        if (found := self._slow_steps.add(step, ns)) is not None:
            self._wish(f"{found} on rank {self._rank}")

    def close(self) -> None:
        """Open no more windows; other ranks that wait for this one learn that it records nothing."""
        if self._give_back is not None:
            self._give_back()
        # What the thread is just finding belongs to it, too.
        self._tasks.put(self._say_end)
        self._tasks.put(None)
        self._thread.join(_CLOSE_S)

    def forget_in_child(self) -> None:
        """Let go of what a forked child shares with the job."""
        if self._give_back is not None:
            self._give_back()

    def _wish(self, why: str) -> None:
        # Called from a signal handler, too: no lock may be taken here.
        if self._own_wish is None:
            self._own_wish = why

    # What follows runs in the loop.

    def _announce(self, step: int, wanted: Request, free_from: Callable[[int, int], int]) -> None:
        margin = self._margin(step)
        if margin is None:
            return
        first = free_from(step + margin, wanted.steps)
        self._open = found = Announcement(self._run.num_demanded, first, first + wanted.steps - 1, wanted.why)
        self._run.num_demanded += 1
        self._seen = None
        self._is_accepted = not self._records
        logger.info("Steps %d to %d will be recorded: %s.", found.first_step, found.last_step, found.why)

        def publish() -> None:
            self._meeting.asked()  # whoever has asked meanwhile gets this window
            self._meeting.announce(found)
            self._tell(wanted, "announced", **self._facts(found))

        self._tasks.put(publish)

    def _margin(self, step: int) -> int | None:
        """Return after how many steps all ranks have heard of it; None while that is not known."""
        now = time.monotonic_ns()
        if self._seen is None or step < self._seen[0]:
            self._seen = step, now
        num_steps, ns = step - self._seen[0], now - self._seen[1]
        if not num_steps:
            return None  # it may be told a second time, in its middle
        if self._is_alone:
            return 0
        if ns < _PACE_NS:
            return None
        return 2 + math.ceil(_NOTICE_NS * num_steps / ns)

    def _settle(self, found: Announcement, step: int) -> DemandedWindow | None:
        """The announced steps begin: they are recorded on all ranks, or on none."""
        is_late = self._records and step != found.first_step
        why_not = f"rank {self._rank} was at step {step} when it heard of it" if is_late else None
        return self._end(found, why_not if self._is_alone else self._verdict(found, why_not))

    def _is_refused(self, found: Announcement) -> bool:
        return self._refused is not None and self._refused[0] == found.number

    def _end(self, found: Announcement, why_not: str | None) -> DemandedWindow | None:
        wanted = self._wanted
        self._count(found)  # first: the thread takes what is not open for new
        self._is_accepted, self._wanted, self._open, self._own_wish = False, None, None, None
        self._tasks.put(lambda: self._say(found, wanted, why_not))
        if why_not is not None:
            return None
        self._run.num_opened += 1
        window = WindowConfig(start_step=found.first_step, end_step=found.last_step)
        return DemandedWindow(window, found.why) if self._records else None

    def _count(self, found: Announcement) -> None:
        if not self._leads:
            self._run.num_demanded = found.number + 1

    def _verdict(self, found: Announcement, why_not: str | None) -> str | None:
        """Ask the other ranks by the thread, so that a store that hangs does not hold the training."""
        answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def ask() -> None:
            answers.put(self._meeting.decide(found.number, lambda: why_not) or why_not)

        self._tasks.put(ask)
        try:
            return answers.get(timeout=_VERDICT_S)
        except queue.Empty:
            # If the thread gets that far later, the others shall not record without this rank.
            why_not = f"the other ranks could not be asked within {_VERDICT_S} s"
            return why_not

    # What follows runs in the thread.

    def _run_thread(self) -> None:
        try:
            due = time.monotonic() + INTERVAL_S
            while True:
                try:
                    task = self._tasks.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    due = time.monotonic() + INTERVAL_S
                    task = self._look
                if task is None:
                    return
                try:
                    task()
                except RuntimeError as fault:
                    # The store goes with the process of rank 0, or the job ends its process group and makes another.
                    logger.debug("The store does not answer on rank %d", self._rank, exc_info=fault)
                    self._meeting.give_up_store()
        except Exception as fault:
            logger.debug("Where windows on demand ended:", exc_info=fault)
            logger.warning("Windows on demand are no longer opened on rank %d: %s", self._rank, fault)

    def _look(self) -> None:
        """Look once for a request, and for what rank 0 has announced."""
        if not self._meeting.has_store:
            return
        if (found := self._open) is not None:
            verdict = self._meeting.verdict(found.number)
            if verdict is not None and verdict != GO:
                self._refused = found.number, verdict
                self._wake()
            return
        if self._leads:
            self._look_for_request()
            return
        if self._own_wish is not None:
            self._meeting.ask(self._own_wish)
            self._own_wish = None
        if self._records:
            self._look_for_announcement()

    def _look_for_request(self) -> None:
        if self._wanted is not None:
            return
        request = self._file.take() if self._file is not None else None
        why = None
        if request is None:
            why, self._own_wish = self._own_wish or self._meeting.asked(), None
        if why:
            request = Request(min(_NUM_STEPS, self._settings.max_window_steps), why)
        if request is None:
            return
        # Of what nobody asks for by hand the tries count, or ranks that are apart would announce for ever.
        num = self._run.num_opened if request.id is not None else self._run.num_demanded
        if num >= self._settings.trigger.max:
            self._say_full(request, num)
            return
        self._wanted = request
        self._tell(request, "seen")
        self._wake()

    def _look_for_announcement(self) -> None:
        while (found := self._meeting.announced(self._run.num_demanded)) is not None:
            verdict = self._meeting.verdict(found.number)
            if verdict is None:
                self._open = found
                self._wake()
                return
            self._say(found, None, verdict)  # before this rank heard of it
            self._count(found)

    def _say_full(self, request: Request, num: int) -> None:
        said, most = "opened" if self._run.num_opened == num else "announced", self._settings.trigger.max
        why = f"this run has {said} {num} windows on demand, and chakra_profile.trigger.max is {most}"
        if request.id is not None or not self._is_full_said:
            logger.warning("No window opens (%s): %s.", request.why, why)
        self._is_full_said = True
        self._tell(request, "refused", why=why)

    def _say_end(self) -> None:
        """The training ends: say so of a window that is wanted or announced."""
        found, wanted = self._open, self._wanted
        if found is None:
            self._tell(wanted, "refused", why="training ended")
            return
        self._count(found)
        why = f"training ended on rank {self._rank} before step {found.first_step}"
        try:
            self._say(found, wanted, self._meeting.refuse(found.number, why) or why)
        except RuntimeError:  # there is no store any more
            self._say(found, wanted, why)

    def _say(self, found: Announcement, wanted: Request | None, why: str | None) -> None:
        """Say that announced steps are recorded, or why not."""
        if why is None:
            self._tell(wanted, "recording", **self._facts(found))
            return
        logger.warning(
            "Steps %d to %d are not recorded on rank %d (%s): %s.",
            found.first_step,
            found.last_step,
            self._rank,
            found.why,
            why,
        )
        self._tell(wanted, "refused", why=why)

    def _tell(self, request: Request | None, state: str, **facts: object) -> None:
        """Answer whoever has asked by file."""
        if self._file is not None and request is not None:
            self._file.answer(request, state, **facts)

    def _facts(self, found: Announcement) -> dict[str, object]:
        return {
            "first_step": found.first_step,
            "last_step": found.last_step,
            "num_ranks": self._meeting.num_ranks,
            "why": found.why,
        }
