"""Looking up integer keys: ids that are counted up through a table, others by sorting."""

import numpy as np

from chakra_capture.trace.columns import MISSING, Int64

# Ids that are counted up are looked up in a table, which may be so many times as large as they are many.
_DENSE = 8


def match_keys(left: Int64, right: Int64) -> Int64:
    """Row of ``right`` whose key equals each key of ``left``; the first one if several, -1 if none.

    ``MISSING`` matches nothing.
    """
    known = np.flatnonzero(right != MISSING)
    if not len(known) or not len(left):
        return np.full(len(left), -1, dtype=np.int64)
    keys = right[known]
    low, high = int(keys.min()), int(keys.max())
    if high - low <= _DENSE * (len(left) + len(keys)):
        first = np.full(high - low + 1, len(right), dtype=np.int64)
        keys -= low
        first[keys] = known
        if np.count_nonzero(first < len(right)) < len(keys):  # which of equal keys was written last is not defined
            np.minimum.at(first, keys, known)
        inside = (left >= low) & (left <= high)
        row = first[np.where(inside, left, low) - low]
        return np.where(inside & (row < len(right)), row, -1)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, left, side="left"), len(keys) - 1)
    return np.where(ordered[at] == left, known[order[at]], -1)


def num_distinct(keys: Int64) -> int:
    """How many different keys there are, ``MISSING`` aside."""
    keys = keys[keys != MISSING]
    if not len(keys):
        return 0
    low, high = int(keys.min()), int(keys.max())
    if high - low > _DENSE * len(keys):
        return len(np.unique(keys))
    seen = np.zeros(high - low + 1, dtype=bool)
    seen[keys - low] = True
    return int(np.count_nonzero(seen))
