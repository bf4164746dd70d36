"""Parts of the Perfetto export against readings by definition: clipping, numbers as text, arrows of collectives."""

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.export.perfetto.cut import Spans
from chakra_capture.export.perfetto.flows import COLLECTIVE, PLACES, Counted, Ids, collective_arrows
from chakra_capture.export.perfetto.given import Counter
from chakra_capture.export.perfetto.made import counter_texts
from chakra_capture.export.perfetto.texts import encoded, us
from chakra_capture.export.perfetto.tracks import Numbers
from chakra_capture.trace.schema import COLLECTIVES
from export.perfetto_reader import ns

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6)


@given(PAIRS, PAIRS)
def test_a_slice_is_cut_to_the_first_and_the_last_stretch_that_it_is_in(stretches, slices):
    begins, lengths = (np.array([one[at] for one in stretches], dtype=np.int64) for at in (0, 1))
    spans = Spans.of(begins, begins + lengths)
    begin, length = (np.array([one[at] for one in slices], dtype=np.int64) for at in (0, 1))
    clipped = spans.clip(begin, begin + length)
    inside = {t for start, size in stretches for t in range(start, start + size)}
    for at, (start, size) in enumerate(slices):
        # A slice of no length is the instant at which it begins.
        mine = [t for t in range(start, start + max(size, 1)) if t in inside]
        assert bool(clipped.kept[at]) == bool(mine)
        if mine:
            low, high = mine[0], mine[-1] + 1 if size else start
            assert (clipped.begin[at], clipped.end[at]) == (low, high)
            assert bool(clipped.is_cut[at]) == ((low, high) != (start, start + size))


@given(st.lists(st.integers(0, 2**60), max_size=5))
def test_times_are_written_to_the_ns(times):
    frame = pl.DataFrame({"t": times}, schema={"t": pl.Int64})
    texts = frame.select(pl.concat_str(us(pl.col("t")))).to_series().to_list()
    assert [ns(text) for text in texts] == times
    assert all(len(text.split(".")[1]) == 3 for text in texts)


@given(st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=5), max_size=6))
def test_texts_are_json(texts):
    made = encoded(pl.Series("n", texts, dtype=pl.String)).to_list()
    assert [None if text is None else json.loads(text) for text in made] == texts


def collectives(ranks: dict[int, int], *, last: int, number: int = 0) -> pl.DataFrame:
    """One operation: of each rank its wait; node_id is the rank."""
    rows = [
        {
            "collective_id": number, "rank": rank, "node_id": rank, "num_ranks": len(ranks), "num_found": len(ranks),
            "wait_ns": wait, "last_rank": last,
        }
        for rank, wait in ranks.items()
    ]  # fmt: skip
    return pl.DataFrame(rows, schema_overrides=COLLECTIVES.schema).select(
        (pl.col(name) if name in rows[0] else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in COLLECTIVES.schema.items()
    )


def places(ranks: dict[int, tuple[int, int]]) -> pl.DataFrame:
    rows = [(rank, rank, rank * 10, 1000 + rank, begin, end) for rank, (begin, end) in ranks.items()]
    return pl.DataFrame(rows, schema=PLACES, orient="row")


def test_every_other_rank_gets_an_arrow_from_the_one_that_came_last():
    found = collective_arrows(collectives({0: 30, 1: 20, 2: 0}, last=2), places({0: (0, 50), 1: (10, 51), 2: (30, 50)}))
    assert found.kind == COLLECTIVE
    rows = found.table.select("tid", "ts", "tid_to", "ts_to").rows()
    assert rows == [(1002, 30, 1000, 30), (1002, 30, 1001, 30)]
    assert found.counted == Counted(2, 0, 0)


def test_arrows_with_one_end_outside_or_back_in_time_are_counted():
    table = collectives({0: 30, 1: 20, 2: 10, 3: 0}, last=3)
    found = collective_arrows(table, places({0: (0, 50), 2: (5, 29), 3: (30, 60)}))
    assert found.counted == Counted(1, 1, 1)
    nothing = collective_arrows(table, places({0: (0, 50), 2: (5, 29)}))
    assert nothing.counted == Counted(0, 2, 0)
    assert list(nothing.texts(Ids(), 0)) == []


@pytest.mark.parametrize(("size", "arrows"), [(2, 1), (64, 63), (65, 8)])
def test_of_more_than_64_ranks_only_the_8_longest_waits_have_an_arrow(size, arrows):
    waits = {rank: 10 * (size - 1 - rank) for rank in range(size)}
    found = collective_arrows(collectives(waits, last=size - 1), places({rank: (rank, 1000) for rank in range(size)}))
    assert found.table["tid_to"].sort().to_list() == [1000 + rank for rank in range(arrows)]


def test_ids_of_arrows_never_repeat():
    ids = Ids()
    taken = [*ids.take(3), *ids.take(0), *ids.take(2)]
    assert taken == [*{*taken}]


@pytest.mark.parametrize("devices", [0, 1, 8, 9, 10, 250])
def test_processes_and_threads_of_ranks_never_mix(devices):
    numbers = Numbers.of([0, 1, 999], devices)
    pids = [numbers.pid(rank, part) for rank in (0, 1, 999) for part in range(devices + 1)]
    assert len({*pids}) == len(pids)
    assert numbers.pid(1, 0) % 10 == 0
    assert min(pids) > 0
    assert numbers.tids(5) > max(pids)
    assert numbers.tids(1) == numbers.next_tid - 1


STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=8).map(sorted)


@given(STEPS, st.integers(0, 20), st.integers(1, 20))
def test_a_counter_has_the_value_of_its_last_change_at_all_times(steps, begin, length):
    rows = pl.DataFrame(steps, schema={"ts_ns": pl.Int64, "value": pl.Int64}, orient="row")
    spans = Spans.of(np.array([begin]), np.array([begin + length]))
    count, texts = counter_texts(Counter("host", "n [x]", rows), 10, spans, 0, (0, 40))
    samples = [(ns(str(one["ts"])), one["args"]["value"]) for one in json.loads(f"[{texts}]", parse_float=str)]
    assert count == len(samples)
    for at in range(begin, begin + length):
        known = [value for ts, value in steps if ts <= at]
        shown = [value for ts, value in samples if ts <= at]
        assert shown[-1:] == known[-1:]
    if samples:
        assert samples[-1] == (begin + length, samples[-2][1])
