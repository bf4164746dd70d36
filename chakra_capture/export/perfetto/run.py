"""One trace of all ranks, or one of each: rank after rank, block after block, nothing of it ever held as a whole."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.export.perfetto import flows
from chakra_capture.export.perfetto.cut import Cut, Spans
from chakra_capture.export.perfetto.given import CRITICAL_PATH, HOST, RUN, Made
from chakra_capture.export.perfetto.made import counter_texts, draw
from chakra_capture.export.perfetto.rows import ON_DEVICE, Shown, choose, read_rows, step_spans
from chakra_capture.export.perfetto.slices import slice_texts
from chakra_capture.export.perfetto.tracks import (
    Numbers,
    RankTracks,
    add_rows,
    name_tracks,
    rank_processes,
    run_process,
)
from chakra_capture.export.perfetto.writer import EventFile, event_file
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedRun, MergedTrace, RankClock
from chakra_capture.trace.schema import KINDS

# What a row takes in JSON, as seen on traces with shapes; and with what is made of it, the critical path above all.
BYTES_PER_ROW, WITH_ALL_MADE = 350, 850
Seen = Callable[[str], None]
OfRank = Callable[[MergedTrace], Made]


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported.

    Attributes:
        made: what is shown of a rank beside its rows, worked out when its turn comes.
        of_run: the same of the run.
    """

    run: MergedRun
    traces: Sequence[MergedTrace]
    cut: Cut = field(default_factory=Cut)
    made: OfRank | None = None
    of_run: Made = field(default_factory=Made)


@dataclass(slots=True)
class Written:
    """A file and what is in it.

    Attributes:
        rows: rows of the tables that are slices or instants, by kind.
        samples: rows that are shown by counters.
        without_time: rows that have no time, by kind; not shown.
        made: slices that are made of rows, by category.
        lanes: tracks that need more than one.
    """

    path: Path
    ranks: list[int]
    num_events: int = 0
    num_bytes: int = 0
    num_bytes_unpacked: int = 0
    rows: Tally[str] = field(default_factory=Tally)
    num_clipped: int = 0
    num_outside: int = 0
    num_samples: int = 0
    without_time: Tally[str] = field(default_factory=Tally)
    made: Tally[str] = field(default_factory=Tally)
    arrows: dict[str, flows.Counted] = field(default_factory=dict)
    num_counter_events: int = 0
    lanes: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def estimate(source: Source, *, per_rank: bool) -> int:
    """About how many bytes of JSON all of the rows make."""
    names = [trace.folder / layout.NODES_FILE for trace in source.traces]
    with _readable(source.run.folder):
        rows = [pl.scan_parquet(name, glob=False).select(pl.len()).collect().item() for name in names]
    is_path_shown = source.cut.shows(CRITICAL_PATH) and not per_rank
    return int(sum(rows)) * (WITH_ALL_MADE if is_path_shown else BYTES_PER_ROW)


def export_run(source: Source, path: Path, *, seen: Seen | None = None) -> Written:
    """Write one trace of all ranks.

    Raises:
        TraceFileError: the tables cannot be read, or the file cannot be written.
    """
    return _Export(source, path, seen, own=True).write()


def export_ranks(source: Source, folder: Path, *, seen: Seen | None = None) -> list[Written]:
    """Write a trace of each rank, with its rows and launches alone, as analyses of others expect it."""
    found = []
    for trace in source.traces:
        one = Source(source.run, [trace], source.cut)
        found.append(_Export(one, folder / layout.perfetto_file_name(trace.rank), seen, own=False).write())
    return found


