"""The identity of a run: one id and one set of folders for all ranks, whatever else is in ``trace_dir``."""

import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from chakra_capture.config import ChakraProfileConfig, IfExists
from chakra_capture.errors import ChakraCaptureError, RecordingError, SettingsError
from chakra_capture.layout import TRACE_NAME, RunPaths
from chakra_capture.recording.files import create_json, discard, write_json
from chakra_capture.recording.manifest import Manifest, Reason, settings_in_effect, versions_in_use
from chakra_capture.recording.rank import RankInfo

logger = logging.getLogger(__name__)

_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._=+-]+")
_STORE_WAIT = timedelta(seconds=60)
_DEFAULT_FOLDER = "chakra_traces"


@dataclass(slots=True)
class Run:
    """One rank's part of a run: where it writes, and what it has written so far."""

    paths: RunPaths
    manifest: Manifest
    next_cycle: int = 0
    shortfall: Reason | None = None

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

    def write_manifest(self) -> None:
        """Replace the manifest file by the present state."""
        write_json(self.paths.manifest(self.manifest.rank), self.manifest.as_json())


def trace_folder(settings: ChakraProfileConfig) -> Path:
    """Return ``trace_dir`` as an absolute path, so that a later ``chdir`` changes nothing."""
    return Path(settings.trace_dir or _DEFAULT_FOLDER).expanduser().absolute()


def job_name(settings: ChakraProfileConfig, environ: Mapping[str, str]) -> str:
    """Name the job: setting, else Slurm, else torchrun, else ``0``."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    name = settings.job_id or environ.get("SLURM_JOB_ID") or ("" if elastic == "none" else elastic) or "0"
    return _UNSAFE_IN_NAME.sub("_", name)


def planned_paths(settings: ChakraProfileConfig) -> RunPaths:
    """Return the names the run will have unless they are taken."""
    return RunPaths(trace_folder(settings), job_name(settings, os.environ))


def launch_id(environ: Mapping[str, str], *, with_address: bool) -> str:
    """Return what the launcher calls this start of the job, restarts told apart."""
    names = [
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ]
    if with_address:
        names += ["MASTER_ADDR", "MASTER_PORT"]
    return "-".join(_UNSAFE_IN_NAME.sub("_", environ[name]) for name in names if environ.get(name))


def open_run(settings: ChakraProfileConfig, ranks: RankInfo, environ: Mapping[str, str]) -> Run:
    """Agree with the other ranks on run id and folders, and claim the folders.

    Raises:
        SettingsError: the names are taken and ``if_exists`` is ``error``.
        RecordingError: this rank's folder cannot be used.
    """
    paths = RunPaths(trace_folder(settings), job_name(settings, environ))
    store = _default_store() if ranks.world_size > 1 else None
    if store is None:
        run_id = _own_run_id(ranks, environ)
        paths = _take_folders(paths, run_id, ranks, settings.if_exists)
    else:
        run_id, paths = _agree(store, paths, ranks, environ, settings.if_exists)
    manifest = Manifest(
        run_id=run_id,
        job=paths.job,
        rank=ranks.rank,
        world_size=ranks.world_size,
        settings=settings_in_effect(settings),
        versions=versions_in_use(),
    )
    return Run(paths, manifest)


def _own_run_id(ranks: RankInfo, environ: Mapping[str, str]) -> str:
    launch = launch_id(environ, with_address=ranks.world_size > 1)
    if ranks.world_size > 1:
        return launch or "unnamed"
    return "-".join(part for part in (launch, secrets.token_hex(8)) if part)


def _default_store() -> Any | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def _agree(
    store: Any, paths: RunPaths, ranks: RankInfo, environ: Mapping[str, str], if_exists: IfExists
) -> tuple[str, RunPaths]:
    """Let rank 0 decide, and tell the others through the store; a collective could hang behind a dead rank."""
    key = f"chakra_capture/run/{paths.trace_dir}/{paths.job}"
    if ranks.rank == 0:
        run_id = "-".join(part for part in (launch_id(environ, with_address=False), secrets.token_hex(8)) if part)
        decision, refusal = {"run_id": run_id, "job": paths.job}, None
        try:
            decision["job"] = _take_folders(paths, run_id, ranks, if_exists).job
        except ChakraCaptureError as fault:
            refusal = fault
            if isinstance(fault, SettingsError):
                decision["refused"] = str(fault)
        store.set(key, json.dumps(decision))
        if refusal is not None:
            raise refusal
        return run_id, RunPaths(paths.trace_dir, decision["job"])
    try:
        store.wait([key], _STORE_WAIT)
        decision = json.loads(store.get(key))
    except RuntimeError as fault:
        raise RecordingError(
            f"rank 0 did not name the run within {_STORE_WAIT.seconds} s, so rank {ranks.rank} does not record; every "
            "rank must open its session at the same point of the job. Check that rank 0 runs with the same settings."
        ) from fault
    if "refused" in decision:
        raise SettingsError(decision["refused"])
    agreed = RunPaths(paths.trace_dir, decision["job"])
    if not _claim(agreed, decision["run_id"], ranks.rank):
        if if_exists is not IfExists.overwrite:
            raise RecordingError(
                f"{agreed.claim} on this machine belongs to another run, while rank 0 chose that name; all ranks must "
                "use one name. Clear the folder or set chakra_profile.job_id to a new name."
            )
        _overwrite(agreed, decision["run_id"], ranks)
    return decision["run_id"], agreed


def _take_folders(base: RunPaths, run_id: str, ranks: RankInfo, if_exists: IfExists) -> RunPaths:
    """Return the first folder names that belong to nobody or to this run, and claim them."""
    number = 0
    while not _claim(paths := base.suffixed(number), run_id, ranks.rank):
        if if_exists is IfExists.error:
            raise SettingsError(
                f"{base.host_dir} already holds another run and chakra_profile.if_exists is 'error'. Set "
                "chakra_profile.job_id or trace_dir to a new name, or if_exists to 'new' (the next free name)."
            )
        if if_exists is IfExists.overwrite:
            _overwrite(paths, run_id, ranks)
            break
        number += 1
    if number and ranks.rank == 0:
        logger.warning(
            "%s already holds another run; this one is written to %s and its siblings.", base.host_dir, paths.host_dir
        )
    return paths


def _claim(paths: RunPaths, run_id: str, rank: int) -> bool:
    """Claim the names for ``run_id``; False if they are another run's."""
    try:
        owner = _owner(paths)
        if owner is None:
            # NeMo and other tools make no claim: what counts is whether they have written here.
            if any(_trace_files(paths)):
                return False
            if create_json(paths.claim, {"run_id": run_id}):
                return True
            owner = _owner(paths)
        # With a launcher's id alone, a second start of the same command looks like this run: its files tell.
        return owner == run_id and not any(_trace_files(paths, rank))
    except OSError as fault:
        raise RecordingError(
            f"{paths.run_dir} cannot be used: {fault.strerror or fault}; chakra_profile.trace_dir must be a folder "
            "that this process may write to. Change its permissions, free space or set trace_dir to another folder."
        ) from fault


