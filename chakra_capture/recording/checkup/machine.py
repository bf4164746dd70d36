"""What can be told without torch: variables, the folder, signals, dumps that others left."""

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from chakra_capture._config_sources import injected_by
from chakra_capture.config import DISABLED_VARIABLE, ChakraProfileConfig, is_switched_off
from chakra_capture.errors import RecordingError, SettingsError
from chakra_capture.layout import PART_SUFFIX
from chakra_capture.recording.checkup.check import Check, blocking, fine, warning
from chakra_capture.recording.checkup.folders import there_for_now
from chakra_capture.recording.device_profiler import profilers_asked_for
from chakra_capture.recording.disk import LIMIT_S, Disk
from chakra_capture.recording.files import FILE_MODE
from chakra_capture.recording.replay import VARIABLE as _VALUES
from chakra_capture.recording.run import trace_folder
from chakra_capture.recording.trigger.signals import is_caught_in_c

ENVIRONMENT, FOLDER, SIGNALS, DUMPS = "environment", "trace_dir", "signals", "NCCL dumps"
_IGNORED, _IN_C = "it is ignored", "code in C handles it"
_KINETO_SETTINGS = "KINETO_CONFIG"
_PROBE_BYTES = 1 << 20
_LITTLE_BYTES = 1_000_000_000
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_MOST_DUMPS = 4


def environment(environ: Mapping[str, str]) -> Iterator[Check]:
    """Look for variables that keep torch, or us, from recording."""
    found = list(_blocking_variables(environ))
    for name in (f"{_VALUES}RANGE", f"{_VALUES}DATA"):
        if environ.get(name):
            found.append(
                warning(
                    ENVIRONMENT,
                    f"{name} is set.",
                    "Every host trace then holds values of integer tensors, training data among them.",
                    "Unset it; chakra_profile.replay_data=true asks for the same where it is wanted.",
                )
            )
    if environ.get(_KINETO_SETTINGS):
        found.append(
            warning(
                ENVIRONMENT,
                f"{_KINETO_SETTINGS} is set.",
                "Kineto takes settings from that file which change what is recorded, or record beside us.",
                "Unset the variable unless the file is meant for this job.",
            )
        )
    yield from found or [fine(ENVIRONMENT, "no variable stands in the way")]


def _blocking_variables(environ: Mapping[str, str]) -> Iterator[Check]:
    if is_switched_off(environ):
        yield blocking(
            ENVIRONMENT,
            f"{DISABLED_VARIABLE} is set.",
            "It turns every recording off, whatever the settings say.",
            "Unset the variable.",
        )
    for reason in profilers_asked_for(environ):
        what, _, todo = reason.partition(". ")
        yield blocking(ENVIRONMENT, f"{what}.", "", todo)
    variable = injected_by()
    if variable is not None:
        yield blocking(
            ENVIRONMENT,
            f"{variable} shows that Nsight runs around this process.",
            "A process has one CUPTI client, so one of the two records nothing.",
            "Start the program without nsys or ncu.",
        )


def folder(trace_dir: str) -> Iterator[Check]:
    """Write to the folder as a recording would, and take it all away again."""
    try:
        path = trace_folder(ChakraProfileConfig(trace_dir=trace_dir))
    except SettingsError as fault:
        yield blocking(FOLDER, str(fault), "", "Give another folder.")
        return
    disk = Disk(path)
    try:
        free = disk.do(lambda: _probe(path))
    except RecordingError as fault:
        if disk.is_lost:
            what, why = f"{path} does not answer.", f"Its file system takes longer than {LIMIT_S:g} s for a small file."
        else:
            what, why = (
                f"{str(fault).partition('; ')[0]}.",
                "A recording needs a folder it can write to, with space left.",
            )
        yield blocking(FOLDER, what, why, "Free space, change its permissions, or give another folder.")
        return
    yield space(path, free)


def space(path: Path, free: int) -> Check:
    """Judge the bytes that are free in a folder."""
    if free >= _LITTLE_BYTES:
        return fine(FOLDER, f"{path} can be written, {free / 1e9:,.0f} GB free")
    return warning(
        FOLDER,
        f"{path} has {free / 1e6:,.0f} MB free.",
        "A window of a large model takes that and more on every rank; a full disk loses the recording.",
        "Free space, record fewer steps or ranks, or set chakra_profile.compress=true.",
    )


def _probe(folder: Path) -> int:
    """Write, flush, rename and remove a file; return the bytes that are free."""
    part = folder / f".doctor-{secrets.token_hex(4)}{PART_SUFFIX}"
    final = part.with_suffix("")
    with there_for_now(folder):
        try:
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE), "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            part.replace(final)
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize
        finally:
            for path in (part, final):
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def signals() -> Iterator[Check]:
    """Look who handles the signals that a recording may use."""
    found = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        owner = _owner_of(number)
        if owner is not None:
            found.append(
                warning(
                    SIGNALS,
                    f"{number.name} is taken: {owner}.",
                    "As chakra_profile.trigger.signal it would open no window, or end what it is for now.",
                    f"Leave trigger.signal null, or set it to another one than {number.name}.",
                )
            )
    owner = _owner_of(signal.SIGTERM)
    if owner in (_IGNORED, _IN_C):
        found.append(
            warning(
                SIGNALS,
                f"SIGTERM: {owner}.",
                "A recording is then not finished when a scheduler ends the job.",
                "Handle it in Python, or leave it to its default.",
            )
        )
    yield from found or [fine(SIGNALS, "SIGUSR1, SIGUSR2 and SIGTERM are free")]


def _owner_of(number: signal.Signals) -> str | None:
    handler = signal.getsignal(number)
    if handler == signal.SIG_DFL:
        # Python does not learn of a handler that a library sets after it has started.
        return _IN_C if is_caught_in_c(number) else None
    if handler == signal.SIG_IGN:
        return _IGNORED
    if handler is None:
        return _IN_C
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    module = getattr(handler, "__module__", None)
    # Ours finishes the recording and then calls who was there before.
    return None if str(module).startswith("chakra_capture.") else f"{module}.{name} handles it"


def nccl_dumps(environ: Mapping[str, str]) -> Iterator[Check]:
    """Name what NCCL's flight recorder has left; the files are pickles of a foreign process and stay closed."""
    found = [path for prefix in _dump_prefixes(environ) for path in _numbered(prefix)]
    if not found:
        yield fine(DUMPS, "the flight recorder has left none")
        return
    named = ", ".join(str(path) for path in found[:_MOST_DUMPS])
    more = f" and {len(found) - _MOST_DUMPS} more" if len(found) > _MOST_DUMPS else ""
    yield warning(
        DUMPS,
        f"The flight recorder has left {named}{more}.",
        "Collectives of an earlier job on this machine hung or failed. The files are pickles, which may run any code "
        "when they are loaded, so they were not opened.",
        "Read them with torchfrtrace if you know where they come from, then remove them.",
    )


def _dump_prefixes(environ: Mapping[str, str]) -> list[Path]:
    for name in _DUMP_VARIABLES:
        if environ.get(name):
            return [Path(environ[name])]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '/tmp'}/.cache"
    # The last is what older torch writes.
    return [Path(cache, "torch", "comm_lib_trace_rank_"), Path("/tmp/nccl_trace_rank_")]


def _numbered(prefix: Path) -> list[Path]:
    try:
        names = os.listdir(prefix.parent)
    except OSError:
        return []
    ranks = [name.removeprefix(prefix.name) for name in names if name.startswith(prefix.name)]
    return [prefix.with_name(f"{prefix.name}{rank}") for rank in sorted(filter(str.isdecimal, ranks), key=int)]
