"""What the edges of a merged trace imply."""

import polars as pl

from chakra_capture.trace.merged import MergedTrace


class Reach:
    """Points (row, side) that edges and the rows themselves lead to from the end of a device activity."""

    def __init__(self, merged: MergedTrace) -> None:
        self.next: dict[tuple[int, str], list[tuple[int, str]]] = {}
        rows = merged.edges.with_columns(pl.col("src_at", "dst_at").cast(pl.String))
        for src, src_at, dst, dst_at in rows.select("src", "src_at", "dst", "dst_at").rows():
            self.next.setdefault((src, src_at), []).append((dst, dst_at))
        work = merged.nodes.filter(pl.col("kind").cast(pl.String).is_in(["kernel", "memcpy", "memset"]))
        calls = merged.nodes.filter(pl.col("kind") == "runtime")
        self.work = dict(work.select("correlation_id", "node_id").rows())
        self.calls = dict(calls.select("correlation_id", "node_id").rows())
        for node in merged.nodes["node_id"]:
            self.next.setdefault((node, "start"), []).append((node, "end"))

    def holds(self, source: int, target: int, side: str) -> bool:
        goal = (self.work[target] if side == "start" else self.calls[target], side)
        seen, todo = set(), [(self.work[source], "end")]
        while todo:
            point = todo.pop()
            if point == goal:
                return True
            if point not in seen:
                seen.add(point)
                todo += self.next.get(point, [])
        return False
