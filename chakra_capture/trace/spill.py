"""Columns of a trace that is larger than memory: past a budget they go to disk in batches and are mapped back."""

import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]


class Spill:
    """Counts the bytes of columns held in memory, and takes over those past the budget.

    Its files have no name, so nothing is left of them however the process ends.

    Args:
        folder: where to spill to; made when first needed.
        budget: bytes of columns that may stay in memory, over all traces that share this object.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._left = budget
        self.num_bytes = 0

    def fits(self, size: int) -> bool:
        """Whether so many more bytes may stay in memory."""
        return size <= self._left

    def keep(self, column: Column) -> Column:
        """The column as it is while the budget lasts, else on disk."""
        if isinstance(column, np.memmap):
            return column
        if self.fits(column.nbytes):
            self._left -= column.nbytes
            return column
        batches = self.batches(column.dtype)
        batches.append(column)
        return batches.column()

    def batches(self, dtype: "np.dtype[Any]") -> "Batches":
        """A column to be spilled batch by batch."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return Batches(self, tempfile.TemporaryFile(dir=self._folder), dtype)


class Batches:
    """One column on disk."""

    def __init__(self, spill: Spill, file: IO[bytes], dtype: "np.dtype[Any]") -> None:
        self._spill, self._file, self._dtype = spill, file, dtype
        self._size = 0

    def append(self, batch: Column) -> None:
        self._file.write(np.ascontiguousarray(batch).data)
        self._size += len(batch)
        self._spill.num_bytes += batch.nbytes

    def column(self) -> Column:
        """All batches as one array; changing it leaves the file as it is."""
        self._file.flush()
        if not self._size:
            return np.zeros(0, dtype=self._dtype)
        return np.memmap(self._file, dtype=self._dtype, mode="c", shape=(self._size,))
