"""The generator of multi-rank runs, judged from the files it wrote by plain Python."""

import json
import subprocess
import sys
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from handed import DATA, require

from chakra_capture.cli.main import merge_traces

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "make_ranks.py"


def make(folder, *options):
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads((folder / "truth.json").read_text())


def device_events(folder, rank, numbers=Decimal):
    text = (folder / "0_kineto" / f"rank-{rank}.json").read_text()
    trace = json.loads(text, parse_float=numbers)
    return trace, [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "Trace"]


def span_ns(event):
    start = int(Decimal(event["ts"]) * 1000)
    return start, start + int(Decimal(event["dur"]) * 1000)


def us_span(event):
    return event["ts"], event["ts"] + event["dur"]


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


def test_ranks_of_a_host_share_its_clock(tmp_path):
    options = ["--ranks", 4, "--ranks-per-host", 2, "--tiny", "--clock-offsets", 50, "--drift-ppm", 50]
    truth = make(tmp_path, *options)
    offsets, drifts = truth["clock_offset_ns"], truth["clock_drift_ppm"]
    assert offsets[:2] == drifts[:2] == [0, 0]
    assert offsets[2] == offsets[3] != 0
    assert drifts[2] == drifts[3] != 0
    hosts = [device_events(tmp_path, rank)[0]["host_name"] for rank in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


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


def test_ranks_of_a_mesh_meet_in_the_groups_of_its_dimensions_in_turn(tmp_path):
    truth = make(tmp_path, "--ranks", 4, "--mesh", "dp=2,tp=2", "--skew", "3:40", "--jitter", 0)
    # Ranks row by row: dp joins 0 and 2, 1 and 3; tp joins 0 and 1, 2 and 3.
    members = {"1": [0, 2], "2": [1, 3], "3": [0, 1], "4": [2, 3]}
    for operation in truth["operations"]:
        assert operation["ranks"] == members[operation["group"]]
        assert min(operation["end_ns"]) > max(operation["arrival_ns"])
    assert {o["group"] for o in truth["operations"]} == set(members)
    for rank, own in enumerate((["1", "3"], ["2", "3"], ["1", "4"], ["2", "4"])):
        trace, _ = device_events(tmp_path, rank)
        stated = {g["pg_name"]: (g["pg_desc"], g["ranks"]) for g in trace["distributedInfo"]["pg_config"]}
        descriptions = ("mesh_dp", "mesh_tp")
        assert stated == {
            "0": ("default_pg", [0, 1, 2, 3]),
            **{name: (text, members[name]) for name, text in zip(own, descriptions, strict=True)},
        }
        host = json.loads((tmp_path / "0_chakra" / f"rank-{rank}.json").read_text())
        (init,) = [n for n in host["nodes"] if n["name"] == "## process_group:init ##"]
        listed = json.loads(init["inputs"]["values"][0])
        assert [(g["pg_name"], g["ranks"]) for g in listed] == [("0", []), *((name, members[name]) for name in own)]
    # In the first operation, of dp, only the partner of the late rank waits; in the next, of tp, everyone is late.
    first = {o["group"]: o for o in truth["operations"] if o["operation"] == 0}
    assert first["1"]["end_ns"][0] < 40e6 + first["1"]["arrival_ns"][0]
    assert first["2"]["end_ns"][0] - first["2"]["arrival_ns"][0] > 35e6


def test_faults_are_planted_where_they_are_asked_for_and_nowhere_else(tmp_path):
    planted = ["truncate:1", "no-device:2", "other-run:3", "copy-of-neighbour:4", "mismatch:5", "missing-collective:6",
               "missing-rank:7", "extra-rank:9", "other-process:8"]  # fmt: skip
    options = [part for fault in planted for part in ("--fault", fault)]
    clean, faulty = tmp_path / "clean", tmp_path / "faulty"
    make(clean, "--ranks", 9, "--tiny")
    truth = make(faulty, "--ranks", 9, "--tiny", *options)
    assert truth["faults"] == [[f.split(":")[0], int(f.split(":")[1])] for f in planted]

    def files(folder, rank):
        found = [(p.parent.name, p) for p in folder.glob(f"*/rank-{rank}.json")]
        return {name: path.read_bytes() for name, path in found}

    assert files(faulty, 0) == files(clean, 0)
    whole, cut = files(clean, 1), files(faulty, 1)
    assert whole["0_kineto"].startswith(cut["0_kineto"])
    assert 0.5 < len(cut["0_kineto"]) / len(whole["0_kineto"]) < 0.7
    assert set(files(faulty, 2)) == {"0_chakra", "0_run"}
    run_ids = {r: json.loads(files(faulty, r)["0_run"])["run_id"] for r in (0, 1, 3)}
    assert run_ids[0] == run_ids[1] != run_ids[3]
    assert files(faulty, 4)["0_kineto"] == files(clean, 3)["0_kineto"]
    assert not files(faulty, 7)
    assert device_events(faulty, 9)[0]["distributedInfo"]["rank"] == 9
    host = json.loads(files(faulty, 8)["0_chakra"])
    assert host["pid"] not in {e["pid"] for e in device_events(faulty, 8)[1]}

    def operations(folder, rank):
        return [e for e in device_events(folder, rank)[1] if e["name"].startswith(("gloo:", "c10d::"))]

    assert [e["args"]["Input Dims"] for e in operations(clean, 5)] == [[[[66410]], [], [], [], [], []], [[66410]]]
    assert [e["args"]["Input Dims"] for e in operations(faulty, 5)] == [[[[66418]], [], [], [], [], []], [[66418]]]
    assert len(operations(clean, 6)) == 2
    assert operations(faulty, 6) == []
    assert truth["operations"][-1]["ranks"] == [0, 1, 2, 3, 4, 5, 7, 8]


def test_on_a_gpu_what_follows_a_launch_a_stream_or_a_collective_still_does(tmp_path):
    pair = require(DATA / "pairs" / "resnet50_ddp_twin")
    host, device = pair / "host" / "rank-0.json.gz", pair / "device" / "rank-0.json.gz"
    make(tmp_path, "--ranks", 2, "--skew", "1:15", "--host", host, "--device", device)
    collectives = []
    for rank in range(2):
        _, events = device_events(tmp_path, rank, float)
        launches = {
            e["args"]["correlation"]: us_span(e)[0]
            for e in events
            if e["cat"] == "cuda_runtime" and "correlation" in e["args"]
        }
        streams, own = {}, []
        for event in events:
            if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            start, end = us_span(event)
            assert start >= launches[event["args"]["correlation"]]
            streams.setdefault(event["tid"], []).append((start, end))
            if "Collective name" in event["args"]:
                own.append((start, end, event["args"]))
        for spans in streams.values():
            spans.sort()
            assert all(before[1] <= after[0] + 0.002 for before, after in pairwise(spans))
        collectives.append(sorted(own, key=lambda each: each[0]))
    assert len(collectives[0]) == len(collectives[1]) == 21
    for number, (one, other) in enumerate(zip(*collectives, strict=True)):
        assert one[2]["Seq"] == other[2]["Seq"] == number + 1
        assert one[2]["Collective name"] == other[2]["Collective name"]
        assert one[2]["In msg nelems"] == other[2]["In msg nelems"]
        assert min(one[1], other[1]) > max(one[0], other[0])
        assert other[0] - one[0] > 0
