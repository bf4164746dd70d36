"""How the ranks of a job agree on one run: rank 0 decides, and tells the others through the process group's store.

Through the store and not by a collective, which could hang behind a dead rank.
"""

import json
import logging
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from chakra_capture.config import IfExists
from chakra_capture.errors import ChakraCaptureError, RecordingError, SettingsError
from chakra_capture.layout import RunPaths
from chakra_capture.recording.claims import Claimant, claim, overwrite, take_folders
from chakra_capture.recording.launch import launch_id, process_start_time
from chakra_capture.recording.rank import RankInfo

logger = logging.getLogger(__name__)

_WAIT_S = 10.0
_CLOCK_SKEW_S = 1.0


@dataclass(frozen=True, slots=True)
class _Decision:
    run_id: str
    trace_dir: str
    job: str
    decided: float
    refused: str | None = None


def default_store() -> Any | None:
    """Return the store of the default process group, None if there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        return distributed.distributed_c10d._get_default_store()
    except (ValueError, KeyError):  # destroyed since it was asked, by another thread
        return None


def agree(
    store: Any, paths: RunPaths, ranks: RankInfo, environ: Mapping[str, str], *, if_exists: IfExists, number: int
) -> tuple[str, RunPaths]:
    """Agree on run id and folders, which are rank 0's; ``number`` counts the agreements of this process.

    Raises:
        SettingsError: the names are taken and ``if_exists`` is ``error``.
        RecordingError: rank 0 does not answer, or this rank's folder cannot be used.
    """
    key = f"chakra_capture/{launch_id(environ, with_address=False)}/{number}"
    if ranks.rank == 0:
        return _decide(store, key, paths, ranks, environ, if_exists)
    decision = _wait_for_decision(store, key, ranks.rank)
    if decision.refused is not None:
        raise SettingsError(decision.refused)
    if decision.trace_dir != str(paths.trace_dir):
        logger.warning(
            "chakra_profile.trace_dir is %s on rank %d but %s on rank 0; all ranks of a run write to one folder, so "
            "rank 0's is used.",
            paths.trace_dir,
            ranks.rank,
            decision.trace_dir,
        )
    agreed = RunPaths(Path(decision.trace_dir), decision.job)
    claimant = Claimant(decision.run_id, ranks)
    if not claim(agreed, claimant):
        if if_exists is not IfExists.overwrite:
            raise RecordingError(
                f"{agreed.claim} on this machine belongs to another run, while rank 0 chose that name; all ranks must "
                "use one name. Clear the folder or set chakra_profile.job_id to a new name."
            )
        overwrite(agreed, claimant)
    return decision.run_id, agreed


def _decide(
    store: Any, key: str, paths: RunPaths, ranks: RankInfo, environ: Mapping[str, str], if_exists: IfExists
) -> tuple[str, RunPaths]:
    run_id = "-".join(part for part in (launch_id(environ, with_address=False), secrets.token_hex(8)) if part)
    refusal, refused = None, None
    try:
        paths = take_folders(paths, Claimant(run_id, ranks), if_exists)
    except ChakraCaptureError as fault:
        refusal = fault
        refused = str(fault) if isinstance(fault, SettingsError) else None
    decision = _Decision(run_id, str(paths.trace_dir), paths.job, time.time(), refused)
    store.set(key, json.dumps(asdict(decision)))
    if refusal is not None:
        raise refusal
    return run_id, paths


def _wait_for_decision(store: Any, key: str, rank: int) -> _Decision:
    deadline = time.monotonic() + _WAIT_S
    born = process_start_time()
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.1, left)))
            decision = _Decision(**json.loads(store.get(key)))
        except RuntimeError as fault:
            raise _no_answer(rank) from fault
        # torchrun's store outlives a restart, and a change of membership keeps the restart count: an answer that is
        # older than this process was meant for an earlier attempt, for rank 0 decides when all processes have begun.
        if born is None or decision.decided >= born - _CLOCK_SKEW_S:
            return decision
        if left <= 0:
            raise _no_answer(rank)
        time.sleep(0.2)


def _no_answer(rank: int) -> RecordingError:
    return RecordingError(
        f"rank 0 did not name the run within {_WAIT_S:.0f} s, so rank {rank} does not record; every rank must open its "
        "session at the same point of the job. Check that rank 0 runs with the same settings."
    )
