"""What to change first: findings in words, each with what it may save."""

from chakra_capture.analysis.findings import Finding
from chakra_capture.report import charts
from chakra_capture.report.blocks import Block, FindingItem, Findings, Fold, Note, Prize, Section, State
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import Scope
from chakra_capture.report.words import Prose, count_of, plain, prose, ranges, saving, share

_MOST = 7
_FEW_STEPS = 20
TITLES = {
    "INPUT_BOUND": "Training waits for its input",
    "INPUT_STRAGGLER": "One rank waits for its input, and the others for it",
    "H2D_BOUND": "Copies to the GPU take much of each step",
    "H2D_STRAGGLER": "One rank copies longer than the others",
    "COMPUTE_STRAGGLER": "One rank computes longer, and the others wait for it",
    "STRAGGLER": "The ranks wait for one of them",
    "RESIDUAL_HEAVY": "Much of each step is in no phase",
    "VALIDATION_HEAVY": "Validation takes much of the training",
    "CHECKPOINT_HEAVY": "Saving checkpoints takes much of the training",
    "CALLBACKS_HEAVY": "Callbacks take much of the training",
    "BETWEEN_STEPS_HEAVY": "The loop is busy between steps",
    "STEPS_SLOW_DOWN": "Steps take longer and longer",
    "INPUT_BURSTS": "Now and then a step waits long for its input",
    "SLOW_STEPS": "A few steps are much slower than the others",
    "HOST_BOUND": "The CPU issues work slower than the GPU finishes it",
    "SHORT_KERNELS": "Kernels are shorter than their launches",
    "BETWEEN_OPS": "Time passes in Python between operators",
    "QUEUE_DRAINED": "A call waits for the GPU in every step",
    "DEVICE_ALLOCATIONS": "GPU memory is allocated in every step",
    "DEVICE_WAITS_FOR_INPUT": "The GPU waits for input",
    "PAGEABLE_COPIES": "Copies from memory that is not pinned",
    "WAITS_FOR_COMMUNICATION": "Work waits for communication",
    "WAITS_FOR_PEERS": "Ranks wait for each other in collectives",
    "RANKS_TAKE_TURNS": "Ranks wait for each other in turn",
    "SLOW_COLLECTIVES": "Most collectives are slower than the best of them",
    "SMALL_COLLECTIVES": "Many small collectives",
    "DDP_BUFFER_BROADCAST": "DDP sends its buffers before every forward",
    "BUCKET_COPIES": "DDP copies gradients out of its buckets",
    "LAYOUT_CONVERSIONS": "Layouts are converted for convolutions",
    "OPTIMIZER_OPS": "The optimizer runs many small operators",
    "DTYPE_CONVERSIONS": "Values are converted between dtypes",
    "FORWARD_REPEATED": "Forward runs again in backward",
}


def prize_of(finding: Finding) -> Prize | None:
    """What a finding would save: of those that were tried the time, of the others at most their share of a step."""
    found = finding.prize
    if found is not None:
        return Prize(found.most_ns, found.share, found.least_ns is None or found.least_ns < found.most_ns, found.doubt)
    return None if finding.share is None else Prize(None, finding.share)


def findings_of(facts: Facts) -> list[Finding]:
    """Findings that call for something to be done, the one that may save most first."""
    return sorted(
        facts.findings.problems, key=lambda finding: -(prize.share or 0.0 if (prize := prize_of(finding)) else 0.0)
    )


def section(facts: Facts, scope: Scope) -> Section:
    """The findings of a run; of a healthy one a sentence."""
    found = findings_of(facts)
    items = [_item(finding, facts) for finding in found]
    blocks: list[Block] = []
    if items:
        blocks.append(Findings(items[:_MOST]))
        if more := items[_MOST:]:
            blocks.append(Fold(f"{count_of(len(more), 'finding')} more", (Findings(more, start=_MOST + 1),)))
        question = "What to change, ordered by how much of the step it could save. Prizes overlap: they do not add up."
    else:
        question = "What to change, ordered by how much of the step it could save."
        blocks += _none(facts)
    blocks += [Note(plain(f"{finding.summary} {finding.action}")) for finding in facts.findings.notes]
    if minor := facts.findings.minor:
        items = [_item(finding, facts) for finding in minor]
        blocks.append(Fold("What would save less than 3 % of a step", (Findings(items, start=len(found) + 1),)))
    num_steps = facts.findings.num_steps if facts.diagnosis is None else facts.diagnosis.window.num_steps
    if 0 < num_steps < _FEW_STEPS:
        blocks.append(Note(prose(f"Only {count_of(num_steps, 'step')}: no statement on steadiness.")))
    return Section(anchor="findings", nav="Findings", title="Findings", question=prose(question), blocks=blocks)


def _none(facts: Facts) -> list[Block]:
    diagnosis = facts.diagnosis
    if diagnosis is None and facts.findings.num_steps:
        if not facts.findings.is_told:
            return []
        steps = count_of(facts.findings.num_steps, "recorded step")
        return [Note(plain(f"No finding above 3 % of a step in {steps}."), good=True)]
    if diagnosis is None:
        return [
            State(
                "Findings come from the phases of all steps, which were not recorded.",
                prose("With `chakra_profile.phases=true` every step is timed, at a cost of microseconds. The sections "
                      "below say what the recorded window shows."),
            )
        ]  # fmt: skip
    verdict = diagnosis.step_time[0]
    steps = count_of(diagnosis.window.num_steps, "step")
    if verdict.kind in ("BALANCED", "COMPUTE_BOUND"):
        lead = f"No finding in {steps}: nothing but compute takes 10 % of a step or of the time between."
        return [Note(plain(f"{lead} {verdict.summary}"), good=True)]
    return [State(verdict.summary, plain(verdict.action))]


def _item(finding: Finding, facts: Facts) -> FindingItem:
    prize = prize_of(finding)
    title = TITLES.get(finding.kind) or finding.kind.replace("_", " ").capitalize()
    text, note, bar = None, None, None
    if prize is not None and prize.share is not None:
        of_what = "of the time of training" if finding.metric == "wall_time" else "of the step"
        if prize.most_ns is not None:
            text, note = saving(prize.most_ns, at_most=prize.at_most), f"{share(prize.share)} {of_what}"
        else:
            text, note = f"up to {share(prize.share)}", of_what
        if prize.at_most:
            note += ", upper bound"
        bar = charts.bar(prize.share, "prize")
    return FindingItem(
        title=plain(title), evidence=_evidence(finding, facts), action=plain(finding.action),
        severity=finding.severity.name, prize_text=text, prize_note=note, bar=bar,
    )  # fmt: skip


def _evidence(finding: Finding, facts: Facts) -> Prose:
    sentences = [finding.summary]
    several = facts.diagnosis is None or facts.diagnosis.window.num_ranks > 1
    if several and finding.ranks and "ank " not in finding.summary:
        sentences.append(f"Most on rank{'s' if len(finding.ranks) > 1 else ''} {ranges(sorted(finding.ranks))}.")
    prize = prize_of(finding)
    if prize is not None and prize.doubt:
        sentences.append(f"{prize.doubt[0].upper()}{prize.doubt[1:].rstrip('.')}.")
    return plain(" ".join(sentences))
