"""The analyses of what is recorded only when it is asked for, as commands: allocations, modules, types."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, number_ranges, percent
from chakra_capture.cli.subject import DEFAULTS, Options, Subject, notes_on_devices, open_subject

_ALLOCATIONS = (
    ("rank", "rank"), ("window", "window"), ("allocator", "memory"), ("peak_bytes", "peak"),
    ("peak_reserved_bytes", "reserved"), ("growth_bytes", "growth"), ("num_allocations", "allocations"),
    ("allocated_bytes", "allocated"), ("top_op", "most by"),
)  # fmt: skip
_TIMELINE = (
    ("rank", "rank"), ("window", "window"), ("allocator", "memory"), ("since_ns", "at"), ("bytes", "bytes"),
    ("in_use_bytes", "in use"), ("reserved_bytes", "reserved"), ("op", "op"), ("phase", "phase"),
)  # fmt: skip
_MODULES = (
    ("module", "module"), ("count", "calls"), ("total_ns", "total"), ("self_ns", "self"),
    ("device_total_ns", "device"), ("backward_ns", "backward"), ("backward_device_ns", "dev. backward"),
)  # fmt: skip
_SPOTTED = (
    ("rank", "rank"), ("what", "what"), ("name", "name"), ("count", "count"), ("cpu_ns", "CPU"), ("cpu_share", "share"),
    ("device_ns", "device"), ("device_share", "share"),
)  # fmt: skip
_NOT_MEASURED = {
    "recompute": "no op has a sequence number",
    "dtype conversion": "the types of inputs are not recorded, record with record_shapes: true",
}
_Flag = Annotated[bool, Parameter(negative=())]
_Many = Parameter(negative=(), consume_multiple=True)


def _positive(_: object, value: object) -> None:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{value} shows nothing; give 1 or more.")


def allocations(
    path: Path,
    /,
    *,
    by: Annotated[tuple[Literal["step", "phase", "op"], ...], _Many] = (),
    timeline: _Flag = False,
    options: Options = DEFAULTS,
) -> int:
    """Memory of host and devices: peaks, what grows, which op allocates most.

    Recorded with profile_memory: true. One row per rank and allocator; --by
    makes rows of their own. The peak is the most that was in use at once right
    before or after an allocation or release: of a device all memory of the
    process, of the host (cpu) what was allocated since the recording began.
    Reserved is what a caching allocator holds. An allocation belongs to the
    outermost op around it, one in backward to the function of backward.

    --timeline shows every allocation and release, with what is in use after
    it. Copies between memories are in analyze memory.

    Examples:
        chakra-capture analyze allocations ./traces
        chakra-capture analyze allocations ./traces --by step phase
        chakra-capture analyze allocations ./traces --by op --limit 40
        chakra-capture analyze allocations ./traces --timeline --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    by
        step, phase, op: what makes rows of their own.
    timeline
        Show what is in use over time.
    """
    from chakra_capture.analysis.allocations import SCHEMA, TIMELINE, allocation_statistics, allocation_timeline

    subject = open_subject(path, options)
    if timeline:
        table, schema = allocation_timeline(subject.traces, steps=subject.steps), list(TIMELINE)
    else:
        table, schema = allocation_statistics(subject.traces, by=by, steps=subject.steps), list(SCHEMA)
    screen = _TIMELINE if timeline else (*_ALLOCATIONS[:3], *((key, key) for key in by), *_ALLOCATIONS[3:])
    there = set(table["rank"].to_list())
    missing = [trace.rank for trace in subject.traces if trace.rank not in there]
    notes = (*subject.notes, *_missing(subject, missing, "allocations", "profile_memory"))
    return _show(Answer("allocations", tuple(schema), table, notes, screen), options)


def modules(
    path: Path,
    /,
    *,
    depth: Annotated[int | None, Parameter(validator=_positive)] = None,
    by: Annotated[tuple[Literal["rank"], ...], _Many] = (),
    options: Options = DEFAULTS,
) -> int:
    """The model's modules as a tree: time on the CPU and on the device.

    Recorded with with_stack: true. Total is the time of a module's calls in
    forward, self the same less that of modules inside it; device time is that
    of the activities launched meanwhile. Backward runs in no module: a
    function of backward counts to the module its forward op ran in. What
    activation checkpointing runs again in backward is a tree of its own. The
    recorded stack makes Python several times as slow: read times as shares.

    For example:
        chakra-capture analyze modules ./traces --depth 2
        chakra-capture analyze modules ./traces --rank 0 --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    depth
        Levels of the tree to show; default: all.
    by
        rank: a tree for each.
    """
    import polars as pl

    from chakra_capture.analysis.modules import SCHEMA, has_modules, module_tree

    subject = open_subject(path, options)
    table = module_tree(subject.traces, by=by, steps=subject.steps, depth=depth)
    missing = [trace.rank for trace in subject.traces if not has_modules(trace)]
    notes = (*notes_on_devices(subject), *_missing(subject, missing, "modules", "with_stack"))
    if not options.json:
        indent = pl.lit("  ").repeat_by("depth").list.join("")
        table = table.with_columns(module=indent + pl.col("module"))
    screen = (*((key, key) for key in by), *_MODULES)
    return _show(Answer("modules", SCHEMA, table, notes, screen), options)


def spotted(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Recomputed forward, dtype conversions, launches by graphs.

    Per rank a row for all of a kind, then by name. Recompute is forward run
    again in backward (activation checkpointing): ops there that take part in
    no gradient of their own. Conversions are copies from one type to another;
    under autocast some are normal. Of what a CUDA or HIP graph launches no op
    can be told. Shares are of the recorded steps (CPU) and of all device time;
    one thing may be of two kinds. What is not measured is "-", never 0.

    For example:
        chakra-capture analyze spotted ./traces
        chakra-capture analyze spotted ./traces --rank 0 --step 5-8 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    import polars as pl

    from chakra_capture.analysis import spotted as analysis

    subject = open_subject(path, options)
    table = analysis.spotted(subject.traces, steps=subject.steps)
    notes = list(notes_on_devices(subject))
    for what, why in _NOT_MEASURED.items():
        ranks = table.filter((pl.col("what") == what) & pl.col("count").is_null())["rank"].to_list()
        if ranks:
            notes.append(f"{what} is not measured on rank {number_ranges(ranks)}: {why}")
    again = table.filter((pl.col("what") == analysis.RECOMPUTE) & pl.col("name").is_null() & (pl.col("count") > 0))
    for rank, share in again.select("rank", "backward_share").rows():
        notes.append(f"{percent(share, 1)} of the time of backward of rank {rank} is forward run again")
    return _show(Answer("spotted", analysis.SCHEMA, table, tuple(notes), _SPOTTED), options)


def _missing(subject: Subject, missing: list[int], what: str, setting: str) -> list[str]:
    """Which ranks have not recorded what is asked for, and how to."""
    # Within some steps there may be none though they are recorded.
    where = "" if subject.steps is None else " in these steps"
    ranks = number_ranges(missing)
    return [f"rank {ranks}: {what} not recorded{where}, record with {setting}: true"] if missing else []


def _show(answer: Answer, options: Options) -> int:
    show_answer(answer, limit=options.limit, as_json=options.json)
    return EXIT_OK
