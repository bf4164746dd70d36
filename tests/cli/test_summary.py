"""``summary`` and ``inspect``: 80 columns, right numbers, "not measured" where nothing was, names do not break it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder, write_json
from commands import Outcome, process, refused, run
from handed import DATA, SAMPLES, require

ESCAPES = "\x1b[31mred\x1b[0m\r\n\x07[bold]x[/bold]\u202e\ud800"


def lines(done: Outcome) -> list[str]:
    """Lines of a summary, checked: none but the path line is wider than 80 columns."""
    assert (done.code, done.err) == (0, "")
    found = done.out.splitlines()
    assert [line for line in found[1:] if len(line) > 80] == []
    return [line.rstrip() for line in found]


def busy_trace() -> TraceBuilder:
    trace = TraceBuilder(rank=0, world_size=2).step(3, 0, 100)
    trace.op("aten::mm", 10, 20).launched("gemm", 30, 20, 1, at=15)
    trace.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 40, 30, 2, at=35, stream=8)
    return trace.runtime("cudaMemcpyAsync", 60, 2, 3).kernel("Memcpy HtoD", 80, 10, 3, cat="gpu_memcpy")


def test_whole_screen(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    done = run("summary", tmp_path)
    shown = "\n".join(lines(done)).replace(str(tmp_path), "DIR")
    # 10..30 op, launch 15..16 inside it; device 30..50 compute, 40..70 comm (30..: 50-70 exposed), 80..90 copy.
    assert (
        shown.strip()
        == """\
Run 0 in DIR
Ranks      1 of 2 (0)
Steps      3
Host ops   2 of 2 (100.0 %) linked to the device trace
Device     3 of 3 (100.0 %) activities linked to their launch

Step time (profiled)
rank  steps       mean     median        min        max
   0      1  100.00 us  100.00 us  100.00 us  100.00 us
under the profiler, where small CPU ops take several times as long

Device time
rank      span  compute  exp. comm  exp. copies    idle    comm    busy
   0  60.00 us   33.3 %     33.3 %       16.7 %  16.7 %  50.0 %  83.3 %
compute + exposed communication + exposed copies + idle = span

Communication
group  operation   count  bytes    median  wait  bus
?      all_reduce      1      -  30.00 us     -    -

Top operators by self time
name                                              count      time   share
(outside any op)                                      1  77.00 us  77.0 %
aten::mm                                              1  19.00 us  19.0 %
cudaLaunchKernel                                      2   2.00 us   2.0 %
cudaMemcpyAsync                                       1   2.00 us   2.0 %
of whole recorded steps, all threads; share of the self times of all operators

Top kernels by total time
name                                              count      time   share
ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)            1  30.00 us  50.0 %
gemm                                                  1  20.00 us  33.3 %
Memcpy HtoD                                           1  10.00 us  16.7 %

note: 1 of 2 ranks are missing here: 1

