"""Print the dependencies of device work that HTA's critical-path graph has for a device trace.

Usage: hta_dependencies.py TRACE.json.gz ...

Needs Holistic Trace Analysis (traceinsight 0.6.1 on PyPI) in an environment of its own; the project does not depend on
it. Of each edge the correlation ids are printed, and the side of the waiting row: start of an activity, end of a call.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

SIDES = {True: "start", False: "end"}


def dependencies(path: str) -> Iterator[tuple[str, int, int, str]]:
    """Kind, correlation id of the activity waited for, that of what waits, and its side."""
    from hta.analyzers.critical_path_analysis import CPEdgeType
    from hta.trace_analysis import TraceAnalysis

    kinds = {CPEdgeType.SYNC_DEPENDENCY: "sync", CPEdgeType.KERNEL_KERNEL_DELAY: "stream"}
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="")
    # An empty annotation is the whole trace: of several steps HTA otherwise takes one.
    graph, _ = analysis.critical_path_analysis(rank=0, annotation="", instance_id=None)
    correlation: Any = analysis.t.get_trace(0)["correlation"]
    for first, second, data in graph.edges(data=True):
        kind = kinds.get(data["object"].type)
        if kind is not None:
            waited_for, waits = graph.node_list[first], graph.node_list[second]
            ids = int(correlation[waited_for.ev_idx]), int(correlation[waits.ev_idx])
            yield kind, *ids, SIDES[waits.is_start]


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    logging.disable(logging.CRITICAL)
    for path in paths:
        found = sorted(dependencies(path))
        print(f"{path}: {len(found)}")
        for kind, source, target, side in found:
            print(f"  {kind:6} {source:6} -> {target:6} {side}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
