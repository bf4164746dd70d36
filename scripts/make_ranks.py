"""Write a run of many ranks, made from the traces of one real rank, with faults of our choice in it.

    python scripts/make_ranks.py OUT --ranks 8 --steps 12 --clock-offsets 50 --drift-ppm 50 --straggler 3:1.3
    python scripts/make_ranks.py OUT --ranks 64 --size 5            64 ranks of 5 MB
    python scripts/make_ranks.py OUT --ranks 1000 --tiny            1000 small ranks
    python scripts/make_ranks.py OUT --ranks 8 --fault truncate:1 --fault no-device:2 --fault other-run:3

The ranks run the program of the real one again (scripts/ranks_replay.py): each does its own work, a little noisy, and
no member leaves a collective before the last has arrived. What was planted, and when every rank really arrived at and
left every collective, stands in OUT/truth.json; nothing else in OUT says it. The same seed gives the same files.

Faults (KIND:RANK): truncate, no-device, other-process (the device trace of another process), other-run (all of its
files are of another run), copy-of-neighbour (the files of the rank before it), mismatch (one collective of another
size), missing-collective (the last one), missing-rank, extra-rank (a rank of that number that the run does not have).

A tensor keeps its id from one repetition of the steps to the next. Of a gloo trace the operations name no group.
"""

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from isal import igzip
from ranks_replay import Plan, Repetition, Replay, Straggler
from ranks_source import Kind, Source, SourceError, Template, load_source

from chakra_capture.layout import RunPaths
from chakra_capture.recording.manifest import ClockAnchor, CycleRecord, Manifest, Reason

