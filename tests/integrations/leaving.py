"""The end of a forked process."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


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
