"""Rules on operators and kernels that could be spared."""

import re

import numpy as np
import polars as pl

from chakra_capture.analysis.findings import Finding, written, written_ms
from chakra_capture.analysis.what_if.changes import Changes, Scale, parse_changes
from chakra_capture.analysis.window_findings.recorded import HostRows, Recorded
from chakra_capture.analysis.window_findings.speaking import speak
from chakra_capture.annotations import BACKWARD, OPTIMIZER

_LAYOUT = r"(?i)nchwtonhwc|nhwctonchw|batched_transpose"
_LAYOUT_SHARE, _OPTIMIZER, _OPTIMIZER_OPS, _DTYPES, _REPEATED = 0.05, 0.10, 10, 0.05, 0.10
# Where nearly all in backward is differentiated itself, it is a second derivative and nothing is repeated.
_ALL = 0.90


def layout_conversions(recorded: Recorded) -> Finding | None:
    """Convolutions convert between layouts before and after they compute."""
    compute = recorded.activities.filter(pl.col("part") == "compute")
    rows = compute.filter(pl.col("name").str.contains(_LAYOUT))
    total = int(rows["self_dur_ns"].sum())
    if not total or total < _LAYOUT_SHARE * recorded.compute_ns or not _has_convolutions(recorded):
        return None
    return speak(
        recorded,
        "LAYOUT_CONVERSIONS",
        f"Layout conversions for convolutions take {written_ms(recorded.per_step(total))} per step "
        f"({written(total / recorded.compute_ns)} of compute).",
        "Keep model and input in memory_format=torch.channels_last.",
        recorded.prize(
            Changes((Scale("kernel", 0.0, re.compile(_LAYOUT.removeprefix("(?i)"), re.IGNORECASE)),)), total
        ),
        kernel_ns=recorded.per_step(total),
        num_kernels=recorded.per_step(rows.height),
    )


def _has_convolutions(recorded: Recorded) -> bool:
    return any(rows.mask(pl.col("name").str.contains("(?i)conv")).any() for rows in recorded.hosts)


def optimizer_ops(recorded: Recorded) -> Finding | None:
    """The optimizer updates parameter by parameter, with many small operators."""
    ops = sum(_outer_ops(recorded, rows) for rows in recorded.hosts) / max(recorded.units.height, 1)
    if ops < _OPTIMIZER_OPS:
        return None
    in_phase = pl.col("phase") == OPTIMIZER
    pieces = recorded.idle if recorded.has_device else recorded.loop
    total = int(pieces.filter(in_phase)["dur_ns"].sum())
    if recorded.has_device:
        total += int(recorded.activities.filter(in_phase)["self_dur_ns"].sum())
    spent = recorded.per_step(total)
    if spent < _OPTIMIZER * recorded.step_ns:
        return None
    where = "of the device's time" if recorded.has_device else "of each step"
    return speak(
        recorded,
        "OPTIMIZER_OPS",
        f"The optimizer takes {written(spent / recorded.step_ns)} {where} ({written_ms(spent)} per step) with "
        f"{ops:.0f} small operators.",
        "Use fused=True (or foreach=True), where the optimizer has it.",
        recorded.prize(
            parse_changes([], [r"op~^Optimizer\.step#"], overlap_comm=False),
            total,
            of_host=True,
        ),
        phase=OPTIMIZER,
        optimizer_ns=spent,
        num_ops=ops,
    )


def _outer_ops(recorded: Recorded, rows: HostRows) -> int:
    ops = rows.mask((pl.col("kind") == "host_op") & (pl.col("phase") == OPTIMIZER))
    return recorded.within(rows.table[rows.outer(ops)]).height


def dtype_conversions(recorded: Recorded) -> Finding | None:
    """Tensors are copied to another type: of the device its time, without one that of the operators."""
    total = num = 0
    for at, trace in enumerate(recorded.traces):
        rows = recorded.hosts[at]
        types = trace.some_of_nodes("node_id", "name", "input_types").filter(pl.col("name") == "aten::copy_")
        shown = pl.col("input_types").str.extract_all(r"Tensor\(([^)]+)\)")
        other = types.filter(shown.list.get(0, null_on_oob=True) != shown.list.get(1, null_on_oob=True))["node_id"]
        mine = recorded.within(rows.table.filter(pl.col("node_id").is_in(other.implode())))
        num += mine.height
        if recorded.has_device:
            launched = recorded.activities.filter(pl.col("rank") == trace.rank)
            launched = launched.filter(pl.col("parent_id").is_in(mine["node_id"].implode()))
            total += int(launched["self_dur_ns"].sum())
        else:
            total += int(mine["dur_ns"].sum())
    whole = recorded.compute_ns if recorded.has_device else int(recorded.units["dur_ns"].sum())
    if not total or total < _DTYPES * whole:
        return None
    of = "of the device's compute" if recorded.has_device else "of the step"
    return speak(
        recorded,
        "DTYPE_CONVERSIONS",
        f"Copies to another dtype take {written_ms(recorded.per_step(total))} per step ({written(total / whole)} {of}; "
        f"{recorded.per_step(num):.0f} copies).",
        "Keep data in one dtype from the loader on; some of them are autocast's and belong there.",
        recorded.at_most(total, of_host=not recorded.has_device),
        num_copies=recorded.per_step(num),
        total_ns=recorded.per_step(total),
    )


def repeated_forward(recorded: Recorded) -> Finding | None:
    """Forward is computed again in backward (activation checkpoints): memory is bought with time.

    In backward only what is computed to be differentiated carries a sequence number.
    """
    again = num = 0
    whole = 0
    for rows in recorded.hosts:
        is_op = (pl.col("kind") == "host_op") & (pl.col("phase") == BACKWARD) & pl.col("name").str.starts_with("aten::")
        ops = rows.mask(is_op)
        numbered = rows.mask(is_op & (pl.col("sequence_number") >= 0))
        engine = rows.mask(pl.col("name").str.starts_with("autograd::engine::evaluate_function"))
        numbered[numbered] = rows.is_under(np.flatnonzero(numbered), engine)
        outer, all_outer = rows.outer(numbered), rows.outer(ops)
        if len(outer) >= _ALL * max(len(all_outer), 1):
            continue
        counted = recorded.within(rows.table[outer])
        again += int(counted["dur_ns"].sum())
        num += counted.height
        whole += int(recorded.within(rows.table[rows.outer(engine)])["dur_ns"].sum())
    if not again or again < _REPEATED * whole:
        return None
    return speak(
        recorded,
        "FORWARD_REPEATED",
        f"Forward is computed again in backward: {recorded.per_step(num):.0f} operators, "
        f"{written_ms(recorded.per_step(again))} of CPU time per step ({written(again / whole)} of backward's).",
        "That saves memory; if there is some left, checkpoint fewer layers.",
        recorded.at_most(again, of_host=True),
        phase=BACKWARD,
        num_ops=recorded.per_step(num),
        cpu_ns=recorded.per_step(again),
    )
