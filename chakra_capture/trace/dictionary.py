"""The dictionary of a text column, shared by all parts of a file."""

from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np

from chakra_capture.trace.columns import Positions

Entry = TypeVar("Entry", bound=Hashable)


class Numbers(dict[Entry | None, int], Generic[Entry]):
    """Numbers entries in order of first sight; None, the null of a column, is -1."""

    def __init__(self) -> None:
        super().__init__({None: -1})

    def __missing__(self, entry: Entry) -> int:
        self[entry] = number = len(self) - 1
        return number

    def codes(self, entries: Collection[Entry | None]) -> Positions:
        """The number of each entry."""
        return np.fromiter(map(self.__getitem__, entries), dtype=np.int32, count=len(entries))

    def entries(self) -> Iterator[Entry]:
        """All entries but None, in order."""
        return (entry for entry in self if entry is not None)
