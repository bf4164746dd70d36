"""The end of what an adapter follows."""

from typing import Protocol

from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.session import Session


class Follower(Protocol):
    """Has replaced something of a framework."""

    def detach(self) -> None:
        """Put it back."""


def close_and_detach(
    session: Session | None, follower: Follower | None, reason: Reason, error: BaseException | None
) -> None:
    """Close the session, then detach: the phases are hooked up upon what the follower has replaced."""
    try:
        if session is not None:
            session.close(reason, error)
    finally:
        if follower is not None:
            follower.detach()
