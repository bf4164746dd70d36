"""CUDA's history of allocations while a window records, for the snapshot that is written when memory runs out."""

import logging
import os
import pickle
from pathlib import Path

from chakra_capture.layout import part_path
from chakra_capture.recording.files import FILE_MODE, discard, make_folder

logger = logging.getLogger(__name__)

# Some kB each with their stacks; a window of a few steps is far shorter.
_MOST_ENTRIES = 100_000


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an exception, or what caused it, is CUDA out of memory."""
    import torch

    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


class MemoryHistory:
    """Switches the history on, unless somebody else has, and writes snapshots."""

    def __init__(self) -> None:
        self._is_ours = False

    def start(self) -> None:
        """Begin to keep the history; does nothing where the job uses no CUDA device."""
        import torch

        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            logger.warning(
                "chakra_profile.memory_snapshot has no effect: no CUDA device is in use in this process. Set it to "
                "false, or record after the model is on its device."
            )
        elif not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)
            self._is_ours = True

    def stop(self) -> None:
        """Stop keeping it, if it was ours."""
        import torch

        if self._is_ours:
            self._is_ours = False
            torch.cuda.memory._record_memory_history(enabled=None)

    @staticmethod
    def snapshot() -> object:
        """Return what the memory holds, and its history."""
        import torch

        return torch.cuda.memory._snapshot()

    @staticmethod
    def write(content: object, final: Path) -> None:
        """Write a snapshot in the format of pytorch.org/memory_viz."""
        make_folder(final.parent)
        part = part_path(final)
        discard(part)
        try:
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE), "wb") as file:
                pickle.dump(content, file)
            part.replace(final)
        except BaseException:
            discard(part)
            raise