SAMPLE = Path(__file__).resolve().parents[1] / "traces" / "digits_ddp2_gloo"
FAULTS = (
    "truncate", "no-device", "other-process", "other-run", "copy-of-neighbour", "mismatch", "missing-collective",
    "missing-rank", "extra-rank",
)  # fmt: skip
_TRUNCATED_RANKS = 30  # longer lists of ranks are cut by torch: "[0, 1, ..., 29, ...]"
_RESIZED = ("all_gather", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as its members know it."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def ranks_text(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_TRUNCATED_RANKS]))
        return f"[{shown}, ...]" if len(self.ranks) > _TRUNCATED_RANKS else f"[{shown}]"


@dataclass(frozen=True, slots=True)
class Clock:
    """How far the clock of a rank is off: ``offset_ns`` at the start of the run, growing by ``drift_ppm``."""

    offset_ns: int
    drift_ppm: float

    def read(self, true: Any) -> Any:
        """What the clock shows at these times, whole ns."""
        return np.rint(true * (1 + self.drift_ppm * 1e-6)).astype(np.int64) + self.offset_ns


class Writer:
    """Writes ranks of one run."""

    def __init__(self, source: Source, replay: Replay, settings: argparse.Namespace, clocks: list[Clock]) -> None:
        self.source, self.replay, self.settings, self.clocks = source, replay, settings, clocks
        self.paths = RunPaths(settings.out, settings.job)
        self.groups = _groups(settings.ranks, settings.mesh)
        self.filled = {id(t): _Filled(t) for t in (source.events, source.once, source.nodes, source.node_roots)}
        self.run_id = _hex(settings.seed, "run")

    def write(self, rank: int, *, of: int | None = None, pid_of_device: int = 0) -> None:
        """Write the files of a rank.

        Args:
            of: rank whose life it leads; default its own.
            pid_of_device: added to the pid of the device trace.
        """
        life = rank if of is None else of
        pid = self.pid(rank)
        device, last_ns = self._device(rank, life, pid + pid_of_device)
        texts = [(self._device_path(rank), device)]
        if self.source.nodes.pieces:
            texts.append((self._host_path(rank), self._host(rank, life, pid)))
        for path, text in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = text.encode()
            path.write_bytes(igzip.compress(data, 1, mtime=0) if self.settings.compress else data)
        self._manifest(rank, life, pid, last_ns)

    def pid(self, rank: int) -> int:
        return 20_000 + 64 * (rank % 4096) + self.settings.seed % 50

    def _host_path(self, rank: int) -> Path:
        return self.paths.host_trace(rank, compress=self.settings.compress)

    def _device_path(self, rank: int) -> Path:
        return self.paths.device_trace(rank, compress=self.settings.compress)

    # Texts.

    def _device(self, rank: int, life: int, pid: int) -> tuple[str, int]:
        clock, source = self.clocks[life], self.source
        pieces, first, last = [], None, 0
        for number, repetition in enumerate(self.replay.repetitions):
            starts, ends = _times(source, self.replay, repetition, life)
            starts, ends = clock.read(starts) + source.zero_ns, clock.read(ends) + source.zero_ns
            first = int(starts.min()) if first is None else first
            last = int(ends.max())
            pieces.append(self._fill(source.events, life, number, pid, starts, ends, ",\n"))
        around = np.array([first, last + 5000]), np.array([last + 5000, last + 5000])
        pieces.append(self._fill(source.once, life, 0, pid, *around, ",\n"))
        head = dict(source.head)
        head["distributedInfo"] = self._distributed(rank)
        head["host_name"] = self.host_name(rank)
        head["traceName"] = str(self._device_path(rank).relative_to(self.settings.out))
        if "trace_id" in head:
            head["trace_id"] = _hex(self.settings.seed, f"trace {rank}", 32).upper()
        text = json.dumps(head)[:-1] + ',"traceEvents":[\n' + ",\n".join(pieces) + "\n]}"
        return text, last + 5000

    def _host(self, rank: int, life: int, pid: int) -> str:
        nothing = np.zeros(0, np.int64)
        pieces = [self._fill(self.source.node_roots, life, 0, pid, nothing, nothing, ",\n")]
        for number in range(len(self.replay.repetitions)):
            pieces.append(self._fill(self.source.nodes, life, number, pid, nothing, nothing, ",\n"))
        head = dict(self.source.host_head, pid=pid)
        return json.dumps(head)[:-1] + ',"nodes":[\n' + ",\n".join(pieces) + "\n]}"

    def _fill(self, template: Template, rank: int, number: int, pid: int, starts: Any, ends: Any, between: str) -> str:
        fill = self.filled[id(template)]
        fmt, chosen = fill.format(between), slice(None)
        if rank in self.settings.faulty("missing-collective") and number == len(self.replay.repetitions) - 1:
            fmt, chosen = fill.without(len(self.source.operations) - 1, between)
        kinds, values = fill.kinds[chosen], fill.values[chosen] + fill.growth[chosen] * number
        values[kinds == Kind.pid] += pid
        for kind, array, part in (
            (Kind.start_us, starts, "us"), (Kind.start_ns, starts, "ns"),
            (Kind.dur_us, ends - starts, "us"), (Kind.dur_ns, ends - starts, "ns"),
        ):  # fmt: skip
            at = kinds == kind
            values[at] = array[values[at]] // 1000 if part == "us" else array[values[at]] % 1000
        filled: list[Any] = values.tolist()
        for at in np.flatnonzero(kinds >= Kind.group_name).tolist():
            filled[at] = self._of_operation(template, int(kinds[at]), filled[at], rank, number)
        return fmt % tuple(filled)

    def _of_operation(self, template: Template, kind: int, value: int, rank: int, number: int) -> Any:
        operations = self.source.operations
        if kind == Kind.elements:
            k, count = template.sizes[value]
            last = number == len(self.replay.repetitions) - 1
            planted = rank in self.settings.faulty("mismatch") and last and k == len(operations) // 2
            return count + 8 if planted else count
        if value < 0:
            return json.dumps(self._group_text(rank))[1:-1]
        dims = len(self.settings.mesh)
        group = self._group_of(rank, value)
        same = [k for k in range(len(operations)) if k % dims == value % dims]
        return {
            Kind.group_name: group.name, Kind.group_desc: group.description, Kind.group_ranks: group.ranks_text,
            Kind.group_size: len(group.ranks), Kind.group_first: group.ranks[0],
            Kind.seq: 1 + number * len(same) + same.index(value),
        }[Kind(kind)]  # fmt: skip

    def _group_of(self, rank: int, operation: int) -> Group:
        return self.groups[rank][operation % len(self.settings.mesh) + (len(self.settings.mesh) > 1)]

    def _group_text(self, rank: int) -> str:
        backend = self._backend()
        return json.dumps([
            {"pg_name": g.name, "pg_desc": g.description, "backend_config": backend,
             "ranks": [] if len(g.ranks) == self.settings.ranks else list(g.ranks), "group_size": len(g.ranks),
             "group_count": len(self.groups[rank])} for g in self.groups[rank]
        ])  # fmt: skip

    def _backend(self) -> str:
        config = (self.source.head.get("distributedInfo") or {}).get("pg_config") or [{}]
        return str(config[0].get("backend_config", "cpu:gloo,cuda:nccl"))

    def _distributed(self, rank: int) -> dict[str, Any]:
        groups = self.groups[rank % self.settings.ranks]
        config = [
            {"pg_name": g.name, "pg_desc": g.description, "backend_config": self._backend(), "pg_size": len(g.ranks),
             "ranks": list(g.ranks)} for g in groups
        ]  # fmt: skip
        stated = dict(self.source.head.get("distributedInfo") or {"backend": "nccl"})
        return {**stated, "rank": rank, "world_size": self.settings.ranks, "pg_count": len(groups), "pg_config": config}

    def host_name(self, rank: int) -> str:
        return f"node{rank // self.settings.ranks_per_host:04d}"

    def _manifest(self, rank: int, life: int, pid: int, last_ns: int) -> None:
        base = int(self.source.head.get("baseTimeNanoseconds") or 0)
        begin = base + self.source.zero_ns + self.clocks[life].offset_ns
        end = base + last_ns
        # The host trace states its start on the monotonic clock.
        start = int(self.source.host_head.get("start_ts") or 0) * 10**6
        anchors = [ClockAnchor(at, at - begin + start) for at in (begin, end)]
        steps = _steps(self.source, len(self.replay.repetitions))
        cycle = CycleRecord(0, steps[0], steps[-1], 0, 1, steps[0], steps[-1], steps=steps)
        for side, path in (("host", self._host_path(rank)), ("device", self._device_path(rank))):
            if path.exists():
                setattr(cycle, f"{side}_trace", str(path.relative_to(self.settings.out)))
                setattr(cycle, f"{side}_bytes", path.stat().st_size)
        cycle.reason, (cycle.started, cycle.ended) = Reason.complete, anchors
        manifest = Manifest(
            self.run_id, self.settings.job, rank, self.settings.ranks, {"enabled": True}, {"torch": "generated"},
            complete=True, reason=Reason.complete, windows=[cycle], pid=pid, hostname=self.host_name(rank),
            opened=anchors[0], written=anchors[1],
        )  # fmt: skip
        self.paths.run_dir.mkdir(parents=True, exist_ok=True)
        self.paths.manifest(rank).write_text(json.dumps(asdict(manifest), indent=1))
        self.paths.claim.write_text(json.dumps({"run_id": _hex(self.settings.seed, "run")}))


class _Filled:
    """A template made ready: one format string, arrays of its holes."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.kinds = np.array(template.kinds, np.int64)
        self.values = np.array(template.values, np.int64)
        self.growth = np.array(template.growth, np.int64)
        self._whole: str | None = None

    def format(self, between: str) -> str:
        if self._whole is None:
            self._whole = between.join(self.template.pieces)
        return self._whole

    def without(self, operation: int, between: str) -> tuple[str, Any]:
        """The format, and which holes are left, without what is all about one operation."""
        template, kept, chosen, begin = self.template, [], [], 0
        for piece, owner, end in zip(template.pieces, template.owners, template.ends, strict=True):
            if owner != operation:
                kept.append(piece)
                chosen += range(begin, end)
            begin = end
        return between.join(kept), np.array(chosen, np.int64)


def _times(source: Source, replay: Replay, repetition: Repetition, rank: int) -> tuple[Any, Any]:
    """Start and end of every event of one repetition on one rank, on the true clock."""
    at, host = np.array(repetition.host_at, np.float64), np.array([h[rank] for h in repetition.host])
    starts, ends = np.interp(source.starts, at, host), np.interp(source.ends, at, host)
    points: dict[Any, list[tuple[float, float]]] = {}
    for event, begin in repetition.activity_starts.items():
        end = repetition.activity_ends[event][rank]
        of = points.setdefault(source.tracks[event], [])
        of += [(float(source.starts[event]), begin[rank]), (float(source.ends[event]), end)]
    for k, operation in enumerate(source.operations):
        of = points.setdefault(operation.track, [])
        of += [
            (float(operation.start), repetition.arrivals[k][rank]), (float(operation.end), repetition.ends[k][rank])
        ]  # fmt: skip
    tracks: dict[Any, list[int]] = {}
    for number, track in enumerate(source.tracks):
        tracks.setdefault(track, []).append(number)
    for track, known in points.items():
        known.sort()
        xs, ys = np.array([p[0] for p in known]), np.maximum.accumulate(np.array([p[1] for p in known]))
        chosen = np.array(tracks[track])
        for array, of_source in ((starts, source.starts), (ends, source.ends)):
            array[chosen] = np.interp(of_source[chosen], xs, ys)
    return starts, np.maximum(ends, starts)


def _groups(num_ranks: int, mesh: "dict[str, int]") -> list[list[Group]]:
    """The groups of each rank: all ranks, then one for each dimension of the mesh."""
    world = Group("0", "default_pg", tuple(range(num_ranks)))
    groups = [[world] for _ in range(num_ranks)]
    if len(mesh) < 2:
        return groups
    numbers, name = np.arange(num_ranks).reshape(tuple(mesh.values())), 1
    for axis, dimension in enumerate(mesh):
        for members in np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis]):
            group = Group(str(name), f"mesh_{dimension}", tuple(members.tolist()))
            name += 1
            for rank in group.ranks:
                groups[rank].append(group)
    return groups


def _steps(source: Source, repeats: int) -> list[int]:
    count = len(source.steps)
    return [step + number * count for number in range(repeats) for step in source.steps]


def _hex(seed: int, what: str, digits: int = 16) -> str:
    words = np.random.default_rng([seed, *what.encode()]).integers(0, 16, digits)
    return "".join(f"{word:x}" for word in words)


def make_run(settings: argparse.Namespace) -> dict[str, Any]:
    """Write the run and return the truth about it."""
    source = load_source(settings.host, settings.device, tiny=settings.tiny)
    sized = sorted({o.name for o in source.operations if o.name in _RESIZED})
    was = (source.head.get("distributedInfo") or {}).get("world_size")
    if sized and was != settings.ranks:
        raise SourceError(f"the trace has {sized[0]}, whose sizes go with the number of ranks ({was}). Give --ranks "
                          f"{was}, or a trace without it.")  # fmt: skip
    repeats = _repeats(source, settings)
    clocks = _clocks(settings)
    absent = next(iter(settings.faulty("missing-collective")), None)
    plan = Plan(
        settings.ranks, repeats, settings.seed, settings.jitter, tuple(settings.mesh.values()),
        {rank: ms * 1e6 for rank, ms in settings.skew}, tuple(settings.straggler),
        settings.transfer_us * 1e3 if settings.transfer_us else None, absent,
    )  # fmt: skip
    replay = Replay(source, plan)
    settings.out.mkdir(parents=True, exist_ok=True)
    writer = Writer(source, replay, settings, clocks)
    _write_ranks(writer, settings)
    truth = _truth(source, replay, writer, settings)
    (settings.out / "truth.json").write_text(json.dumps(truth))
    return truth


def _clocks(settings: argparse.Namespace) -> list[Clock]:
    """The clock of each rank: that of its host."""
    rng = np.random.default_rng([settings.seed, 1])
    stated = {rank // settings.ranks_per_host: clock for rank, clock in settings.clock.items()}
    clocks = []
    for host in range(math.ceil(settings.ranks / settings.ranks_per_host)):
        random = rng.uniform(-1, 1, 2) * (settings.clock_offsets, settings.drift_ppm) * (host > 0)
        offset_ms, drift_ppm = stated.get(host, random)
        clocks.append(Clock(round(float(offset_ms) * 1e6), float(drift_ppm)))
    return [clocks[rank // settings.ranks_per_host] for rank in range(settings.ranks)]


def _repeats(source: Source, settings: argparse.Namespace) -> int:
    per_unit = max(1, len(source.steps))
    wanted = math.ceil(settings.steps / per_unit)
    if settings.size:
        bytes_per_unit = sum(len(p) + 8 for t in (source.events, source.nodes) for p in t.pieces)
        wanted = max(wanted, math.ceil(settings.size * 1e6 / bytes_per_unit))
    return max(1, wanted)


def _write_ranks(writer: Writer, settings: argparse.Namespace) -> None:
    missing = settings.faulty("missing-rank")
    for rank in range(settings.ranks):
        if rank in missing:
            continue
        other = 7 if rank in settings.faulty("other-process") else 0
        writer.run_id = _hex(settings.seed, "another run" if rank in settings.faulty("other-run") else "run")
        writer.write(rank, pid_of_device=other)
    writer.run_id = _hex(settings.seed, "run")
    for rank in settings.faulty("extra-rank"):
        writer.write(rank, of=0)
    for rank in settings.faulty("truncate"):
        for path in (writer._device_path(rank),):
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.6)])
    for rank in settings.faulty("no-device"):
        writer._device_path(rank).unlink()
    for rank in settings.faulty("copy-of-neighbour"):
        shutil.copyfile(writer._device_path(rank - 1), writer._device_path(rank))
        shutil.copyfile(writer._host_path(rank - 1), writer._host_path(rank))


def _truth(source: Source, replay: Replay, writer: Writer, settings: argparse.Namespace) -> dict[str, Any]:
    operations = []
    for number, repetition in enumerate(replay.repetitions):
        for k, operation in enumerate(source.operations):
            for members in _member_sets(writer, k, settings):
                there = [r for r in members if not (replay.is_absent(number, k) and r == replay.plan.absent)]
                operations.append({
                    "name": operation.name, "group": writer._group_of(members[0], k).name, "ranks": there,
                    "repetition": number, "operation": k,
                    "arrival_ns": [round(repetition.arrivals[k][r]) for r in there],
                    "end_ns": [round(repetition.ends[k][r]) for r in there],
                })  # fmt: skip
    return {
        "num_ranks": settings.ranks,
        "steps": _steps(source, len(replay.repetitions)),
        "zero_ns": int(source.head.get("baseTimeNanoseconds") or 0) + source.zero_ns,
        "clock_offset_ns": [clock.offset_ns for clock in writer.clocks],
        "clock_drift_ppm": [clock.drift_ppm for clock in writer.clocks],
        "skew_ms": dict(settings.skew),
        "stragglers": [asdict(s) for s in settings.straggler],
        "faults": [list(fault) for fault in settings.fault],
        "operations": operations,
    }


def _member_sets(writer: Writer, k: int, settings: argparse.Namespace) -> list[tuple[int, ...]]:
    return sorted({writer._group_of(rank, k).ranks for rank in range(settings.ranks)})


class _Settings(argparse.Namespace):
    """The options."""

    def faulty(self, kind: str) -> list[int]:
        return [rank for what, rank in self.fault if what == kind]


def _straggler(text: str) -> Straggler:
    rank, factor, *where = text.split(":", 2)
    return Straggler(int(rank), float(factor), where[0] if where else None)


def _skew(text: str) -> tuple[int, float]:
    rank, ms = text.split(":")
    return int(rank), float(ms)


def _clock(text: str) -> tuple[int, tuple[float, float]]:
    rank, offset, *drift = text.split(":")
    return int(rank), (float(offset), float(drift[0]) if drift else 0.0)


def _fault(text: str) -> tuple[str, int]:
    kind, rank = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"{kind!r} is no fault; there are {', '.join(FAULTS)}")
    return kind, int(rank)


def _mesh(text: str) -> "dict[str, int]":
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


def parse(argv: list[str] | None = None) -> _Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--host", type=Path, help="host trace; none where --device is given alone")
    parser.add_argument("--device", type=Path, help="device trace; default: a pair of traces/")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks of a host share its clock")
    parser.add_argument("--steps", type=int, default=1, help="at least as many; the recorded ones are repeated")
    parser.add_argument("--size", type=float, help="MB of each rank, both files, before compression; at least")
    parser.add_argument("--tiny", action="store_true", help="the last step alone, and only ops that are in no other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jitter", type=float, default=0.01, help="spread of own work between two meetings (0.01: 1 %%)"
    )
    parser.add_argument("--transfer-us", type=float, help="time of a collective after the last arrival; default: the "
                        "shortest time of its kind and size in the real trace")  # fmt: skip
    parser.add_argument("--skew", type=_skew, action="append", default=[], metavar="RANK:MS")
    parser.add_argument("--straggler", type=_straggler, action="append", default=[], metavar="RANK:FACTOR[:NAME]",
                        help="own work slower by FACTOR, or only within what is called NAME")  # fmt: skip
    parser.add_argument(
        "--clock",
        type=_clock,
        action="append",
        default=[],
        metavar="RANK:OFFSET_MS[:DRIFT_PPM]",
        help="of the host of this rank",
    )
    parser.add_argument(
        "--clock-offsets", type=float, default=0, metavar="MS", help="random, to this; the host of rank 0 has none"
    )
    parser.add_argument("--drift-ppm", type=float, default=0, help="random, to this; the host of rank 0 has none")
    parser.add_argument("--mesh", type=_mesh, default={}, metavar="dp=2,tp=4",
                        help="the collectives go through the groups of these dimensions in turn")  # fmt: skip
    parser.add_argument("--fault", type=_fault, action="append", default=[], metavar="KIND:RANK")
    parser.add_argument("--job", default="0")
    parser.add_argument("--compress", action="store_true")
    settings = parser.parse_args(argv, namespace=_Settings())
    if settings.device is None:
        if settings.host is not None:
            parser.error("a host trace has no times: give its --device trace, too")
        settings.host, settings.device = (SAMPLE / f"0_{part}" / "rank-0.json.gz" for part in ("chakra", "kineto"))
    settings.clock = dict(settings.clock)
    settings.mesh = settings.mesh or {"": settings.ranks}
    if math.prod(settings.mesh.values()) != settings.ranks or (len(settings.mesh) > 1 and 1 in settings.mesh.values()):
        parser.error("the sizes of --mesh must be 2 or more and multiply to --ranks")
    named = [r for r, _ in settings.skew] + [s.rank for s in settings.straggler] + list(settings.clock)
    named += [rank for kind, rank in settings.fault if kind != "extra-rank"]
    if any(not 0 <= rank < settings.ranks for rank in named):
        parser.error(f"a rank that is named is not among 0 to {settings.ranks - 1}")
    if ("copy-of-neighbour", 0) in settings.fault or any(r < settings.ranks for r in settings.faulty("extra-rank")):
        parser.error("rank 0 has no neighbour before it, and an extra rank is none of the run's")
    return settings


def main() -> int:
    settings = parse()
    try:
        truth = make_run(settings)
    except (SourceError, ValueError) as error:
        print(f"make_ranks: {error}", file=sys.stderr)
        return 1
    files = settings.out.glob(f"{settings.job}_*/rank-*.json*")
    size = sum(path.stat().st_size for path in files)
    print(f"{settings.ranks} ranks, {len(truth['steps'])} steps, {size / 1e6:.1f} MB in {settings.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
