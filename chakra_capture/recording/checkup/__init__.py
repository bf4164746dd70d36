"""Whether recording can work in this process, and what keeps it from that.

In a job, once model and loaders are made: ``for found in checks("./traces"): print(found)``. ``chakra-capture doctor``
runs the same in a process of its own (``__main__``), which cannot see what a job does in its process.
"""

import os
from collections.abc import Iterator
from functools import partial

from chakra_capture.layout import DEFAULT_TRACE_DIR
from chakra_capture.recording.checkup import installed, machine, process
from chakra_capture.recording.checkup.check import Check, Level, Planned

__all__ = ["Check", "Level", "checks", "planned"]


def planned(trace_dir: str, framework: str | None) -> Iterator[Planned]:
    """List what is looked at, what needs no torch first; nothing here changes the process."""
    yield machine.ENVIRONMENT, partial(machine.environment, os.environ)
    yield machine.FOLDER, partial(machine.folder, trace_dir)
    yield installed.SUBJECT, partial(installed.installed, framework)
    yield machine.DUMPS, partial(machine.nccl_dumps, os.environ)
    yield process.TORCH, process.torch_and_device
    yield process.PROFILERS, process.profilers
    yield process.FORKS, process.forks
    yield process.COMPILED, process.compiled_modules
    yield machine.SIGNALS, machine.signals


def checks(trace_dir: str = DEFAULT_TRACE_DIR, framework: str | None = None) -> list[Check]:
    """Look at this process, and return what works and what will not.

    Args:
        trace_dir: where the job will record.
        framework: extra of the framework that the job uses, for example ``lightning``.
    """
    return [check for _, look in planned(trace_dir, framework) for check in look()]