def _owner(paths: RunPaths) -> str | None:
    try:
        return str(json.loads(paths.claim.read_text())["run_id"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return ""  # somebody's file, but none of ours: the names are taken


def _trace_files(paths: RunPaths, rank: int | None = None) -> Iterator[Path]:
    """List the files of a run, finished or not, of one rank or of all."""
    for folder in (paths.host_dir, paths.device_dir, paths.run_dir, paths.phases_dir):
        if folder.is_dir():
            for path in folder.iterdir():
                match = TRACE_NAME.fullmatch(path.name)
                owner = int(match["rank"]) if match else None
                if folder == paths.phases_dir and (phases := re.fullmatch(r"rank-(\d+)\.jsonl", path.name)):
                    owner = int(phases[1])
                if owner is not None and rank in (None, owner):
                    yield path


def _overwrite(paths: RunPaths, run_id: str, ranks: RankInfo) -> None:
    """Take names over: each rank removes its own old files, rank 0 also those of ranks that no longer exist."""
    write_json(paths.claim, {"run_id": run_id})
    stale = list(_trace_files(paths, ranks.rank))
    if ranks.rank == 0:
        own = {paths.manifest(rank).name.removesuffix(".json") for rank in range(ranks.world_size)}
        stale += [path for path in _trace_files(paths) if path.name.split(".", 1)[0] not in own]
    discard(*stale)
