"""The identity of a run: one id and one set of folders for all ranks, whatever else is in ``trace_dir``."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.layout import DEFAULT_TRACE_DIR, RunPaths
from chakra_capture.recording.agreement import agree, default_store
from chakra_capture.recording.claims import Claimant, take_folders
from chakra_capture.recording.disk import Disk
from chakra_capture.recording.files import write_json
from chakra_capture.recording.launch import own_run_id, safe_file_name
from chakra_capture.recording.manifest import Manifest, Reason, settings_in_effect
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.surroundings import versions_in_use


@dataclass(slots=True)
class Run:
    """One rank's part of a run: where it writes, and what it has written so far."""

    paths: RunPaths
    manifest: Manifest
    disk: Disk
    next_cycle: int = 0
    shortfall: Reason | None = None
    num_demanded: int = 0  # windows on demand that were announced
    num_opened: int = 0  # and that have opened
    has_phases: bool = False
    is_timing: bool = False  # a session of the process writes phases now

    def take_cycle_number(self) -> int:
        """Return the number of the next file pair; a second fit in the process goes on counting."""
        number = self.next_cycle
        self.next_cycle += 1
        return number

    def state_outcome(self, outcome: Reason, *, is_final: bool = False) -> None:
        """Say in the manifest how far the recording is; what one fit did not record no later one makes up for."""
        is_short = outcome not in (Reason.complete, Reason.no_window)
        if is_short and is_final:
            self.shortfall = outcome
        self.manifest.reason = (self.shortfall if not is_short else None) or outcome
        self.manifest.complete = not is_short and self.shortfall is None

    def write_manifest(self, *, limit_s: float | None = None) -> None:
        """Replace the manifest file by the present state."""
        path, content = self.paths.manifest(self.manifest.rank), self.manifest.as_json()
        self.disk.do(lambda: write_json(path, content), limit_s=limit_s)

    def remove(self) -> None:
        """Remove the folders of a run of one rank that has turned out to hold nothing, as far as that works."""
        paths = self.paths

        def action() -> None:
            for folder in (paths.host_dir, paths.device_dir, paths.phases_dir, paths.run_dir):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                paths.trace_dir.rmdir()

        self.disk.do(action)


def trace_folder(settings: ChakraProfileConfig) -> Path:
    """Return ``trace_dir`` as an absolute path, so that a later ``chdir`` changes nothing."""
    return Path(settings.trace_dir or DEFAULT_TRACE_DIR).expanduser().absolute()


def job_name(settings: ChakraProfileConfig, environ: Mapping[str, str]) -> str:
    """Name the job: setting, else Slurm, else torchrun, else ``0``."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    name = settings.job_id or environ.get("SLURM_JOB_ID") or ("" if elastic == "none" else elastic) or "0"
    return safe_file_name(name)


def planned_paths(settings: ChakraProfileConfig) -> RunPaths:
    """Return the names the run will have unless they are taken."""
    return RunPaths(trace_folder(settings), job_name(settings, os.environ))


def open_run(settings: ChakraProfileConfig, ranks: RankInfo, environ: Mapping[str, str], *, number: int = 0) -> Run:
    """Agree with the other ranks on run id and folders, and claim the folders; ``number`` counts a process's runs.

    Raises:
        SettingsError: the names are taken and ``if_exists`` is ``error``.
        RecordingError: this rank's folder cannot be used.
    """
    paths = RunPaths(trace_folder(settings), job_name(settings, environ))
    store = default_store() if ranks.world_size > 1 else None
    if store is None:
        run_id = own_run_id(ranks, environ)
        paths = take_folders(paths, Claimant(run_id, ranks, is_alone=ranks.world_size > 1), settings.if_exists)
    else:
        run_id, paths = agree(store, paths, ranks, environ, if_exists=settings.if_exists, number=number)
    manifest = Manifest(
        run_id=run_id,
        job=paths.job,
        rank=ranks.rank,
        world_size=ranks.world_size,
        settings=settings_in_effect(settings),
        versions=versions_in_use(),
    )
    return Run(paths, manifest, Disk(paths.trace_dir))
