"""A recording of one step, made to see whether one can be made."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.layout import RunPaths
from chakra_capture.recording.checkup.check import Check, blocking, fine, warning
from chakra_capture.recording.checkup.folders import there_for_now
from chakra_capture.recording.notices import heard
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.session import capture

SUBJECT = "trial recording"
_JOB = "trial"
_SIZE = 64


def trial(parent: Path | None) -> Iterator[Check]:
    """Record a step of a small training in a folder of its own, which is removed again.

    Args:
        parent: where the folder is made; None for the system's folder for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    try:
        with there_for_now(parent):
            folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=parent))
            try:
                yield from _record(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as fault:
        yield _failed([f"{parent} cannot be used: {fault.strerror or fault}."])


def _record(folder: Path) -> Iterator[Check]:
    settings = ChakraProfileConfig(
        enabled=True, start_step=0, end_step=0, phases=False, trace_dir=str(folder), job_id=_JOB
    )
    with heard() as said:
        try:
            with capture(settings, rank=RankInfo(0, 1)) as session, session.step(0):
                device = _train()
        except (ChakraCaptureError, RuntimeError) as fault:
            yield _failed([str(fault)])
            return
    paths = RunPaths(folder, _JOB)
    try:
        manifest = json.loads(paths.manifest(0).read_text())
        events = json.loads(paths.device_trace(0).read_text())["traceEvents"] if manifest["complete"] else []
    except (OSError, ValueError, KeyError) as fault:
        yield _failed([*said, str(fault)])
        return
    if not manifest["complete"]:
        yield _failed(manifest["faults"] or said)
        return
    for name in manifest["unavailable_options"]:
        yield warning(
            SUBJECT, f"This torch has no option for chakra_profile.{name}.", "It has no effect.", "Use a newer torch."
        )
    yield judged(Counter(str(event.get("cat")) for event in events), device)


def judged(categories: Counter[str], device: str | None) -> Check:
    """Say what a device trace with so many events of each category is worth, on a machine with that device."""
    num_ops = categories["cpu_op"]
    if not num_ops:
        return blocking(
            SUBJECT, "The device trace holds no op.", "There would be nothing to link the host trace with.",
            "Reinstall torch, and look at what it wrote to stderr.",
        )  # fmt: skip
    if device is not None and not categories["kernel"]:
        return blocking(
            SUBJECT,
            f"The device trace holds {num_ops} ops but no kernel, though {device} was used.",
            "CUPTI gives nothing: another tool has it (nsys, ncu, a monitoring daemon), or the driver allows profiling "
            "to administrators alone.",
            "End the other tool, or load the driver with NVreg_RestrictProfilingToAdminUsers=0.",
        )
    kernels = f", {categories['kernel']} kernels on {device}" if device is not None else ""
    return fine(SUBJECT, f"one step in both traces: {num_ops} ops{kernels}")


def _failed(reasons: list[str]) -> Check:
    return blocking(SUBJECT, "One step could not be recorded.", " ".join(dict.fromkeys(reasons)), "See to that first.")


def _train() -> str | None:
    """One forward and backward, on the device if there is one; return its name."""
    import torch

    device: str | None = f"cuda:0 ({torch.cuda.get_device_name(0)})" if torch.cuda.is_available() else None
    weight = torch.ones(_SIZE, _SIZE, requires_grad=True, device="cuda:0" if device else "cpu")
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    if device is not None:
        torch.cuda.synchronize()
    return device
