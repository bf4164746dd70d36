"""Whether the numbers can be trusted, what they mean, and how the page was made."""

from importlib.metadata import version

from chakra_capture.report.blocks import Block, Cell, Column, Definitions, Fold, Note, Row, Section, Table, number_cell
from chakra_capture.report.facts import Facts
from chakra_capture.report.quality import Quality
from chakra_capture.report.words import plain, prose, size

_MOST_NOTES = 12
_DEFINITIONS = (
    ("step", "From the request for its first batch to the end of its update; counted from 0."),
    ("profiled step", "A step of the recorded window. The profiler makes small operators on the CPU take longer."),
    ("phase", "A named part of a step on the loop's thread: input wait, h2d, forward, backward, optimizer."),
    ("own time", "The duration without that of what runs inside."),
    ("GPU busy", "Time with at least one kernel, copy or memset on any stream."),
    ("compute", "Time with a kernel that does not communicate."),
    ("exposed communication", "Time with a kernel that communicates while nothing computes."),
    ("exposed copies", "Time with a copy or memset while nothing computes or communicates."),
    ("idle", "Time without any activity on any stream. Compute, exposed communication, exposed copies and idle sum to "
             "the step."),
    ("CPU inside operators", "Idle time until the next launch, while the thread that launches is in an operator."),
    ("CPU between operators", "The same while it is in none: in Python, or in autograd's engine."),
    ("launch latency", "From the end of the launch call to the start of the activity, with nothing queued before it."),
    ("waiting", "Of an operation of all ranks, the time until the last rank it needs had come; transfer is the rest."),
    ("algorithm bandwidth", "Bytes of the full result per rank by the time of transfer."),
    ("bus bandwidth", "The same times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all."),
    ("late", "After half of the other ranks had come, less the time in which the rank waited itself."),
    ("critical path", "From the end of a step back over whatever had to be done last; its parts sum to the step."),
    ("replay", "The run with other durations: what waits for what is derived anew."),
    ("up to", "An upper bound: the trace cannot tell how much of it would really be gained."),
)  # fmt: skip


def section(facts: Facts, quality: Quality) -> Section:
    """The checks, and which sections they limit."""
    columns = (Column(head="check"), Column(head="result"), Column(head="what that means"), Column(head="word"))
    rows = [
        (Cell(text=check.name), Cell(text=check.result), Cell(text=check.effect), Cell(text=str(check.word)))
        for check in quality.checks
    ]
    blocks: list[Block] = [Table(name="quality", columns=columns, rows=rows)]
    blocks += [Note(plain(_sentence(note))) for note in quality.notes[:_MOST_NOTES]]
    if more := quality.notes[_MOST_NOTES:]:
        blocks.append(Fold(f"{len(more)} notes more", tuple(Note(plain(_sentence(note))) for note in more)))
    question = prose(f"Can the numbers be trusted? The word is {quality.word}: the worst of the checks.")
    return Section(anchor="quality", nav="Quality", title="Capture and link quality", question=question, blocks=blocks)


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}{'' if note.endswith('.') else '.'}" if note else note


def definitions(facts: Facts, command: str) -> Section:
    """Every word of the page in one sentence; versions, files."""
    made: list[tuple[str, str]] = [("command", command), ("chakra-capture", version("chakra-capture"))]
    said = {name: value for head in facts.manifests.values() for name, value in head.versions.items() if value}
    made += [(f"{name} of the run", value) for name, value in sorted(said.items()) if name != "chakra_capture"]
    files = [*_files(facts)]
    about = Table(name="made", columns=(Column(head="what"), Column(head="value")),
                  rows=[(Cell(text=name), Cell(text=value)) for name, value in made])  # fmt: skip
    traces = Table(
        name="files",
        title="Trace files",
        rows=files,
        columns=(
            Column(head="rank", kind="number"),
            Column(head="window", kind="number"),
            Column(head="side"),
            Column(head="file", kind="name"),
            Column(head="size", kind="number"),
        ),
    )
    blocks: list[Block] = [
        Fold("What the words mean", (Definitions([(word, prose(text)) for word, text in _DEFINITIONS]),)),
        Fold("How this page was made", (about, traces) if files else (about,)),
    ]
    return Section(
        anchor="definitions",
        nav="",
        title="Definitions",
        question=prose("What do the words mean, and how was this page made?"),
        blocks=blocks,
    )


def _files(facts: Facts) -> list[Row]:
    found: list[Row] = []
    for rank in facts.run.ranks:
        for number, window in enumerate(rank.windows):
            for side, path in (("host", window.host), ("device", window.device)):
                if path is not None and path.is_file():
                    num_bytes = path.stat().st_size
                    found.append(
                        (
                            Cell(text=str(rank.rank), value=rank.rank),
                            Cell(text=str(number), value=number),
                            Cell(text=side),
                            Cell(text=path.name),
                            number_cell(size(num_bytes), num_bytes),
                        )
                    )
    return found