class _Export:
    def __init__(self, source: Source, path: Path, seen: Seen | None, *, own: bool) -> None:
        self._source, self._own = source, own
        self._say: Seen = seen or (lambda _: None)
        self._done = Written(path, [trace.rank for trace in source.traces])
        self._shift = {trace.rank: _shift(source.run.clocks.get(trace.rank)) for trace in source.traces}
        self._ids = flows.Ids()
        self._places = [pl.DataFrame(schema=flows.PLACES)]
        self._spans: list[Spans] = []

    def write(self) -> Written:
        done = self._done
        with _readable(self._source.run.folder):
            first = [_first_ns(trace, self._shift[trace.rank]) for trace in self._source.traces]
            self._base = min((one for one in first if one is not None), default=0)
            most = max((_num_devices(trace) for trace in self._source.traces), default=0)
            self._numbers = Numbers.of(done.ranks, most)
            with event_file(done.path) as file:
                file.begin(self._head())
                for place, trace in enumerate(self._source.traces):
                    self._say(f"exporting rank {trace.rank} ({place + 1} of {len(done.ranks)})")
                    self._rank(file, trace)
                if self._own:
                    self._across(file)
                done.num_events = file.num_events
            done.num_bytes, done.num_bytes_unpacked = done.path.stat().st_size, file.num_bytes
        return done

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": self._base}
        ranks = self._done.ranks
        if len(ranks) == 1:
            head["distributedInfo"] = {"rank": ranks[0]}
        return {**head, "clock_offsets_ns": {str(rank): -shift for rank, shift in self._shift.items()}}

    def _rank(self, file: EventFile, trace: MergedTrace) -> None:
        shift, cut, rank = self._shift[trace.rank], self._source.cut, trace.rank
        rows = read_rows(trace, shift)
        spans = Spans.whole() if cut.steps is None else step_spans(rows, cut.steps)
        spans = spans.within(*(None if at is None else at + self._base for at in (cut.begin_ns, cut.end_ns)))
        self._spans.append(spans)
        shown = choose(rows, cut, spans)
        last = int(shown.end.max(initial=self._base))
        named = name_tracks(shown)
        processes = rank_processes(rank, shown, self._numbers, _clock_label(self._source.run.clocks.get(rank)))
        made = self._source.made(trace) if self._source.made is not None else Made()
        self._done.notes += [*self._unaligned(rank), *made.notes]
        drawn = [
            draw(one, processes.get(one.part, processes[HOST]), spans, shift)
            for one in made.intervals
            if one.rows.height
        ]
        tracks = add_rows(shown, named, processes)
        self._names(file, [*tracks.texts()])
        for one in drawn:
            self._done.made[one.category] += file.add_all(one.texts(self._base))
        file.add_all(slice_texts(shown, tracks, self._base))
        for counter in made.counters:
            process = processes.get(counter.part, processes[HOST])
            count, events = counter_texts(counter, process.pid, spans, shift, (self._base, last))
            file.add(count, events)
            self._done.num_counter_events += count
        self._arrows(file, flows.launch_arrows(shown, tracks))
        if self._own:
            self._arrows(file, flows.backward_arrows(shown, tracks, named.is_engine))
            self._places.append(flows.places_of(rank, shown, tracks, self._wanted(rank)))
        self._count(shown, tracks)

    def _unaligned(self, rank: int) -> Iterator[str]:
        clock = self._source.run.clocks.get(rank)
        if clock is not None and clock.reason is not None:
            yield f"rank {rank} is shown by its own clock, which cannot be compared: {clock.reason}"

    def _wanted(self, rank: int) -> Int64:
        """Rows of a rank that arrows between ranks, or along the path, begin or end at."""
        tables = (self._source.run.collectives, self._source.of_run.path)
        ids = [
            table.filter(pl.col("rank") == rank)["node_id"].drop_nulls().to_numpy()
            for table in tables
            if table is not None
        ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *ids])

    def _across(self, file: EventFile) -> None:
        """What concerns all ranks: its tracks, and the arrows between ranks."""
        process, made = run_process(self._numbers), self._source.of_run
        self._done.notes += made.notes
        spans = self._all_spans()
        drawn = [draw(one, process, spans, 0) for one in made.intervals if one.part == RUN and one.rows.height]
        self._names(file, process.texts)
        for one in drawn:
            self._done.made[one.category] += file.add_all(one.texts(self._base))
        places = pl.concat(self._places)
        if self._source.run.collectives is not None:
            self._arrows(file, flows.collective_arrows(self._source.run.collectives, places))
        if made.path is not None:
            self._arrows(file, flows.path_arrows(made.path, places))

    def _all_spans(self) -> Spans:
        both = [np.concatenate([getattr(one, side) for one in self._spans]) for side in ("start", "end")]
        return Spans.of(*both)

    def _arrows(self, file: EventFile, arrows: flows.Arrows) -> None:
        file.add_all(arrows.texts(self._ids, self._base))
        before = self._done.arrows.get(arrows.kind, flows.Counted())
        self._done.arrows[arrows.kind] = before + arrows.counted

    def _names(self, file: EventFile, texts: list[str]) -> None:
        file.add(len(texts), ",\n".join(texts))

    def _count(self, shown: Shown, tracks: RankTracks) -> None:
        done, kind = self._done, shown.rows.kind[shown.row]
        counts = np.bincount(kind, minlength=len(KINDS)).tolist()
        samples = counts[KINDS.index("memory")]
        done.rows.update({name: count for name, count in zip(KINDS, counts, strict=True) if count and name != "memory"})
        done.num_samples += samples
        done.num_clipped += int(np.count_nonzero(shown.is_cut & shown.is_slice))
        done.num_outside += shown.num_outside
        done.without_time.update(shown.without_time)
        done.lanes += [(name, lanes) for name, lanes in zip(tracks.names, shown.num_lanes, strict=True) if lanes > 1]


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what polars raises of damaged or missing tables into one sentence."""
    try:
        yield
    except (FileNotFoundError, pl.exceptions.PolarsError) as error:
        why = str(error).strip().partition("\n")[0]
        raise TraceFileError(f"the tables in {folder} cannot be read ({why}). Merge it again.") from error


def _shift(clock: RankClock | None) -> int:
    """What is to be added to the times of a rank; those of a clock that cannot be compared stay."""
    return 0 if clock is None or clock.reason is not None else -(clock.offset_ns or 0)


def _clock_label(clock: RankClock | None) -> str:
    if clock is None or clock.reason is not None:
        return "clock not aligned"
    return f"clock offset {clock.offset_ns or 0} ns"


def _first_ns(trace: MergedTrace, shift_ns: int) -> int | None:
    """When the first row of a rank begins."""
    on_device = pl.col("kind").cast(pl.String).is_in(ON_DEVICE)
    table = pl.scan_parquet(trace.folder / layout.NODES_FILE, glob=False)
    firsts = table.group_by("window", on_device.alias("on_device")).agg(pl.col("ts_ns").min()).collect()
    offsets = trace.clock_offsets
    found = [
        ts + shift_ns + ((offsets.get(window) or 0) if device else 0)
        for window, device, ts in firsts.select("window", "on_device", "ts_ns").iter_rows()
        if ts is not None
    ]
    return min(found, default=None)


def _num_devices(trace: MergedTrace) -> int:
    rows = pl.scan_parquet(trace.folder / layout.NODES_FILE, glob=False)
    of_device = rows.filter(pl.col("kind").cast(pl.String).is_in(ON_DEVICE))
    return int(of_device.select(pl.coalesce("device", "pid").n_unique()).collect().item())
