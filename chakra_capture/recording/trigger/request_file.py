"""The file by which somebody asks a running job for a window, and the one by which the job answers.

The request is JSON: ``steps`` (how many) and ``id`` (made up by whoever asks, so that he knows his answer). The answer
repeats ``id`` and says ``state`` (``seen``, ``announced``, ``recording`` or ``refused``), and as far as they are known
``first_step``, ``last_step``, ``num_ranks`` and ``why``.
"""

import contextlib
import json
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from typing import Any

from chakra_capture.errors import RecordingError
from chakra_capture.layout import RunPaths
from chakra_capture.recording.files import write_json

logger = logging.getLogger(__name__)

_MOST_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{1,32}")
# Made and not filled yet: the two are not one on every file system.
_BEING_WRITTEN_S = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """A window that somebody wants: how many steps, why, and the id of a request by file."""

    steps: int
    why: str
    id: str | None = None


class RequestFile:
    """Takes requests out of the run's folder; those of another user are left where they are.

    Args:
        paths: of the run.
        most_steps: a longer window is refused.
    """

    def __init__(self, paths: RunPaths, most_steps: int) -> None:
        self._request, self._answer, self._most_steps = paths.trigger_request, paths.trigger_answer, most_steps
        self._ignored: tuple[int, int] | None = None

    def take(self) -> Request | None:
        """Return the request that is there, if it is one, and remove it."""
        try:
            text = self._take()
        except FileNotFoundError:
            return None
        except OSError as fault:
            self._ignore(None, fault.strerror or str(fault))
            return None
        return self._read(text) if text is not None else None

    def _take(self) -> bytes | None:
        # Never through a link, and never waiting for the other end of a pipe.
        file = os.open(self._request, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            status = os.fstat(file)
            if (why := _why_not(status)) is not None:
                self._ignore(status, why)
                return None
            text = os.read(file, _MOST_BYTES)
        finally:
            os.close(file)
        if not text and time.time() - status.st_mtime < _BEING_WRITTEN_S:
            return None
        os.unlink(self._request)
        return text

    def answer(self, request: Request, state: str, **facts: object) -> None:
        """Say what becomes of a request by file."""
        if request.id is not None:
            # Where the disk is full, whoever asks hears nothing.
            with contextlib.suppress(OSError, RecordingError):
                write_json(self._answer, {"id": request.id, "state": state, **facts})

    def _read(self, text: bytes) -> Request | None:
        try:
            content: Any = json.loads(text)
            steps, name = content["steps"], content["id"]
            is_one = type(steps) is int and isinstance(name, str) and _ID.fullmatch(name) is not None
        except (ValueError, KeyError, TypeError, RecursionError):
            is_one = False
        if not is_one:
            logger.warning(
                "%s is not written by `chakra-capture trigger`; it is removed, no window opens.", self._request
            )
            return None
        request = Request(steps, "asked for by file", name)
        if 1 <= steps <= self._most_steps:
            return request
        why = f"a window of {steps} steps is asked for, and chakra_profile.max_window_steps is {self._most_steps}"
        logger.warning("No window opens: %s.", why)
        self.answer(request, "refused", why=why)
        return None

    def _ignore(self, status: os.stat_result | None, why: str) -> None:
        """Say it once of each file."""
        which = (status.st_ino, status.st_mtime_ns) if status is not None else (0, 0)
        if which != self._ignored:
            self._ignored = which
            logger.warning("%s is ignored: %s.", self._request, why)


def _why_not(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        return "it is no request"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this job to user {os.geteuid()}"
    return None
