"""What the disk refuses while polars writes a file: an error of the system, as any other write would raise it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import polars as pl

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_OS_ERROR_LOST = "transport error"  # of a Parquet file, where what describes its columns is written
_MORE = 1 << 20


@contextmanager
def faults_of_disk(file: IO[bytes]) -> Iterator[None]:
    """Around polars' writing to ``file``.

    Raises:
        OSError: with the number that the system gave; polars tells it within a text, or not at all.
    """
    try:
        yield
    except (pl.exceptions.ComputeError, OSError) as error:
        if match := _OS_ERROR.search(str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
        if _OS_ERROR_LOST in str(error):  # a full disk says so again
            file.seek(0, os.SEEK_END)
            file.write(bytes(_MORE))
            file.flush()
        raise
