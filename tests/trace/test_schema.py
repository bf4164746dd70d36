from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder

from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import EDGES, NODES, STEPS, TABLES, Table

# Filled by later versions; they exist from the first one on, so that readers need not ask.
NOT_YET = {
    "nodes": set(),
    "steps": {"input_wait_ns", "h2d_ns", "forward_ns", "backward_ns", "optimizer_ns", "residual_ns", "coverage",
              "update_skipped"},
    "edges": set(),
    "communication": set(),
}  # fmt: skip


def traces() -> list[TraceBuilder]:
    full = TraceBuilder().step(1, 0, 50).op("a", 5, 10).launched("k", 20, 5, 1, at=6)
    no_step = TraceBuilder().event(ph="X", cat="x", name="other", pid=1, tid=1, ts=1, dur=1)
    return [full, no_step]


def frame(trace: MergedTrace, table: Table) -> pl.DataFrame:
    tables = {"nodes": trace.nodes, "edges": trace.edges, "steps": trace.steps, "communication": trace.communication}
    return tables[table.name]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
@pytest.mark.parametrize("number", [0, 1])
def test_written_tables_have_the_documented_columns(table: Table, number: int, tmp_path: Path) -> None:
    trace = traces()[number].merged(tmp_path, host=number == 0)
    written = frame(trace, table)
    assert written.schema == table.schema
    for column in NOT_YET[table.name]:
        assert written[column].null_count() == written.height


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_table_and_column_has_a_meaning_and_times_their_unit(table: Table) -> None:
    assert table.meaning
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    for column in table.columns:
        assert len(column.meaning) > 3, column.name
        assert (column.unit == "ns") == column.name.endswith("_ns"), column.name
        assert (column.unit == "bytes") == column.name.endswith("_bytes"), column.name


def test_tables_hold_the_columns_of_the_contract() -> None:
    nodes = (
        "node_id window kind name parent_id launch_id ts_ns dur_ns self_dur_ns repaired pid tid device stream host_id "
        "record_function_id external_id correlation_id sequence_number step phase collective process_group comm_bytes "
        "input_shapes input_types args"
    )
    assert " ".join(NODES.schema.names()) == nodes
    assert EDGES.schema.names() == ["window", "src", "src_at", "dst", "dst_at", "kind"]
    assert {"window", "step", "ts_ns", "dur_ns", "device_busy_ns", "device_idle_ns", "profiled", "warmup", "partial",
            "update_skipped", "coverage"} <= set(STEPS.schema.names())  # fmt: skip
