"""A run in one JSON object: TraceML's final_summary.json (schema 1.9), name by name, with what is only ours beside it.

Steps are numbered from 1 here, as TraceML does. What this project does not measure is null; its sections system and
process say so. Means are over the steps that count: whole, not under the profiler, not the first of a training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.analysis.diagnosis import Diagnosis
from chakra_capture.analysis.findings import Finding, Severity
from chakra_capture.analysis.phases import PhaseSummary
from chakra_capture.analysis.step_series import COMPUTE, REST, STEP, TRACED
from chakra_capture.analysis.step_window import Float, row_means
from chakra_capture.annotations import BACKWARD, FORWARD, H2D, INPUT_WAIT, OPTIMIZER
from chakra_capture.trace.discovery import ManifestHead

SCHEMA_VERSION, OUR_SCHEMA_VERSION = 1.9, 1
OURS = "chakra_capture"

_STEP_TIME = (
    "input_wait_ms", "step_time_ms", "traced_step_time_ms", "step_time_cpu_ms", "step_time_gpu_ms",
    "traced_step_time_cpu_ms", "traced_step_time_gpu_ms", "dataloader_fetch_cpu_ms", "h2d_ms", "compute_ms",
    "residual_ms", "forward_ms", "backward_ms", "optimizer_ms",
)  # fmt: skip
_SELECTED = {
    "input_wait_ms": INPUT_WAIT,
    "step_time_ms": STEP,
    "traced_step_time_ms": TRACED,
    "h2d_ms": H2D,
    "compute_ms": COMPUTE,
    "residual_ms": REST,
    "forward_ms": FORWARD,
    "backward_ms": BACKWARD,
    "optimizer_ms": OPTIMIZER,
}
_STEP_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes")
_SYSTEM = (
    "cpu_percent", "ram_bytes", "ram_percent", "gpu_util_percent", "gpu_mem_bytes", "gpu_mem_percent", "gpu_temp_c",
    "gpu_power_w", "gpu_headroom_bytes",
)  # fmt: skip
_PROCESS = (
    "cpu_percent", "cpu_capacity_percent", "ram_bytes", "ram_percent", "gpu_mem_used_bytes", "gpu_mem_reserved_bytes",
    "gpu_mem_reserved_percent", "gpu_mem_headroom_bytes",
)  # fmt: skip
_SHARES = ("INPUT_BOUND", "H2D_BOUND", "RESIDUAL_HEAVY", "COMPUTE_BOUND")
_UNSURE = ("NO_DATA", "WARMUP", "INCOMPLETE_DATA")
_STATUS = {kind: kind.replace("_", "-") for kind in _SHARES}
_STATUS |= {"CREEP_CONFIRMED": "MEMORY CREEP", "CREEP_EARLY": "MEMORY RISING"}
_COMPARED = {INPUT_WAIT: "input_wait_ms", H2D: "h2d_ms", FORWARD: "forward_ms", BACKWARD: "backward_ms"}

Row = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a summary says of a run beside its times.

    Attributes:
        failed: why the training did not come to its end, where the recording knows.
    """

    job: str
    manifests: Mapping[int, ManifestHead]
    world_size: int | None
    failed: str | None = None


def final_summary(
    facts: RunFacts, diagnosis: Diagnosis, phases: Mapping[int, PhaseSummary], *, text: str
) -> dict[str, Any]:
    """Put a run into TraceML's form.

    Args:
        facts: of the run.
        diagnosis: of all ranks.
        phases: of all ranks.
        text: the findings as people read them.
    """
    step_time = _step_time(facts, diagnosis)
    window = _analysis_window(diagnosis)
    sections = {
        "system": _unmeasured("node_rank", _SYSTEM, {"memory": "bytes", "temperature": "C", "power": "W", "util": "%"}),
        "process": _process(facts, diagnosis),
        "step_time": step_time,
        "step_memory": _step_memory(facts, diagnosis),
    }
    for section in sections.values():
        section["metadata"] |= {f"analysis_{key}": window[key] for key in ("start_ts_s", "end_ts_s")}
        section["metadata"] |= {f"analysis_{key}": window[key] for key in ("start_step", "end_step")}
    hosts = {head.hostname for head in facts.manifests.values() if head.hostname}
    has_ended = facts.manifests and all(head.reason not in (None, "running") for head in facts.manifests.values())
    status = {"status": "failed"} if facts.failed else {"status": "completed"} if has_ended else {}
    execution = {} if facts.world_size is None else {"execution": {"expected_world_size": facts.world_size}}
    return {
        "schema_version": SCHEMA_VERSION,
        "generated_at": datetime.now(UTC).isoformat(),
        "duration_s": None,
        "analysis_window": window,
        "meta": {
            "run_name": facts.job,
            "mode": _mode(len(hosts), diagnosis.window.num_steps),
            "world_size": facts.world_size,
            "nodes_observed": len(hosts) or None,
            "gpus_observed": None,
        },
        "run_context": {"run": {**status, "profile": "run"}, **execution},
        "primary_diagnosis": _primary(diagnosis, step_time),
        **sections,
        "text": text,
        OURS: {
            "schema_version": OUR_SCHEMA_VERSION,
            "job": facts.job,
            "failed": facts.failed,
            "diagnosis": diagnosis.as_json(),
            "phases": {str(rank): summary.as_json() for rank, summary in phases.items()},
        },
    }


