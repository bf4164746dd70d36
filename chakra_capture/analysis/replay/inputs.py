"""Batches from workers of a DataLoader: the loop waits until one is ready, and nobody traces the worker.

Rule 5.3 of the replay. When a batch was waited for, the end of the wait is when it was ready. Of one that was there
before the loop asked for it only that is known: a faster loop may have to wait for it, or not. Whether a fetch waited
is told by comparing it with the shortest one, which is what a fetch costs when nothing has to be waited for.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Int64

FROM_WORKERS = "_MultiProcessingDataLoaderIter.__next__"
_WAITED_FACTOR, _WAITED_NS = 2, 500 * US


@dataclass(frozen=True, slots=True)
class InputWaits:
    """Fetches of batches that a worker has made.

    Attributes:
        ready: edges from the moment a batch is ready, of fetches that waited for it.
        perhaps: the same of fetches that show no wait: the batch was ready then, or long before.
    """

    ready: Int64
    perhaps: Int64

    @property
    def are_known(self) -> bool:
        """Whether there is any such fetch."""
        return len(self.ready) + len(self.perhaps) > 0


def no_inputs() -> InputWaits:
    """None at all."""
    return InputWaits(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def add_inputs(rows: Rows, threads: Threads, graph: Graph) -> InputWaits:
    """Have every fetch wait until its batch is ready."""
    is_fetch = (rows.kind == CODE["annotation"]) & rows.named(lambda name: name.endswith(FROM_WORKERS))
    fetches = threads.rows[is_fetch[threads.rows]]
    ends = threads.end_ns[fetches]
    took = ends - rows.start[fetches]
    shortest = int(took.min()) if len(took) else 0
    waited = took > max(_WAITED_FACTOR * shortest, shortest + _WAITED_NS)
    mine = fetches[waited]
    threads.set_costs(threads.begins[mine], threads.ends[mine], np.full(len(mine), shortest))
    ready = graph.points(ends)
    graph.anchors.update(zip(ready.tolist(), ends.tolist(), strict=True))
    edges = graph.edges(ready, threads.points[threads.ends[fetches]], 0, "input")
    return InputWaits(edges[waited], edges[~waited])
