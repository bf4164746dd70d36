"""Turns a working file of a recorded cycle into a published trace, or says why it cannot be one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chakra_capture.recording import files
from chakra_capture.recording.repair import Repairs, repair_device_trace, repair_host_trace


@dataclass(frozen=True, slots=True)
class Published:
    """A trace under its final name; ``problem`` says why there is none."""

    path: Path | None = None
    size: int | None = None
    repairs: Repairs = field(default_factory=Repairs)
    problem: str | None = None


def publish_host(part: Path, final: Path, *, compress: bool) -> Published:
    """Check, repair and publish a host trace."""
    return _publish(part, final, files.is_whole_host_trace, lambda: repair_host_trace(part), compress)


def publish_device(part: Path, final: Path, *, compress: bool) -> Published:
    """Check, repair and publish a device trace."""

    def finish() -> Repairs:
        repaired = repair_device_trace(part)
        files.rename_in_trace(part, final)
        return repaired

    return _publish(part, final, files.is_whole_device_trace, finish, compress)


def _publish(
    part: Path, final: Path, is_whole: Callable[[Path], bool], finish: Callable[[], Repairs], compress: bool
) -> Published:
    target = final.with_name(final.name + ".gz") if compress else final
    if not part.exists():
        if target.exists():  # An interrupt came after the rename.
            return Published(target, target.stat().st_size)
        return Published(
            problem=f"{part} is gone: the file or its folder was removed while it was being written. Keep "
            "chakra_profile.trace_dir until training has ended."
        )
    if not is_whole(part):
        return Published(
            problem=f"{part} is not whole: its end is missing, so torch could not write all of it; most likely the "
            "disk is full or a quota is used up. It keeps its .part name; free space or set chakra_profile.trace_dir "
            "to another disk."
        )
    repaired = finish()
    if compress:
        part = files.compressed(part, target)
    return Published(target, files.publish(part, target), repaired)