No verdict (from 1 recorded step)
note   The device is idle 50.0 % of a step; to say why takes 3 recorded steps.
       Record 3 steps or more, after warm-up."""
    )


def test_json_holds_the_same_numbers(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    shown = json.loads(run("summary", tmp_path, "--json").out)
    assert (shown["schema_version"], shown["world_size"]) == (1, 2)
    rank = shown["ranks"][0]
    assert rank["device"] == {
        "num_activities": 3, "span_ns": 60000, "busy_ns": 50000, "compute_ns": 20000, "communication_ns": 30000,
        "memory_ns": 10000, "exposed_communication_ns": 20000, "exposed_memory_ns": 10000, "idle_ns": 10000,
    }  # fmt: skip
    assert (rank["steps"], rank["step_time"]["median_ns"], rank["host_ops"], rank["host_linked"]) == ([3], 100000, 2, 2)
    outside, top = shown["operators"][:2]
    assert (outside["name"], outside["self_ns"]) == ("(outside any op)", 77000)  # 100 less mm 20, calls 1 and 2
    assert (top["name"], top["self_ns"], top["total_ns"]) == ("aten::mm", 19000, 20000)
    assert sum(o["share"] for o in shown["operators"]) == pytest.approx(1)
    assert [k["total_ns"] for k in shown["kernels"]] == [30000, 20000, 10000]


def test_twin_at_80_columns(tmp_path: Path) -> None:
    assert run("merge", require(DATA / "pairs" / "resnet50_ddp_twin"), "--force", "-o", tmp_path).code == 0
    shown = lines(run("summary", tmp_path))
    assert "Host ops   14388 of 14388 (100.0 %) linked to the device trace" in shown
    assert "Device     3774 of 3774 (100.0 %) activities linked to their launch" in shown
    # answers.md 1.4 and expected_breakdown.json: span 660.6 ms, busy 24 %
    (row,) = [line for line in shown if line.startswith("   0  660.55 ms")]
    assert row.split()[4::2] == ["%"] * 6
    assert row.split()[-2] == "23.8"
    assert any("merged by force" in line for line in shown)


def test_cpu_only_pair_measures_no_device_time(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = require(SAMPLES / "ddp2_gloo")
        host, device = folder / f"rank-{rank}.chakra.json.gz", folder / f"rank-{rank}.kineto.json"
        assert run("merge", "--host", host, "--device", device, "-o", tmp_path).code == 0
    shown = lines(run("summary", tmp_path))
    assert "Ranks      2 of 2 (0-1)" in shown
    assert "Steps      0-2" in shown
    assert "Device     no device events in the traces: device time is not measured" in shown
    assert "Host ops   1434 of 1436 (99.9 %) linked to the device trace" in shown
    assert not [line for line in shown if "kernels" in line or line.startswith("Device time")]
    device = [rank["device"] for rank in json.loads(run("summary", tmp_path, "--json").out)["ranks"]]
    assert device == [None, None]


def test_host_alone_measures_no_time_at_all(tmp_path: Path) -> None:
    busy_trace().write_host(tmp_path / "0_chakra" / "rank-0.json")
    shown = lines(run("summary", tmp_path))
    assert "Host ops   2 without a device trace, so without times" in shown
    assert "Device     no device trace: times are not measured" in shown
    assert "   0      0  not measured" in shown
    assert not [line for line in shown if "Top" in line]
    rank = json.loads(run("summary", tmp_path, "--json").out)["ranks"][0]
    assert (rank["device"], rank["step_time"], rank["activities"]) == (None, None, None)


def test_device_alone_has_no_host_ops(tmp_path: Path) -> None:
    busy_trace().write_device(tmp_path / "0_kineto" / "rank-0.json")
    shown = lines(run("summary", tmp_path))
    assert "Host ops   no host trace" in shown
    assert "Device     3 of 3 (100.0 %) activities linked to their launch" in shown


def test_run_without_steps_shows_none(tmp_path: Path) -> None:
    TraceBuilder().op("a", 0, 10).write(tmp_path)
    shown = lines(run("summary", tmp_path))
    assert "Steps      none" in shown
    assert "   0      0  not measured" in shown


def test_trace_of_rows_without_length_has_no_shares(tmp_path: Path) -> None:
    TraceBuilder().op("a", 0, 0).launched("k", 5, 0, 1, at=1).write(tmp_path)
    trace = TraceBuilder().op("a", 0, 0).runtime("l", 1, 0, 1).kernel("k", 5, 0, 1)
    trace.write(tmp_path)
    shown = lines(run("summary", tmp_path))
    assert not [line for line in shown if "nan" in line]
    report = json.loads(run("summary", tmp_path, "--json").out)
    assert [o["share"] for o in report["operators"]] == [None, None]
    assert [k["share"] for k in report["kernels"]] == [None]


@pytest.mark.parametrize(
    "name",
    [ESCAPES, "x" * 100_000, "[red]y[/red]", "加法" * 60, "", "\t\v\f\x85\u2028", "🙂" * 80],
    ids=["escapes", "huge", "markup", "wide", "empty", "spaces", "emoji"],
)
def test_names_cannot_break_the_screen(name: str, tmp_path: Path) -> None:
    from rich.cells import cell_len

    written = name.encode("utf-8", "replace").decode()
    TraceBuilder().step(1, 0, 100).op(written, 10, 20).launched(written, 30, 5, 1, at=15).write(tmp_path)
    shown = lines(run("summary", tmp_path))
    assert all(cell_len(line) <= 80 for line in shown[1:])
    assert all(c.isprintable() for line in shown for c in line)
    if name.startswith("[red]"):
        assert any("[red]y[/red]" in line for line in shown)
    by_name = [row["name"] for row in json.loads(run("summary", tmp_path, "--json").out)["operators"]]
    assert written in by_name


def manifest(folder: Path, **changes: Any) -> None:
    windows = [{"cycle": 0, "start_step": 3, "end_step": 4, "steps": [3], "reason": "end"}]
    content = {"world_size": 1, "complete": True, "windows": windows, **changes}
    write_json(folder / "0_run" / "rank-0.json", content)


def test_steps_that_one_side_alone_holds_are_said(tmp_path: Path) -> None:
    TraceBuilder().step(3, 0, 10).op("a", 1, 2).step(4, 20, 10, host=False).op("b", 21, 2, host=False).write(tmp_path)
    assert "note: rank 0: steps that only the device trace holds: 4" in lines(run("summary", tmp_path))


def test_warm_up_steps_were_not_asked_for(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    # 5..16 in cycles of 1 warm-up and 3 active: 6-8, 10-12, 14-16.
    asked = {"start_step": 5, "end_step": 16, "warmup_steps": 1, "active_steps": 3}
    windows = [
        {**asked, "cycle": cycle, "first_step": first, "steps": [first, first + 1, first + 2]}
        for cycle, first in enumerate((6, 10, 14))
    ]
    manifest(tmp_path, windows=windows)
    assert "Steps      3 (9 of 9 asked for recorded whole, over 1 rank)" in lines(run("summary", tmp_path))


def test_what_a_manifest_says_is_shown_on_plain_lines(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    manifest(tmp_path, complete=False, reason="killed", detail="boom \x1b[2J\nsecond line " + "y" * 200)
    shown = lines(run("summary", tmp_path))
    assert "Steps      3 (1 of 2 asked for recorded whole, over 1 rank)" in shown
    assert any("rank 0: recording is incomplete (boom" in line for line in shown)
    assert "\x1b" not in "".join(shown)
    looked = run("inspect", tmp_path)
    assert (looked.code, len(looked.out.splitlines())) == (0, 2)
    assert "\x1b" not in looked.out


def test_inspect_says_what_lies_there(tmp_path: Path) -> None:
    busy_trace().write(tmp_path, 0)
    busy_trace().write(tmp_path, 10)
    part = tmp_path / "0_kineto" / "rank-10.json"
    part.rename(part.with_name("rank-10.json.part"))
    manifest(tmp_path)
    run("merge", tmp_path, "--ranks", 0)
    looked = run("inspect", tmp_path).out.splitlines()
    assert looked[0] == f"{tmp_path}, job 0"
    assert looked[1].startswith("rank 0: 1 window(s), ")
    assert looked[1].endswith(" kB, steps 3, complete, merged")
    assert looked[2].endswith(" kB, steps not stated, no manifest, unfinished files, not merged")
    rows = json.loads(run("inspect", tmp_path, "--json").out)["ranks"]
    assert [(r["rank"], r["merged"], r["unfinished"], r["steps"]) for r in rows] == [
        (0, True, False, [3]), (10, False, True, None),
    ]  # fmt: skip


def test_tables_older_than_a_trace_are_merged_anew(tmp_path: Path) -> None:
    TraceBuilder().step(1, 0, 10).write(tmp_path)
    assert "Steps      1" in lines(run("summary", tmp_path))
    TraceBuilder().step(2, 0, 10).write(tmp_path)
    assert "Steps      2" in lines(run("summary", tmp_path))


def test_one_rank_can_be_shown_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        TraceBuilder(rank=rank, pid=50 + rank).step(rank, 0, 10).write(tmp_path, rank)
    assert "Steps      1" in lines(run("summary", tmp_path, "--rank", 1))
    refused(run("summary", tmp_path, "--rank", 7), "has no merged rank 7; it has 0-1")


def test_damaged_tables_are_said(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    assert run("merge", tmp_path).code == 0
    merged = tmp_path / "0_merged"
    (merged / "rank=0" / "nodes.parquet").write_bytes(b"PAR1")
    refused(run("summary", merged), "nodes.parquet cannot be read")
    (merged / "rank=0" / "link.json").write_text("{")
    shutil.rmtree(tmp_path / "0_chakra")
    shutil.rmtree(tmp_path / "0_kineto")  # or the rank would be merged again
    refused(run("summary", merged), "link.json cannot be read")


def test_folder_and_terminal_of_other_encodings_end_in_no_traceback(tmp_path: Path) -> None:
    odd = Path(str(tmp_path) + "/\udcff_trace")
    busy_trace().write(odd)
    for verb in ("merge", "summary", "inspect"):
        done = process(verb, odd, env={"PATH": "", "PYTHONIOENCODING": "ascii", "PYTHONPATH": "."})
        assert (done.code, done.err) == (0, ""), verb


def test_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    busy_trace().write(tmp_path)
    before = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
    done = process("inspect", tmp_path, before=before)
    assert "Traceback" not in done.err
