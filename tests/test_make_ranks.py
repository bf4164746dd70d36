"""The generator of multi-rank runs, judged from the files it wrote by plain Python."""

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from chakra_capture.cli.main import merge_traces

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_ranks.py"


def make(folder, *options):
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads((folder / "truth.json").read_text())


def device_events(folder, rank):
    text = (folder / "0_kineto" / f"rank-{rank}.json").read_text()
    trace = json.loads(text, parse_float=Decimal)
    return trace, [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "Trace"]


def span_ns(event):
    start = int(Decimal(event["ts"]) * 1000)
    return start, start + int(Decimal(event["dur"]) * 1000)


def gloo_spans(folder, rank):
    """Start and end of each operation on the clock of the rank, Unix ns."""
    trace, events = device_events(folder, rank)
    base = trace["baseTimeNanoseconds"]
    spans = [span_ns(e) for e in events if e["name"].startswith("gloo:")]
    return [(base + start, base + end) for start, end in sorted(spans)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    truth = make(folder, "--ranks", 4, "--steps", 4, "--clock", "2:31:40", "--skew", "3:25", "--seed", 3)
    return folder, truth


def merged(folder, capsys, status=0):
    with pytest.raises(SystemExit) as left:
        merge_traces([str(folder), "--workers", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert left.value.code == status
    return {rank["rank"]: rank for rank in report["ranks"]}


def test_no_member_leaves_a_collective_before_the_last_has_arrived(run):
    folder, truth = run
    seen = [gloo_spans(folder, rank) for rank in range(4)]
    assert {len(spans) for spans in seen} == {6} == {len(truth["operations"])}
    for number in range(6):
        arrivals, ends = [], []
        for rank in range(4):
            offset, drift = truth["clock_offset_ns"][rank], truth["clock_drift_ppm"][rank] * 1e-6
            start, end = (at - truth["zero_ns"] - offset for at in seen[rank][number])
            arrivals.append(start / (1 + drift))
            ends.append(end / (1 + drift))
        assert min(ends) > max(arrivals)
        assert max(ends) - min(ends) < 10_000


def test_planted_clocks_are_what_the_recorded_times_differ_by(run):
    folder, truth = run
    assert truth["clock_offset_ns"] == [0, 0, 31_000_000, 0]
    assert truth["clock_drift_ppm"] == [0, 0, 40, 0]
    for rank in range(4):
        factor = 1 + Decimal(truth["clock_drift_ppm"][rank]) / 10**6
        spans = gloo_spans(folder, rank)
        operations = sorted(truth["operations"], key=lambda o: o["arrival_ns"][rank])
        for span, operation in zip(spans, operations, strict=True):
            shown = [at - truth["zero_ns"] - truth["clock_offset_ns"][rank] for at in span]
            true = [operation[key][rank] for key in ("arrival_ns", "end_ns")]
            # Written times are whole ns; a duration is the difference of two of them.
            assert all(abs(a - b * factor) <= 2 for a, b in zip(shown, true, strict=True))


def test_a_late_rank_is_the_last_to_arrive_and_the_others_wait(run):
    _folder, truth = run
    in_step = [o for o in truth["operations"] if o["name"] == "all_reduce"]
    assert len(in_step) == 4
    for operation in in_step:
        late = operation["arrival_ns"][3] - max(operation["arrival_ns"][:3])
        assert 15_000_000 < late < 35_000_000


def test_every_rank_is_valid_and_merges_without_faults_or_repairs(run, capsys):
    folder, _ = run
    ranks = merged(folder, capsys)
    for rank in range(4):
        (window,) = ranks[rank]["windows"]
        assert ranks[rank]["error"] is None
        assert window["pairing"]["faults"] == []
        assert window["device"]["steps"] == [5, 6, 7, 8]
        host, trace = (
            json.loads((folder / "0_chakra" / f"rank-{rank}.json").read_text()),
            device_events(folder, rank)[0],
        )
        assert len({node["id"] for node in host["nodes"]}) == len(host["nodes"])
        assert trace["distributedInfo"]["rank"] == rank
        assert trace["distributedInfo"]["world_size"] == 4
        manifest = json.loads((folder / "0_run" / f"rank-{rank}.json").read_text())
        assert (manifest["rank"], manifest["world_size"], manifest["pid"]) == (rank, 4, host["pid"])


def test_the_same_seed_writes_the_same_files_and_another_does_not(tmp_path):
    written = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, "--ranks", 2, "--tiny", "--seed", seed, "--clock-offsets", 10, "--drift-ppm", 50)
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        written[name] = {p.relative_to(tmp_path / name): p.read_bytes() for p in files}
    assert written["a"] == written["b"]
    assert written["a"] != written["c"]


def test_the_work_of_a_straggler_takes_longer_by_the_factor_only_where_it_was_planted(tmp_path):
    make(tmp_path, "--ranks", 3, "--jitter", 0, "--straggler", "1:1.5:DistributedDataParallel.forward")
    took = {}
    for rank in range(3):
        _, events = device_events(tmp_path, rank)
        spans = [span_ns(e) for e in events if e["name"] == "DistributedDataParallel.forward"]
        took[rank] = [end - start for start, end in spans]
        zeroed = [span_ns(e) for e in events if e["name"] == "Optimizer.zero_grad#Adam.zero_grad"]
        took[rank, "other"] = [end - start for start, end in zeroed]
    assert took[0] == took[2]
    for fast, slow in zip(took[0], took[1], strict=True):
        assert abs(slow - 1.5 * fast) < 3
    for fast, slow in zip(took[0, "other"], took[1, "other"], strict=True):
        assert abs(slow - fast) <= 2
