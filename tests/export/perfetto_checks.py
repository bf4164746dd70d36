"""Perfetto exports made in tests through the product's command, and held against the tables that they are made of."""

import json
from collections import Counter
from pathlib import Path

import polars as pl
from commands import run

from export.perfetto_reader import Trace, read

TRACES = Path(__file__).parents[2] / "traces"
MADE = {"phase", "gpu_state", "critical_path", "step"}
# What is no row with a time line of its own.
WITHOUT_TIME_LINE = ("process", "thread", "memory")


def exported(source: Path, target: Path, *options: object) -> tuple[Trace, dict]:
    done = run("export", "perfetto", source, "-o", target, "--json", *options)
    assert done.code == 0, done.err
    (said,) = json.loads(done.out)["files"]
    trace = read(target)
    events = (
        len(trace.slices) + len(trace.instants) + 2 * sum(map(len, trace.arrows.values()))
        + sum(map(len, trace.counters.values()))
    )  # fmt: skip
    assert said["num_events"] - events == len(trace.threads) * 2 + len(trace.processes) * 3
    assert said["num_bytes"] == target.stat().st_size
    assert {kind: len(pairs) for kind, pairs in trace.arrows.items()} == {
        kind: of["written"] for kind, of in said["arrows"].items() if of["written"]
    }
    return trace, said


def nodes_of(folder: Path, rank: int = 0) -> pl.DataFrame:
    (path,) = folder.glob(f"**/rank={rank}/nodes.parquet")
    return pl.read_parquet(path)


def check_rows(trace: Trace, nodes: pl.DataFrame, *, rank: int = 0, shift: int = 0, of_device: int = 0) -> None:
    """Every row with a time is there once, at its time to the ns, in its category.

    Args:
        shift: of the rank's clock; ``of_device`` of its device's in addition.
    """
    rows = {key[1]: one for key, one in trace.rows().items() if key[0] == rank}
    timed = nodes.filter(pl.col("ts_ns").is_not_null() & ~pl.col("kind").is_in(WITHOUT_TIME_LINE))
    assert len(rows) == timed.height
    for node in timed.iter_rows(named=True):
        one = rows[node["node_id"]]
        assert one.name == (node["name"] or "")
        on_device = node["kind"] in ("kernel", "memcpy", "memset", "device_annotation", "sync")
        assert one.begin + trace.base == node["ts_ns"] + shift + on_device * of_device
        assert one.end - one.begin == (node["dur_ns"] or 0)
        args = json.loads(node["args"] or "{}")
        assert one.cat == args.get("cat")
        assert one.args.get("External id") == node["external_id"]
        assert one.args.get("correlation") == node["correlation_id"]
        assert one.args.get("stream") == (None if node["kind"] == "device_annotation" else node["stream"])
        assert one.args.get("step") == node["step"]
        assert one.args.get("phase") == node["phase"]
        kept = {key: value for key, value in args.items() if key not in ("cat", "host")}
        assert json.loads(json.dumps({key: one.args[key] for key in kept}, default=float)) == kept


def check_made(trace: Trace, said: dict) -> None:
    """What is made of rows: counted, the path and the states of a GPU without a gap."""
    found = Counter(one.cat for one in trace.slices if one.cat in MADE)
    assert found == Counter(said["made"])
    for name in ("GPU state", "critical path"):
        for (pid, tid), thread in trace.threads.items():
            mine = [one for one in trace.slices if (one.pid, one.tid) == (pid, tid)]
            if thread == name and mine:
                assert [a.end for a in mine[:-1]] == [b.begin for b in mine[1:]]