def _mode(num_hosts: int, num_steps: int) -> str:
    return "no_data" if not num_steps else "multi_node" if num_hosts > 1 else "single_node"


def _bounds(diagnosis: Diagnosis) -> tuple[int | None, int | None]:
    """First and last common step, counted from 1."""
    steps = diagnosis.window.keys["step"]
    return (int(steps[0]) + 1, int(steps[-1]) + 1) if len(steps) else (None, None)


def _analysis_window(diagnosis: Diagnosis) -> dict[str, Any]:
    keys, (start_step, end_step) = diagnosis.window.keys, _bounds(diagnosis)
    used = [each for each in diagnosis.series if each.rank in diagnosis.window.ranks]
    tables = [each.cpu.join(keys, on=["fit", "step"], how="semi") for each in used]
    begins = [value for table in tables if (value := table["ts_ns"].min()) is not None]
    ends = [
        value for table in tables if (value := table.select(pl.col("ts_ns") + pl.col(STEP)).max().item()) is not None
    ]
    start = min(begins) / 1e9 if begins else None  # type: ignore[operator]
    end = max(ends) / 1e9 if ends else None
    num = {"system": 0, "process": 0, "step_time": keys.height, "step_memory": _num_memory(diagnosis)}
    return {
        "anchor": "step_time" if keys.height else None,
        "retention_s": None,
        "start_ts_s": start,
        "end_ts_s": end,
        "duration_s": None if start is None or end is None else end - start,
        "start_step": start_step,
        "end_step": end_step,
        "sections": {
            name: {
                "samples": samples,
                "observed_start_ts_s": start if samples else None,
                "observed_end_ts_s": end if samples else None,
            }
            for name, samples in num.items()
        },
    }


def _num_memory(diagnosis: Diagnosis) -> int:
    return max((each.memory.height for each in diagnosis.series), default=0)


def _step_time(facts: RunFacts, diagnosis: Diagnosis) -> dict[str, Any]:
    window = diagnosis.window
    columns: dict[str, Float] = {name: row_means(window.times[part]) for name, part in _SELECTED.items()}
    for suffix, times in (("cpu", window.cpu), ("gpu", window.device)):
        # TraceML has a time on the device only where every step has it.
        whole = suffix == "cpu" or window.clock == "gpu"
        for name, part in (("step_time", STEP), ("traced_step_time", TRACED)):
            columns[f"{name}_{suffix}_ms"] = row_means(times[part] if whole else np.full_like(times[part], np.nan))
    columns["dataloader_fetch_cpu_ms"] = row_means(window.cpu[INPUT_WAIT])
    rows: dict[int, Row] = {
        rank: {name: _ms(columns[name][at]) for name in _STEP_TIME} for at, rank in enumerate(window.ranks)
    }
    section = _section(
        facts,
        rows,
        _STEP_TIME,
        {"time": "ms"},
        diagnosis.step_time,
        num_steps=window.num_steps,
        bounds=_bounds(diagnosis),
    )
    section["global"]["window"]["diagnosis_clock"] = window.clock
    section["metadata"] |= _training(diagnosis)
    return section


def _ms(ns: float) -> float | None:
    return float(ns) / 1e6 if np.isfinite(ns) else None


def _training(diagnosis: Diagnosis) -> dict[str, Any]:
    last = max((each.last_step + 1 for each in diagnosis.series if each.last_step is not None), default=None)
    return {
        "global_ranks_seen": len(diagnosis.series),
        "training_total_steps": last or 0,
        "training_latest_step": last,
    }


