"""All rules on recorded windows, what each needs to speak, and what they say together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from chakra_capture.analysis.findings import Finding, Severity, written
from chakra_capture.analysis.idle import MOST_UNEXPLAINED
from chakra_capture.analysis.window_findings import communication, ddp, host, inputs, operators
from chakra_capture.analysis.window_findings.recorded import Recorded
from chakra_capture.analysis.window_findings.speaking import BAR, FEWEST_STEPS

QUALITY = "CAPTURE_QUALITY"
HOST_BOUND = "HOST_BOUND"
# What says where a part of the time goes of which another one says how much.
_WHOLE = {
    **dict.fromkeys(
        ("SHORT_KERNELS", "BETWEEN_OPS", "DDP_BUFFER_BROADCAST", "BUCKET_COPIES", "OPTIMIZER_OPS"), HOST_BOUND
    ),
    "SMALL_COLLECTIVES": "WAITS_FOR_COMMUNICATION",
}
_FEWEST_LINKED = 0.90
_LONG_IDLE = 0.20


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Attributes:
        on_device: it needs device activities; ``of_idle`` also that nearly all idle time has a reason and nearly all
            activities their launch.
        fewest_steps: fewer that count are no evidence.
    """

    find: Callable[[Recorded], Finding | None]
    on_device: bool = False
    of_idle: bool = False
    fewest_steps: int = 1


RULES = (
    Rule(inputs.input_wait),
    Rule(inputs.input_idle, on_device=True, of_idle=True),
    Rule(inputs.pageable_copies, on_device=True, of_idle=True),
    Rule(host.host_bound, on_device=True, of_idle=True, fewest_steps=FEWEST_STEPS),
    Rule(host.short_kernels, on_device=True, of_idle=True, fewest_steps=FEWEST_STEPS),
    Rule(host.between_ops, of_idle=True, fewest_steps=FEWEST_STEPS),
    Rule(host.drained, on_device=True, of_idle=True, fewest_steps=FEWEST_STEPS),
    Rule(host.allocation, on_device=True, fewest_steps=2),
    Rule(host.profiler_slows),
    Rule(communication.waits_for_communication, of_idle=True),
    Rule(communication.host_late, on_device=True, of_idle=True),
    Rule(communication.straggler),
    Rule(communication.waits_for_peers),
    Rule(communication.takes_turns),
    Rule(communication.slow_collectives),
    Rule(communication.small_collectives),
    Rule(ddp.buffer_broadcast, of_idle=True),
    Rule(ddp.bucket_copies, of_idle=True),
    Rule(operators.layout_conversions, on_device=True),
    Rule(operators.optimizer_ops, of_idle=True),
    Rule(operators.dtype_conversions),
    Rule(operators.repeated_forward),
)


def window_findings(recorded: Recorded) -> tuple[Finding, ...]:
    """What all rules say, in no order; below the bar, and without a prize, for information."""
    if recorded.units.is_empty():
        return tuple(_without_steps(recorded))
    quality = _quality(recorded)
    said = [rule.find(recorded) for rule in RULES if _may_speak(rule, recorded, is_told=quality is None)]
    found = [finding for finding in (*said, quality or _few_steps(recorded)) if finding is not None]
    kinds = {finding.kind for finding in found}
    return tuple(_as_part(each, kinds) for each in _with_reason(found))


def _as_part(finding: Finding, kinds: Collection[str]) -> Finding:
    """Say of what a finding is a part, where that is a finding too: their times are the same."""
    whole = _WHOLE.get(finding.kind)
    if whole not in kinds:
        return finding
    return replace(finding, evidence={**finding.evidence, "part_of": whole})


def _with_reason(found: Sequence[Finding]) -> list[Finding]:
    """What a slow rank does between operators is why it is slow, not a finding of its own."""
    slow = next((finding for finding in found if finding.kind == "STRAGGLER"), None)
    why = next((finding for finding in found if finding.kind == "BETWEEN_OPS"), None)
    if slow is None or why is None or slow.ranks != why.ranks:
        return list(found)
    told = replace(
        slow, summary=f"{slow.summary} {why.summary}", evidence={**slow.evidence, "between_ops": why.evidence}
    )
    return [told if finding is slow else finding for finding in found if finding is not why]


def _may_speak(rule: Rule, recorded: Recorded, *, is_told: bool) -> bool:
    if recorded.num_steps < rule.fewest_steps or (rule.on_device and not recorded.has_device):
        return False
    return is_told or not rule.of_idle


def _quality(recorded: Recorded) -> Finding | None:
    """Why nothing may be said of idle time; None where it may. With hardly any idle time that is no loss."""
    if not recorded.has_device or recorded.share(recorded.idle_ns) < BAR:
        return None
    if recorded.linked < _FEWEST_LINKED:
        why = f"{written(1 - recorded.linked)} of what ran on the device cannot be linked to its launch"
        next_step = "Open the window where the device has nothing queued, or record a step more."
    elif recorded.unexplained > MOST_UNEXPLAINED:
        why = f"{written(recorded.unexplained)} of the device's idle time has no recorded reason"
        next_step = "Record again with all activities; a window that opens late or a thinned file has such gaps."
    else:
        return None
    return _quality_line(
        f"{why}, so nothing is said of why it idles or waits.",
        next_step,
        linked=recorded.linked,
        unexplained=recorded.unexplained,
        num_steps=recorded.num_steps,
    )


def _quality_line(summary: str, action: str, **evidence: float) -> Finding:
    return Finding(
        kind=QUALITY, severity=Severity.info, summary=summary, action=action, metric="recorded_steps", evidence=evidence
    )


def _few_steps(recorded: Recorded) -> Finding | None:
    """Too few steps to say why the device is idle, though it is, for long."""
    if recorded.num_steps >= FEWEST_STEPS or not recorded.has_device:
        return None
    idle = recorded.share(recorded.idle_ns)
    if idle < _LONG_IDLE:
        return None
    return _quality_line(
        f"The device is idle {written(idle)} of a step; to say why takes {FEWEST_STEPS} recorded steps.",
        f"Record {FEWEST_STEPS} steps or more, after warm-up.",
        idle_share=idle,
        num_steps=recorded.num_steps,
    )


def _without_steps(recorded: Recorded) -> Iterator[Finding]:
    if recorded.has_device:
        yield _quality_line(
            "No whole step is marked in what was recorded, so nothing is said of what a step loses.",
            "Record with steps marked (ProfilerStep), as all integrations do.",
        )
