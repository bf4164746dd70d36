"""What a process knows of itself: torch and its device, other profilers, compiled modules, what forks break."""

import gc
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chakra_capture.recording import registry
from chakra_capture.recording.checkup.check import Check, blocking, fine, warning
from chakra_capture.recording.device_profiler import other_profilers, profilers_asked_for

TORCH, PROFILERS, FORKS, COMPILED = "torch", "profilers", "forks", "compiled modules"
# Their threads hold locks that a forked child finds locked for ever.
_THREADED = ("polars", "grpc", "jax", "tensorflow")
_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")


def torch_and_device() -> Iterator[Check]:
    """Import torch and ask what it can record here."""
    try:
        import torch
        from torch.profiler import supported_activities
    except (ImportError, OSError) as fault:
        yield blocking(
            TORCH,
            f"torch cannot be imported: {(str(fault).splitlines() or [type(fault).__name__])[0]}.",
            "A recording is made by torch's profiler.",
            "Install torch in the environment of the job, and run doctor in it.",
        )
        return
    activities = sorted(activity.name for activity in supported_activities())  # type: ignore[no-untyped-call]
    named = f"torch {torch.__version__} on Python {platform.python_version()} can record {' and '.join(activities)}"
    if torch.cuda.is_available():
        if activities == ["CPU"]:
            yield warning(
                TORCH,
                f"{named}, but not the device.",
                "This torch was built without CUPTI (or roctracer), so device traces hold no kernels.",
                "Install a build of torch with profiling of the device.",
            )
        else:
            # Asking for names would initialise the device, which a job may want to do after forking.
            yield fine(TORCH, f"{named}; devices: {torch.cuda.device_count()}")
        return
    nodes = [path for path in _DEVICE_FILES if Path(path).exists()]
    if nodes:
        is_built = bool(torch.version.cuda or torch.version.hip)
        yield warning(
            TORCH,
            f"{named}, and cannot use the device behind {nodes[0]}: {_why_no_device(torch)}.",
            "CPU ops can be recorded, kernels cannot.",
            "Install a build of torch for this device." if not is_built else "See to the driver, or ask for a device.",
        )
    else:
        yield fine(TORCH, f"{named}; this machine shows no device, so there are no kernels to record")


def _why_no_device(torch: Any) -> str:
    if not (torch.version.cuda or torch.version.hip):
        return "it is built for the CPU alone"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as fault:
        return (str(fault).splitlines() or [type(fault).__name__])[0]
    return "it finds no device"


def profilers() -> Iterator[Check]:
    """Look for profilers and observers of others in this process."""
    if registry.is_recording():
        yield fine(PROFILERS, "chakra-capture records in this process now")
        return
    if "torch" not in sys.modules:
        yield fine(PROFILERS, "torch is not in use in this process")
        return
    asked_for = set(profilers_asked_for(os.environ))  # told with the environment
    reasons = [reason for reason in other_profilers(os.environ) if reason not in asked_for]
    for reason in reasons:
        what, _, todo = reason.partition(". ")
        yield blocking(PROFILERS, f"{what[:1].upper()}{what[1:]}.", "", todo)
    observed = _is_observed()
    if observed:
        yield blocking(
            PROFILERS,
            "Another ExecutionTraceObserver is registered in this process.",
            "A process has room for one, so there would be no host trace.",
            "Unregister it before the window, or record without it.",
        )
    if not reasons and not observed:
        yield fine(PROFILERS, "no other profiler or observer is in use in this process")


def _is_observed() -> bool:
    module: Any = sys.modules.get("torch.profiler")
    if module is None:
        return False
    return any(True for item in _objects() if type(item) is module.ExecutionTraceObserver and item.is_registered)


def _objects() -> list[Any]:
    gc.collect()  # what a job has dropped is not in use
    return gc.get_objects()


def forks() -> Iterator[Check]:
    """Look for what makes a forked DataLoader worker hang, or this process useless as a forked one."""
    found = []
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    loaded = [name for name in _THREADED if name in sys.modules]
    if method == "fork" and loaded:
        found.append(
            warning(
                FORKS,
                f"{' and '.join(loaded)} is loaded, and workers are forked.",
                "Its threads are not copied but their locks are: a DataLoader worker may wait for one for ever.",
                "Start workers with multiprocessing_context='forkserver' or 'spawn', or import it in the workers only.",
            )
        )
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        found.append(
            blocking(
                FORKS,
                "This process was forked from one that had used the device.",
                "Neither CUDA nor its profiler works in it.",
                "Start ranks with spawn or torchrun, or use the device only after the fork.",
            )
        )
    yield from found or [fine(FORKS, f"new processes start by {method}, and nothing is loaded that breaks in them")]


def compiled_modules() -> Iterator[Check]:
    """Name modules that torch.compile has taken over."""
    torch: Any = sys.modules.get("torch")
    names = [] if torch is None else sorted({name for item in _objects() if (name := _compiled_name(torch, item))})
    if not names:
        yield fine(COMPILED, "none in this process")
        return
    yield warning(
        COMPILED,
        f"torch.compile has {', '.join(names[:4])}{' and others' if len(names) > 4 else ''}.",
        "Ops that it fuses have no row of their own, and steps that compile are far longer than others.",
        "Let the window begin after those steps; with mode='reduce-overhead' after the graphs are captured, too.",
    )


def _compiled_name(torch: Any, item: object) -> str | None:
    # By type: asking a proxy for its class may import or compute something.
    if not issubclass(type(item), torch.nn.Module):
        return None
    own: dict[str, Any] = vars(item)
    inner = own.get("_modules", {}).get("_orig_mod") if type(item).__name__ == "OptimizedModule" else None
    if inner is None and own.get("_compiled_call_impl") is None:
        return None
    return type(item if inner is None else inner).__qualname__
