"""Merging one rank: read its files, link each window, write the tables; link.json last."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from chakra_capture import annotations, layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.communication import Communication, find_communication
from chakra_capture.merge.edges import Edges, find_edges
from chakra_capture.merge.exclude import without_validation
from chakra_capture.merge.groups import KnownGroups
from chakra_capture.merge.link import HostLink, ambiguous_correlations, link_host_ops
from chakra_capture.merge.many.origin import Origin, table_sizes
from chakra_capture.merge.memory import give_back
from chakra_capture.merge.order import link_by_order
from chakra_capture.merge.output import rank_folder, write_link, write_nodes, write_table
from chakra_capture.merge.pairing import Evidence, check_pair, check_rank
from chakra_capture.merge.phases import join_phases
from chakra_capture.merge.report import MergeOptions, RankReport
from chakra_capture.merge.roots import add_roots
from chakra_capture.merge.row_phases import row_phases
from chakra_capture.merge.rows import ACTIVITY_KINDS, climb, device_kinds, of_kind
from chakra_capture.merge.steps import steps_table
from chakra_capture.merge.tables import Columns, link_rows, step_rows
from chakra_capture.trace import SCHEMA_VERSION
from chakra_capture.trace.columns import MISSING, Coded
from chakra_capture.trace.device import DeviceTrace, read_device_trace
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.host import HostTrace, read_host_trace
from chakra_capture.trace.issued import Issued, IssuedFile, read_issued
from chakra_capture.trace.keys import match_keys
from chakra_capture.trace.phase_records import read_phases
from chakra_capture.trace.reading import ReadOptions
from chakra_capture.trace.schema import COMMUNICATION, EDGES, KINDS, STEPS
from chakra_capture.trace.spill import Spill


def merge_rank(
    rank: int,
    windows: list[WindowFiles],
    out: Path,
    options: MergeOptions,
    *,
    phases: Path | None = None,
    made_from: Origin | None = None,
) -> RankReport:
    """Merge the windows of one rank into ``out`` (``rank=<R>``).

    Args:
        rank: global rank; compared with the rank that the device trace states.
        phases: the rank's file of step phases, if there is one.
        made_from: stated in link.json, so that a later merge of the same can be left out.

    Raises:
        TraceFileError: a file is missing, damaged beyond repair or no trace; with ``strict`` also a
            repaired one.
        PairingError: two files are not of one process, rank and run, and ``force`` is off.
    """
    written: list[tuple[Columns, Communication]] = []
    edges, steps = [pl.LazyFrame(schema=EDGES.schema)], [pl.DataFrame(schema=STEPS.schema)]
    operations = [pl.DataFrame(schema=COMMUNICATION.schema)]
    entries = []
    num_nodes = 0
    for window, files in enumerate(windows):
        merged = _merge_window(rank, files, out, options)
        device = merged.entry["device"]
        lost = device is not None and device["tail_lost"]
        steps.append(steps_table(merged.columns, window, num_nodes, cut_steps=files.cut_steps, device_tail_lost=lost))
        written.append((merged.columns, merged.communication))
        operations.append(merged.communication.operations(window, num_nodes))
        edges.append(merged.edges.table(window, num_nodes))
        entries.append({"window": window, **merged.entry})
        num_nodes += len(merged.columns)
        del merged
        give_back()
    if made_from is not None and made_from.fault is not None:
        entries[0]["notes"].insert(0, f"merged by force: {made_from.fault}")
    with rank_folder(out):
        write_table(out / layout.EDGES_FILE, pl.concat(edges))
        edges.clear()  # the nodes need the memory
        give_back()
        table = pl.concat(steps)
        write_table(out / layout.STEPS_FILE, (join_phases(table, read_phases(phases)) if phases else table).lazy())
        write_table(out / layout.COMMUNICATION_FILE, pl.concat(operations).lazy())
        write_nodes(out / layout.NODES_FILE, written)
        link = {"schema_version": SCHEMA_VERSION, "rank": rank, "made_from": made_from, "tables": table_sizes(out)}
        write_link(out / layout.LINK_FILE, {**link, "windows": entries})
    return RankReport(rank, tuple(entries))


@dataclass(frozen=True, slots=True)
class _Window:
    columns: Columns
    communication: Communication
    edges: Edges
    entry: dict[str, Any]


def _merge_window(rank: int, files: WindowFiles, out: Path, options: MergeOptions) -> _Window:
    spill = None if options.memory_budget is None else Spill(out, options.memory_budget)
    how = ReadOptions(scanner=options.scanner, spill=spill)
    host = add_roots(read_host_trace(files.host, options=how)) if files.host else None
    device = read_device_trace(files.device, options=how) if files.device else None
    give_back()
    if host is None and device is None:
        raise TraceFileError(f"rank {rank} has no trace file. Give a host trace, a device trace, or both.")
    _check_salvage(host, device, options)
    if options.strict and files.unfinished:
        raise TraceFileError(
            f"{', '.join(str(p) for p in files.files)}: the process ended, or still runs, before these files were "
            "whole. Leave --strict out to merge what is there."
        )
    link, evidence, faults = None, None, []
    if host is not None and device is not None:
        is_cpu_op = of_kind(device_kinds(device), ("host_op", "annotation"))
        link, found = link_host_ops(host, device, is_cpu_op)
        evidence = replace(found, expected_rank=rank)
        if not (found.num_host_ids and found.num_device_ids):
            device_row, order = link_by_order(host, device, is_cpu_op)
            link, evidence = replace(link, device_row=device_row), replace(evidence, order=order)
        faults = check_pair(host, device, evidence, force=options.force)
    elif device is not None:
        faults = check_rank(device, rank, force=options.force)
    columns, num_excluded = without_validation(link_rows(host, device, link))
    columns.phase = row_phases(columns)
    device = columns.device  # the times are in the columns now
    give_back()
    issued = read_issued(files.issued) if files.issued else IssuedFile(Issued())
    communication = find_communication(columns, KnownGroups.of(rank, columns.host, columns.device, issued.issued))
    edges = find_edges(columns)
    entry = _entry(host, device, columns, edges, link, evidence, faults)
    uncovered = _uncovered(entry["host"], entry["device"])
    if uncovered and options.strict:
        raise TraceFileError(
            f"{files.host} and {files.device} do not cover the same steps: {'; '.join(uncovered)}. "
            "Leave --strict out to merge all that is there."
        )
    entry["notes"] += uncovered
    entry["num_rows_of_validation_left_out"] = num_excluded
    if num_excluded:
        entry["notes"].append(f"rows recorded during validation, left out because the job asked for it: {num_excluded}")
    entry["num_bytes_spilled"] = 0 if spill is None else spill.num_bytes
    if files.unfinished:
        entry["salvaged"] = True
        entry["notes"].insert(0, "the process ended, or still runs, before its files were whole")
    if issued.note:
        entry["notes"].append(issued.note)
    return _Window(columns, communication, edges, entry)


def _uncovered(host: dict[str, Any] | None, device: dict[str, Any] | None) -> list[str]:
    """Which steps of a pair one of its traces lacks: recording of that side was begun later, or ended earlier."""
    if host is None or device is None:
        return []
    sides = ((device, host, "device"), (host, device, "host"))
    alone = {side: sorted(set(here["steps"]) - set(there["steps"])) for here, there, side in sides}
    notes = [
        f"steps that only the {side} trace holds: {', '.join(map(str, steps[:10]))}"
        for side, steps in alone.items()
        if steps
    ]
    if alone["device"]:
        notes.append(f"ops of the device trace that have a host op: {host['num_linked']} of {device['num_ops']}")
    return notes


def _check_salvage(host: HostTrace | None, device: DeviceTrace | None, options: MergeOptions) -> None:
    for trace in (host, device):
        if options.strict and trace is not None and trace.salvage:
            raise TraceFileError(
                f"{trace.path} is damaged: {'; '.join(trace.salvage.notes)}. Leave --strict out to merge what is whole."
            )


def _entry(
    host: HostTrace | None,
    device: DeviceTrace | None,
    columns: Columns,
    edges: Edges,
    link: HostLink | None,
    evidence: Evidence | None,
    faults: list[str],
) -> dict[str, Any]:
    """What link.json says of one window."""
    notes = [f"{t.path.name}: {note}" for t in (host, device) if t is not None for note in t.salvage.notes]
    about_device = None if device is None else _device_entry(device, columns)
    entry: dict[str, Any] = {
        "host": None if host is None else _host_entry(host, columns, link),
        "device": about_device,
        "pairing": None if evidence is None else _pairing_entry(evidence, faults),
        "salvaged": bool(notes),
        "notes": [
            *notes,
            *_plain_notes(host, faults if evidence is None else []),
            *_table_notes(columns, about_device),
        ],
        "rows": {kind: n for kind, n in zip(KINDS, np.bincount(columns.kind).tolist(), strict=False) if n},
        "edges": {str(kind): n for kind, n in edges.rows["kind"].value_counts().sort("kind").iter_rows()},
        "edges_backward_left_out": edges.num_backward,
        "waits_unresolved": dict(sorted(edges.num_unresolved.items())),
        "clock_offset_ns": edges.clock_offset_ns,
        "repairs": {
            "rows_repaired": int(np.count_nonzero(columns.repaired)),
            "rows_clipped_to_parent": columns.num_clipped,
            "rows_clipped_to_next_on_stream": columns.num_overlaps,
        },
    }
    return entry


def _table_notes(columns: Columns, device: dict[str, Any] | None) -> list[str]:
    """What a reader of the tables must know of whole traces too: rows cross in them (asynchronous work, stacks)."""
    notes = []
    if device is not None and not device["steps"]:
        notes.append("no step is marked (ProfilerStep): the table steps has one row for the whole window")
    if device is not None and device["device_time_without_host_node_ns"]:
        without, total = device["device_time_without_host_node_ns"], device["device_time_ns"]
        notes.append(f"device time of ops that only the device trace holds: {without} of {total} ns")
    if columns.num_clipped:
        notes.append(f"rows that reach past the end of the row around them, clipped to it: {columns.num_clipped}")
    if columns.num_overlaps and device is not None:
        timed = columns.is_kind(*ACTIVITY_KINDS) & (columns.self_ns != MISSING)
        notes.append(
            "same-stream overlap: device activities that run past the next start on their stream, clipped there: "
            f"{columns.num_overlaps} (device activities sum to {device['device_time_ns']} ns, "
            f"as recorded {int(columns.dur_ns[timed].sum())} ns)"
        )
    return notes


def _plain_notes(host: HostTrace | None, faults: list[str]) -> list[str]:
    """What is no damage, yet must be said: of the host trace, and why a lone device trace had to be forced."""
    said = [] if host is None else [f"{host.path.name}: {note}" for note in host.notes]
    return [*said, *(f"merged by force: {fault}" for fault in faults)]


def _host_entry(host: HostTrace, columns: Columns, link: HostLink | None) -> dict[str, Any]:
    is_root = host.is_process | host.is_thread
    roots = int(np.count_nonzero(is_root)) - host.added.num_roots
    num_nodes = host.num_nodes - host.added.num_roots
    linked = 0 if link is None else int(np.count_nonzero(link.device_row >= 0))
    only: dict[str, int] = {}
    if link is not None:
        codes, counts = np.unique(host.name.codes[(link.device_row < 0) & ~is_root], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            only[host.name.values[code] if code >= 0 else ""] = count
    return {
        "file": host.path.name,
        "scanner": str(host.scanner),
        "schema": host.schema,
        "pid": host.pid,
        "finished": host.finished,
        "num_nodes": num_nodes,
        "num_roots": roots,
        "num_with_record_function_id": int(np.count_nonzero(host.attrs["rf_id"][:] != MISSING)),
        "num_linked": linked,
        "num_host_only": num_nodes - roots - linked,
        "host_only_names": dict(sorted(only.items(), key=lambda item: (-item[1], item[0]))[:10]),
        "num_name_mismatch": 0 if link is None else link.num_name_mismatch,
        "num_duplicate_node_ids": host.num_duplicate_ids,
        "num_duplicate_record_function_ids": 0 if link is None else link.num_host_duplicates,
        "num_dangling_parents": host.added.num_nodes,
        "missing_parents": list(host.added.missing_parents),
        "num_roots_added": host.added.num_roots,
        "num_cycles": len(host.cycles),
        "cycles": [_cycle(host, ids) for ids in host.cycles[:10]],
        "parents": _parent_agreement(columns),
        "steps": _step_set(host.name),
    }


def _cycle(host: HostTrace, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """The first nodes of a cycle, by id and name."""
    rows = match_keys(np.array(ids[:10], dtype=np.int64), host.node_id[:])
    return [{"id": node, "name": host.name[row]} for node, row in zip(ids[:10], rows.tolist(), strict=True)]


def _parent_agreement(columns: Columns) -> dict[str, int]:
    """Compare the parent by containment with the one the host trace recorded, host rows only."""
    is_host = columns.host_node >= 0
    rows = np.flatnonzero(is_host & (columns.ts_ns != MISSING))
    contained = climb(columns.parent[rows], columns.parent, is_host)
    recorded = columns.host_parent()[rows]
    at_root = columns.is_kind("thread", "process")[recorded]
    recorded = np.where((recorded >= 0) & at_root, -1, recorded)
    equal = int(np.count_nonzero(contained == recorded))
    return {"num_compared": len(rows), "num_equal": equal, "num_different": len(rows) - equal}


def _device_entry(device: DeviceTrace, columns: Columns) -> dict[str, Any]:
    rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS))
    correlation, calls = columns.integers("correlation_id", rows), np.flatnonzero(columns.is_kind("runtime"))
    no_id = correlation == MISSING
    several = ambiguous_correlations(columns.integers("correlation_id", calls), columns.integers("pid", calls))
    ambiguous = np.isin(correlation, several)
    launched, has_parent = columns.launch[rows] >= 0, columns.parent[rows] >= 0
    counted = np.maximum(columns.self_ns[rows], 0)
    unknown = has_parent & (columns.host_node[np.maximum(columns.parent[rows], 0)] < 0)
    return {
        "file": device.path.name,
        "scanner": str(device.scanner),
        "num_events": device.num_events,
        "num_rows": device.num_rows,
        "tail_lost": device.salvage.tail_lost,
        "categories": dict(sorted(device.categories.items())),
        "rank": device.rank,
        "world_size": device.world_size,
        "backend": device.backend,
        "num_ops": int(np.count_nonzero(columns.is_kind("host_op", "annotation") & (columns.device_row >= 0))),
        "num_activities": len(rows),
        "num_launched": int(np.count_nonzero(launched)),
        "num_with_parent": int(np.count_nonzero(has_parent)),
        "device_time_ns": int(counted.sum()),
        "device_time_without_host_node_ns": None if columns.host is None else int(counted[unknown].sum()),
        "orphans": {
            "no_correlation_id": int(np.count_nonzero(no_id)),
            "launch_not_in_file": int(np.count_nonzero(~no_id & ~ambiguous & ~launched)),
            "launch_in_several_processes": int(np.count_nonzero(ambiguous)),
            "launch_outside_any_op": int(np.count_nonzero(launched & ~has_parent)),
        },
        "num_bad_times": device.num_bad_times,
        "num_negative_durations": device.num_negative_durations,
        "steps": [int(s) for s in columns.step[step_rows(columns)]],
    }


def _step_set(name: Coded) -> list[int]:
    used = {name.values[code] for code in np.unique(name.codes[name.codes >= 0]).tolist()}
    return sorted(n for text in used if (n := annotations.parse_step(text)) is not None)


def _pairing_entry(evidence: Evidence, faults: list[str]) -> dict[str, Any]:
    return {
        "host_pid": evidence.host_pid,
        "device_pids": list(evidence.device_pids),
        "expected_rank": evidence.expected_rank,
        "device_rank": evidence.device_rank,
        "num_host_ids": evidence.num_host_ids,
        "num_device_ids": evidence.num_device_ids,
        "num_ids_common": evidence.num_ids_common,
        "num_names_equal": evidence.num_names_equal,
        "num_sequence_numbers_compared": evidence.num_sequence_common,
        "num_sequence_numbers_equal": evidence.num_sequence_equal,
        "linked_by": "record_function_id" if evidence.order is None else "call_order",
        "call_order": None if evidence.order is None else asdict(evidence.order),
        "forced": bool(faults),
        "faults": faults,
    }
