"""What is said before training starts about settings that will record nothing, or less than they ask for."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.recording.rank import RankInfo

logger = logging.getLogger(__name__)

_KNOWS_LOGGERS = "chakra_capture.integrations.lightning"


def warn_of_what_will_not_be(settings: ChakraProfileConfig, ranks: RankInfo) -> None:
    """Say once per job which settings have no effect."""
    if settings.log_to_logger and _KNOWS_LOGGERS not in sys.modules:
        logger.warning(
            "chakra_profile.log_to_logger has no effect here: it knows the loggers of a Lightning Trainer alone. The "
            "same numbers stand in final_summary.json."
        )
    if settings.replay_data:
        logger.warning(
            "chakra_profile.replay_data is on: values of integer tensors, training data among them, are stored beside "
            "the host trace."
        )
    if settings.ranks is not None and not any(rank < ranks.world_size for rank in settings.ranks):
        logger.warning(
            "chakra_profile.ranks is %s but the job has %d rank(s), numbered from 0: nothing will be recorded.",
            list(settings.ranks),
            ranks.world_size,
        )


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what this package says meanwhile, for somebody who shows it in another way than by logging."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    package, listener = logging.getLogger("chakra_capture"), Listener()
    propagated, package.propagate = package.propagate, False
    package.addHandler(listener)
    try:
        yield messages
    finally:
        package.removeHandler(listener)
        package.propagate = propagated
