"""Takes out of a window what was recorded while the training loop validated, where that was asked for.

The recorder marks it with an annotation; the process is never paused, which would leave rows without an end.
"""

from dataclasses import replace

import numpy as np

from chakra_capture.annotations import VALIDATION
from chakra_capture.merge.rows import CPU_KINDS, climb, end_of
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Bool, Int64, pick


def without_validation(columns: Columns) -> tuple[Columns, int]:
    """Return the rows that are no part of validation, and how many were: all that began within, on every thread of
    the process, and the device activities launched by that."""
    marked = columns.name.mask_of(np.array([name == VALIDATION for name in columns.name.values], dtype=bool))
    if not marked.any():
        return columns, 0
    excluded = marked | _began_within(columns, np.flatnonzero(marked & columns.is_kind(*CPU_KINDS)))
    # Rows without a time know only their parent, and device rows their launch.
    excluded |= climb(columns.parent, columns.parent, excluded) >= 0
    excluded |= (columns.launch >= 0) & excluded[columns.launch]
    return _take(columns, np.flatnonzero(~excluded)), int(np.count_nonzero(excluded))


def _began_within(columns: Columns, marks: Int64) -> Bool:
    starts, ends = columns.ts_ns[marks], end_of(columns.ts_ns[marks], columns.dur_ns[marks])
    is_timed = columns.is_kind(*CPU_KINDS) & (columns.ts_ns != MISSING)
    pid, found = columns.integers("pid"), np.zeros(len(columns), dtype=bool)
    for row, start, end in zip(marks.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if start != MISSING and end != MISSING:
            found |= is_timed & (pid == pid[row]) & (columns.ts_ns >= start) & (columns.ts_ns < end)
    return found


def _take(columns: Columns, rows: Int64) -> Columns:
    number = np.full(len(columns), -1, dtype=np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    return replace(
        columns.unlinked(rows),
        parent=pick(number, columns.parent[rows], -1),
        launch=pick(number, columns.launch[rows], -1),
        self_ns=columns.self_ns[rows],
        step=columns.step[rows],
        repaired=columns.repaired[rows],
        num_clipped=columns.num_clipped,
        num_overlaps=columns.num_overlaps,
    )
