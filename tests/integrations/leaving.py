"""Ranks that are forked from one process: how they start, and how they leave."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

_LIMIT_S = 120


def leave_after(job: Callable[[], object]) -> NoReturn:
    """Do a job and leave, 0 or 1, without what the parent does at its end."""
    code = 1
    try:
        job()
        code = 0
    except Exception:  # noqa: BLE001 (the end of a process)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def fork(job: Callable[[], None], rank: int = 0, size: int = 1, port: int = 0) -> int:
    """Start a rank and return its process id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(_LIMIT_S)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "NODE_RANK": 0, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    return leave_after(job)
