"""Whose the folders of a run are: claimed by one run id for all ranks, and taken over only where that is asked for."""

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chakra_capture.config import IfExists
from chakra_capture.errors import RecordingError, SettingsError
from chakra_capture.layout import KINETO_DRAFT_SUFFIX, MERGED_RANK_NAME, TRACE_NAME, RunPaths
from chakra_capture.recording.files import create_json, discard, write_json
from chakra_capture.recording.rank import RankInfo

logger = logging.getLogger(__name__)

_RESOURCES_NAME = re.compile(r"rank-(?P<rank>\d+)(\.cycle-\d+)?(\.json)?_resources(\.part)?")


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims: a rank of a run; ``is_alone`` when it has the run id from the launcher and asks no other rank."""

    run_id: str
    ranks: RankInfo
    is_alone: bool = False


def take_folders(base: RunPaths, claimant: Claimant, if_exists: IfExists) -> RunPaths:
    """Return the first folder names that belong to nobody or to this run, and claim them.

    Raises:
        SettingsError: they are taken and ``if_exists`` is ``error``.
        RecordingError: the folder cannot be used.
    """
    number = 0
    while not claim(paths := base.suffixed(number), claimant):
        if if_exists is IfExists.error:
            raise SettingsError(
                f"{base.host_dir} already holds another run and chakra_profile.if_exists is 'error'. Set "
                "chakra_profile.job_id or trace_dir to a new name, or if_exists to 'new' (the next free name)."
            )
        if if_exists is IfExists.overwrite:
            overwrite(paths, claimant)
            break
        number += 1
    if number and claimant.ranks.rank == 0:
        logger.warning(
            "%s already holds another run; this one is written to %s and its siblings.", base.host_dir, paths.host_dir
        )
    return paths


def claim(paths: RunPaths, claimant: Claimant) -> bool:
    """Claim the names for a run; False if they are another run's.

    Raises:
        RecordingError: the folder cannot be used.
    """
    run_id, rank = claimant.run_id, claimant.ranks.rank
    try:
        owner = _owner(paths)
        if owner is None:
            # NeMo and other tools make no claim: what counts is whether they have written here.
            if any(_trace_files(paths)):
                return False
            owner = run_id if create_json(paths.claim, {"run_id": run_id}) else _owner(paths)
        if owner != run_id:
            return False
        if not claimant.is_alone:
            return not any(_trace_files(paths, rank))
        # A second start of the same command looks like this run: what this rank left of the first tells.
        return not any(_trace_files(paths, rank)) and create_json(_mark(paths, rank), {"run_id": run_id})
    except OSError as fault:
        raise RecordingError(
            f"{paths.run_dir} cannot be used: {fault.strerror or fault}; chakra_profile.trace_dir must be a folder "
            "that this process may write to. Change its permissions, free space or set trace_dir to another folder."
        ) from fault


def overwrite(paths: RunPaths, claimant: Claimant) -> None:
    """Take names over: each rank removes its own old files, rank 0 also those of ranks that no longer exist."""
    ranks = claimant.ranks
    write_json(paths.claim, {"run_id": claimant.run_id})
    discard(*_trace_files(paths, ranks.rank))
    discard(paths.memory_snapshot(ranks.rank))
    _discard_folders(paths, lambda rank: rank == ranks.rank)
    if ranks.rank == 0:
        discard(paths.summary, paths.trigger_request, paths.trigger_answer)
        own = {paths.manifest(rank).name.removesuffix(".json") for rank in range(ranks.world_size)}
        discard(*(path for path in _trace_files(paths) if path.name.split(".", 1)[0] not in own))
        _discard_folders(paths, lambda rank: rank >= ranks.world_size)
        discard(*(mark for mark in paths.run_dir.glob(".rank-*.started") if mark.name.split(".")[1] not in own))
    mark = _mark(paths, ranks.rank)
    discard(mark)
    if claimant.is_alone:
        write_json(mark, {"run_id": claimant.run_id})


def _mark(paths: RunPaths, rank: int) -> Path:
    return paths.run_dir / f".rank-{rank}.started"


def _owner(paths: RunPaths) -> str | None:
    try:
        text = paths.claim.read_text()
        for _ in range(20):
            if text:
                break
            time.sleep(0.05)  # Where there are no hard links, a claim is empty for a moment.
            text = paths.claim.read_text()
        return str(json.loads(text)["run_id"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return ""  # somebody's file, but none of ours: the names are taken


def _trace_files(paths: RunPaths, rank: int | None = None) -> Iterator[Path]:
    """List the files of a run, finished or not, of one rank or of all."""
    for folder in (paths.host_dir, paths.device_dir, paths.run_dir, paths.phases_dir):
        if folder.is_dir():
            for path in folder.iterdir():
                match = TRACE_NAME.fullmatch(path.name.removesuffix(KINETO_DRAFT_SUFFIX))
                owner = int(match["rank"]) if match else None
                if folder == paths.phases_dir and (phases := re.fullmatch(r"rank-(\d+)\.jsonl(?:\.part)?", path.name)):
                    owner = int(phases[1])
                if owner is not None and rank in (None, owner):
                    yield path


def _discard_folders(paths: RunPaths, is_stale: Callable[[int], bool]) -> None:
    """Remove merged tables and extra resources of some ranks."""
    for folder, names in ((paths.merged_dir, MERGED_RANK_NAME), (paths.host_dir, _RESOURCES_NAME)):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = names.fullmatch(path.name)
            if match and is_stale(int(match["rank"])):
                shutil.rmtree(path, ignore_errors=True)