def _step_memory(facts: RunFacts, diagnosis: Diagnosis) -> dict[str, Any]:
    rows: dict[int, Row] = {
        each.rank: {name: _largest(each.memory[name]) for name in _STEP_MEMORY}
        for each in diagnosis.series
        if each.memory.height
    }
    why = ("BALANCED", "Memory is neither short nor apart between ranks, and does not grow.")
    none = ("NO_DATA", "No device memory was recorded.")
    kind, summary = why if rows else none
    nothing = Finding(
        kind=kind, severity=Severity.info, summary=summary, action="Nothing to do.", metric="peak_reserved"
    )
    of_device = [each for each in diagnosis.memory if each.metric != "rss_bytes"]
    num, bounds = (diagnosis.window.num_steps, _bounds(diagnosis)) if rows else (0, (None, None))
    section = _section(
        facts, rows, _STEP_MEMORY, {"memory": "bytes"}, of_device or [nothing], num_steps=num, bounds=bounds
    )
    section["metadata"] |= _training(diagnosis)
    return section


def _largest(values: pl.Series) -> float | None:
    found = values.max()
    return float(found) if isinstance(found, int) else None


def _process(facts: RunFacts, diagnosis: Diagnosis) -> dict[str, Any]:
    """Resident memory is all that is known of a process; what it says is in our findings."""
    section = _unmeasured("global_rank", _PROCESS, {"memory": "bytes", "cpu": "%"})
    rows: dict[int, Row] = {}
    for each in diagnosis.series:
        mean = each.cpu["rss_bytes"].mean()
        if isinstance(mean, float):
            rows[each.rank] = {**dict.fromkeys(_PROCESS), "ram_bytes": mean}
    section["global"] |= _rollup(rows, _PROCESS)
    section["groups"]["rows"] = _rows(facts, rows)
    section["metadata"] |= {"global_ranks_seen": len(diagnosis.series), "global_ranks_used": len(rows)}
    return section


def _unmeasured(index: str, metrics: Sequence[str], units: dict[str, str]) -> dict[str, Any]:
    nothing = Finding(
        kind="NO_DATA",
        severity=Severity.info,
        summary="Load of machine and process is not measured.",
        action="Look at it with the tools of the machine.",
    )
    section = _shape(index, {}, metrics, units, [nothing])
    section["global"]["window"] |= {"kind": "sample_window", "alignment": "none", "samples": 0, "steps_analyzed": None}
    return section


def _section(
    facts: RunFacts,
    rows: Mapping[int, Row],
    metrics: Sequence[str],
    units: dict[str, str],
    findings: Sequence[Finding],
    *,
    num_steps: int,
    bounds: tuple[int | None, int | None],
) -> dict[str, Any]:
    section = _shape("global_rank", rows, metrics, units, findings)
    start, end = bounds
    section["global"]["window"] |= {
        "steps_analyzed": num_steps,
        "start_step": start,
        "end_step": end,
        "completed_step": end,
    }
    section["groups"]["rows"] = _rows(facts, rows)
    hosts = {head.hostname for head in facts.manifests.values() if head.hostname}
    section["metadata"] |= {
        "mode": _mode(len(hosts), num_steps),
        "samples": num_steps,
        "global_ranks_used": len(rows),
    }
    return section


def _shape(
    index: str, rows: Mapping[int, Row], metrics: Sequence[str], units: dict[str, str], findings: Sequence[Finding]
) -> dict[str, Any]:
    issues = [_issue(finding) for finding in findings]
    unknown = (
        "duration_s", "nodes_expected", "nodes_observed", "nodes_coverage", "nodes_partial", "gpus_observed",
        "global_ranks_seen", "global_ranks_used", "training_total_steps", "training_latest_step",
    )  # fmt: skip
    return {
        "metadata": {"mode": "no_data", "samples": 0, **dict.fromkeys(unknown), "section_metric_names": list(metrics)},
        "diagnosis": issues[0],
        "issues": issues,
        "global": {
            "index_by": index,
            "window": {
                "kind": "step_window",
                "alignment": "common_steps",
                "samples": None,
                "steps_analyzed": 0,
                "start_step": None,
                "end_step": None,
                "completed_step": None,
            },
            **_rollup(rows, metrics),
        },
        "groups": {"by": index, "rows": {}},
        "units": units,
        "card": issues[0]["summary"],
    }


def _rollup(rows: Mapping[int, Row], metrics: Sequence[str]) -> dict[str, Any]:
    known = {name: {rank: value for rank, row in rows.items() if (value := row[name]) is not None} for name in metrics}
    return {
        "average": {name: sum(values.values()) / len(values) if values else None for name, values in known.items()},
        "median": {name: _point(values, _representative(values)) for name, values in known.items()},
        "worst": {name: _point(values, _worst(values)) for name, values in known.items()},
    }


def _point(values: Mapping[int, float], rank: int | None) -> dict[str, Any]:
    return {"value": None, "idx": None} if rank is None else {"value": values[rank], "idx": str(rank)}


