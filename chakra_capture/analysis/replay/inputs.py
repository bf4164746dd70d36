"""Batches from workers of a DataLoader: the loop waits until one is ready, and nobody traces the worker.

Rule 5.3 of the replay. When a batch was waited for, the end of the wait is when it was ready. Of one that was there
before the loop asked for it only that is known: a faster loop may have to wait for it, or not. Whether a fetch waited
is told by comparing it with the shortest one, which is what a fetch costs when nothing has to be waited for.
"""

from dataclasses import dataclass, field

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows
from chakra_capture.analysis.replay.threads import Threads

FROM_WORKERS = "_MultiProcessingDataLoaderIter.__next__"
_WAITED_FACTOR, _WAITED_NS = 2, 500 * US


@dataclass(slots=True)
class InputWaits:
    """Fetches of batches that a worker has made.

    Attributes:
        ready: edges from the moment a batch is ready, of fetches that waited for it.
        perhaps: the same of fetches that show no wait: the batch was ready then, or long before.
        shortest_ns: the shortest fetch seen.
    """

    ready: list[int] = field(default_factory=list)
    perhaps: list[int] = field(default_factory=list)
    shortest_ns: int = 0


def add_inputs(rows: Rows, threads: Threads, graph: Graph) -> InputWaits:
    """Have every fetch wait until its batch is ready."""
    fetches = [row for row in threads.ends if rows.kind[row] == "annotation" and rows.name[row].endswith(FROM_WORKERS)]
    spans = {row: (rows.start[row] or 0, threads.ends[row]) for row in fetches}
    found = InputWaits(shortest_ns=min((end - begin for begin, end in spans.values()), default=0))
    for row, (begin, end) in spans.items():
        waited = end - begin > max(_WAITED_FACTOR * found.shortest_ns, found.shortest_ns + _WAITED_NS)
        if waited:
            threads.of(rows, row).set_cost(begin, end, found.shortest_ns)
        (found.ready if waited else found.perhaps).append(len(graph.src))
        ready = graph.point(end)
        graph.anchors[ready] = end
        graph.edge(ready, threads.end_point(rows, row), 0, "input")
    return found