def _representative(values: Mapping[int, float]) -> int | None:
    """The rank nearest to the median; of equally near ones that with the lower value, then the lower number."""
    middle = float(np.median([*values.values()])) if values else 0.0
    return min(values, key=lambda rank: (abs(values[rank] - middle), values[rank], rank), default=None)


def _worst(values: Mapping[int, float]) -> int | None:
    return max(values, key=lambda rank: (values[rank], -rank), default=None)


def _rows(facts: RunFacts, rows: Mapping[int, Row]) -> dict[str, Any]:
    def identity(rank: int) -> dict[str, Any]:
        head = facts.manifests.get(rank)
        return {
            "global_rank": rank,
            "local_rank": None,
            "node_rank": None,
            "hostname": None if head is None else head.hostname,
            "local_world_size": None,
            "world_size": facts.world_size,
        }

    return {str(rank): {"identity": identity(rank), "metrics": row} for rank, row in rows.items()}


def _issue(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "status": _status(finding.kind),
        "severity": finding.severity.name,
        "summary": finding.summary,
        "action": finding.action,
        "metric": finding.metric,
        "phase": "input" if finding.phase == INPUT_WAIT else finding.phase,
        "score": finding.score,
        "share_pct": finding.share,
        "skew_pct": finding.skew,
        "ranks": list(finding.ranks),
        "evidence": finding.evidence,
    }


def _status(kind: str) -> str:
    return _STATUS.get(kind, kind.replace("_", " "))


def _primary(diagnosis: Diagnosis, step_time: dict[str, Any]) -> dict[str, Any]:
    """The first of the issues on step time, as TraceML promotes it."""
    first, overall = diagnosis.step_time[0], step_time["global"]
    found = {**_issue(first), "section": "step_time", "scope": "performance"}
    keys = ("kind", "status", "severity", "section", "scope", "summary", "action")
    evidence: dict[str, Any] = {"steps_analyzed": overall["window"]["steps_analyzed"], "gpu_util_avg_percent": None}
    if first.kind in _UNSURE:
        found |= {"kind": "INSUFFICIENT_STEP_TIME_DATA", "status": "INSUFFICIENT STEP-TIME DATA"}
        evidence |= {"type": "insufficient_data", "step_time_status": _status(first.kind)}
    elif first.kind.endswith("STRAGGLER"):
        evidence |= {"type": "rank_comparison", **_score(first, "visible_cost_ms / victim_step_time_ms")}
        metrics = [_COMPARED.get(first.phase or "", "")] if first.kind != "STRAGGLER" else []
        compared = [_comparison(overall, name) for name in metrics if name]
        others = ("input_wait_ms", "compute_ms", "h2d_ms", "residual_ms")
        evidence |= compared[0] if compared else {"comparisons": [_comparison(overall, name) for name in others]}
    else:
        means = overall["average"]
        names = ("step_time_ms", "traced_step_time_ms", "dataloader_fetch_cpu_ms", "input_wait_ms", "h2d_ms")
        evidence |= {"type": "phase_share", "basis": "average", "diagnosis_clock": diagnosis.window.clock}
        evidence |= {name: means[name] for name in (*names, "compute_ms", "residual_ms")}
        evidence |= _score(first, "median_per_rank_step_time_share")
        if first.kind == "BALANCED":
            kind = "NO_CLEAR_PERFORMANCE_BOTTLENECK"
            found |= {"kind": kind, "status": kind.replace("_", " ")}
            evidence |= {"type": "no_clear_bottleneck", "step_time_status": "BALANCED"}
    return {**{key: found[key] for key in keys}, "evidence": evidence}


def _score(finding: Finding, basis: str) -> dict[str, Any]:
    if finding.score is None:
        return {}
    found: dict[str, Any] = {"score": finding.score, "score_basis": basis}
    if finding.kind.endswith("STRAGGLER"):
        cost = finding.evidence.get("visible_cost_ms", finding.evidence.get("excess_ms"))
        return {**found, "score_numerator_ms": cost, "score_denominator_ms": finding.evidence.get("step_time_ms")}
    return {**found, "score_denominator": "selected-clock Step Time per rank"}


def _comparison(overall: dict[str, Any], metric: str) -> dict[str, Any]:
    points = {
        name: {
            "rank": None if (point := overall[name][metric])["idx"] is None else int(point["idx"]),
            "value_ms": point["value"],
        }
        for name in ("median", "worst")
    }
    middle, worst = (points[name]["value_ms"] for name in ("median", "worst"))
    is_known = middle is not None and worst is not None
    return {
        "metric": metric,
        "phase": "input" if metric == "input_wait_ms" else metric.removesuffix("_ms"),
        **points,
        "delta_ms": worst - middle if is_known else None,
        "ratio": worst / middle if is_known and middle > 0 else None,
    }
