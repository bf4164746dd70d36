"""Phase files as they may lie there, through ``summary`` and ``compare``: sums hold, and null is not 0."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from handed import CASES, require
from hypothesis import given, settings
from hypothesis import strategies as st

MS = 1_000_000
NAMES = ("input_wait", "h2d", "forward", "backward", "optimizer")


def write(folder: Path, *lines: dict[str, Any], rank: int = 0, world_size: int = 1, **opened: Any) -> Path:
    path = folder / "0_phases" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    first = {"kind": "open", "run_id": "r", "rank": rank, "world_size": world_size} | opened
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (first, *lines)))
    (folder / "0_run").mkdir(exist_ok=True)
    head = {"run_id": "r", "rank": rank, "world_size": world_size, "reason": "complete"}
    (folder / "0_run" / f"rank-{rank}.json").write_text(json.dumps(head))
    return path


def step(number: int, ms: int = 100, /, *, gap: dict[str, int] | None = None, **phases: int) -> dict[str, Any]:
    found = {name: [value * MS, 1] for name, value in phases.items()}
    line = {"kind": "step", "step": number, "begin_ns": number * 10**9, "ns": ms * MS, "phases": found}
    if gap is not None:
        inner = {name: [value * MS, 1] for name, value in gap.items() if name != "other"}
        line["gap"] = {"ns": sum(gap.values()) * MS, "phases": inner}
    return line


def measures(**phases: str | None) -> dict[str, Any]:
    return {"kind": "measures", "phases": phases}


CLOSE = {"kind": "close"}
USUAL = {"input_wait": 10, "forward": 30, "backward": 40, "optimizer": 10}


def shown(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``summary --json`` says, and the file it writes; neither may hold what is no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    done = run("summary", folder, "--json")
    assert (done.code, done.err) == (0, "")
    text = (folder / "0_run" / "final_summary.json").read_text()
    return json.loads(done.out, parse_constant=refuse), json.loads(text, parse_constant=refuse)


def compared(*args: Any) -> tuple[int, dict[str, Any]]:
    done = run("compare", *args, "--json")
    assert done.err == ""
    return done.code, json.loads(done.out)


@pytest.mark.parametrize(
    ("copy", "expected", "between"),
    [({"h2d": 20}, 20, None), ({}, None, 20), ({}, 0, None)],
    ids=["inside", "before", "none"],
)
def test_A4_copy_to_the_device_has_three_states_a_number_0_and_not_measured(tmp_path, copy, expected, between):
    gap = {"h2d": 20} if between else {"other": 5}
    lines = [step(number, 110, gap=gap, **USUAL, **copy) for number in range(4)]
    write(tmp_path, measures(**dict.fromkeys(NAMES)), *lines, CLOSE)
    summary, final = shown(tmp_path)
    rows = {(row["place"], row["phase"]): row["mean_ns"] for row in summary["phases"]["0"]["table"]}
    # A copy before the step that needs it is shown where it was; in the step it is not said to take no time.
    assert rows.get(("between", "h2d")) == (between and between * MS)
    assert final["step_time"]["groups"]["rows"]["0"]["metrics"]["h2d_ms"] == expected


def test_A4_copy_on_a_cpu_is_not_measured_anywhere(tmp_path):
    write(tmp_path, measures(h2d="no device"), *(step(number, **USUAL) for number in range(4)), CLOSE)
    summary, final = shown(tmp_path)
    rows = {row["phase"]: row["mean_ns"] for row in summary["phases"]["0"]["table"]}
    assert rows["h2d"] is None
    assert summary["diagnosis"]["coverage"]["h2d"] == {"ranks": "0/1", "steps": "0/4"}
    assert final["step_time"]["global"]["average"]["h2d_ms"] is None
    assert "not measured" in next(line for line in run("summary", tmp_path).out.splitlines() if " h2d" in line)
    assert "h2d" not in [row["domain"] for row in compared(tmp_path, tmp_path)[1]["rows"]]


@pytest.mark.parametrize("name", ["inside", "before", "cpu"])
def test_handed_copies_are_never_0_ns(tmp_path, name):
    folder = require(CASES / "074-h2d-zero-versus-not-measured")
    wanted = json.loads((folder / "expect.json").read_text())[f"{name}.json"]["h2d_us"]
    assert run("merge", "--device", folder / f"{name}.json", "-o", tmp_path).code == 0
    found = json.loads(run("summary", tmp_path, "--json").out)
    copies = [kernel["total_ns"] for kernel in found["kernels"] if "HtoD" in kernel["name"]]
    (rank,) = found["ranks"]
    if wanted is None:  # no device was seen: nothing is said of it
        assert (copies, rank["device"]) == ([], None)
        assert "device time is not measured" in run("summary", tmp_path).out
        return
    assert (copies, rank["device"]["exposed_memory_ns"]) == ([1000 * wanted], 1000 * wanted)
    in_step = sum(row["exposed_memory_ns"] for row in found["phase_times"])
    assert in_step == (1000 * wanted if name == "inside" else 0)  # before it, the copy is no part of what sums to it


def test_A4_average_is_of_the_ranks_that_measured(tmp_path):
    for rank, why in ((0, None), (1, "not wrapped")):
        parts = USUAL if why is None else {name: ms for name, ms in USUAL.items() if name != "optimizer"}
        lines = [step(number, **parts) for number in range(4)]
        write(tmp_path, measures(**dict.fromkeys(NAMES[2:4]), optimizer=why), *lines, CLOSE, rank=rank, world_size=2)
    _, final = shown(tmp_path)
    overall = final["step_time"]["global"]
    assert overall["average"]["optimizer_ms"] == 10
    assert overall["worst"]["optimizer_ms"] == {"value": 10, "idx": "0"}
    assert final["step_time"]["groups"]["rows"]["1"]["metrics"]["compute_ms"] is None


def test_A4_peaks_of_memory_that_was_not_read_are_null(tmp_path):
    lines = [step(number, **USUAL) | {"device_bytes": {"allocated_bytes": 5}} for number in range(4)]
    write(tmp_path, *lines, CLOSE)
    assert shown(tmp_path)[1]["step_memory"]["groups"]["rows"]["0"]["metrics"] == {
        "peak_allocated_bytes": None, "peak_reserved_bytes": None,
    }  # fmt: skip


def test_A5_device_times_of_some_steps_are_not_in_the_summary_file(tmp_path):
    device = {"(step)": 90 * MS, **dict.fromkeys(USUAL, 10 * MS)}
    lines = [step(number, **USUAL) | ({"device_ns": device} if number else {}) for number in range(4)]
    write(tmp_path, *lines, CLOSE)
    metrics = shown(tmp_path)[1]["step_time"]["groups"]["rows"]["0"]["metrics"]
    assert (metrics["step_time_ms"], metrics["step_time_gpu_ms"]) == (100, None)
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole, *(line | {"device_ns": device} for line in lines), CLOSE)
    metrics = shown(whole)[1]["step_time"]["groups"]["rows"]["0"]["metrics"]
    assert (metrics["step_time_ms"], metrics["step_time_gpu_ms"], metrics["step_time_cpu_ms"]) == (90, 90, 100)


@pytest.mark.parametrize(("name", "ns"), [("forward", -1), ("validation", 91 * MS), ("(step)", 2**60)])
def test_device_times_that_no_step_has_are_not_known(tmp_path, name, ns):
    device = {"(step)": 90 * MS, **dict.fromkeys((*USUAL, "validation"), 10 * MS)}
    lines = [step(number, **USUAL, validation=5) | {"device_ns": device} for number in range(4)]
    write(tmp_path, *lines, CLOSE)
    metrics = shown(tmp_path)[1]["step_time"]["groups"]["rows"]["0"]["metrics"]
    assert (metrics["step_time_ms"], metrics["step_time_gpu_ms"]) == (80, 80)
    lines[2] |= {"device_ns": device | {name: ns}}
    write(tmp_path, *lines, CLOSE)
    metrics = shown(tmp_path)[1]["step_time"]["groups"]["rows"]["0"]["metrics"]
    assert (metrics["step_time_ms"], metrics["step_time_gpu_ms"], metrics["forward_ms"]) == (95, None, 30)


def test_A4_device_time_between_steps_is_not_known_where_a_part_of_it_is_not(tmp_path):
    # Between the batches of a step the device is timed, between two steps it is not.
    inside = step(0, **USUAL, validation=5) | {"device_ns": {"(step)": 90 * MS, "validation": 4 * MS}}
    both = step(1, gap={"validation": 50}, **USUAL, validation=5) | {"device_ns": {"validation": 4 * MS}}
    for lines, known in (([inside], 4 * MS), ([inside, both], 4 * MS), ([both], None)):
        write(tmp_path, *lines, CLOSE)
        (row,) = [row for row in shown(tmp_path)[0]["phases"]["0"]["table"] if row["phase"] == "validation"]
        assert row["device_mean_ns"] == known


def test_A7_incomplete_data_is_promoted_as_no_verdict(tmp_path):
    parts = {"input_wait": 5, "forward": 45, "backward": 45}
    write(tmp_path, measures(optimizer="not wrapped"), *(step(number, **parts) for number in range(20)), CLOSE)
    _, final = shown(tmp_path)
    assert final["step_time"]["diagnosis"]["kind"] == "INCOMPLETE_DATA"
    assert final["primary_diagnosis"]["kind"] == "INSUFFICIENT_STEP_TIME_DATA"
    assert final["step_time"]["diagnosis"]["evidence"]["signal_coverage"] == {"optimizer": "0/1"}


def test_A4_phase_that_some_steps_did_not_time_is_no_row_of_compare(tmp_path):
    lines = [step(number, **USUAL) for number in range(30)]
    lines += [measures(optimizer="its optimizer was replaced"), *(step(30 + n, input_wait=10) for n in range(30))]
    write(tmp_path, measures(**dict.fromkeys(("forward", "optimizer"))), *lines, CLOSE)
    domains = [row["domain"] for row in compared(tmp_path, tmp_path)[1]["rows"]]
    assert domains == ["step", "input_wait", "forward", "backward", "residual"]


@pytest.mark.parametrize("cut", [True, False])
def test_half_a_line_at_the_end_changes_nothing_and_one_in_the_middle_is_counted(tmp_path, cut):
    lines = [step(number, **USUAL) for number in range(40)]
    path = write(tmp_path, *lines, CLOSE)
    before, _ = shown(tmp_path)
    half = json.dumps(step(40, **USUAL))[:50]
    text = path.read_text()
    path.write_text(text + half if cut else text.replace('{"kind": "close"}', f'{half}\n{{"kind": "close"}}'))
    after, _ = shown(tmp_path)
    notes = after["phases"]["0"].pop("notes")
    assert before["phases"]["0"].pop("notes") == []
    assert notes == ([] if cut else ["1 lines of the phase file cannot be read"])
    assert (after["phases"], after["diagnosis"]) == (before["phases"], before["diagnosis"])
    assert compared(tmp_path, tmp_path)[1]["verdict"] == "same"


def test_ranks_of_different_length_are_looked_at_over_the_steps_that_all_have(tmp_path):
    for rank, num in ((0, 60), (1, 45)):
        lines = [step(number, 100 if number < 45 else 500, **USUAL) for number in range(num)]
        write(tmp_path, *lines, CLOSE, rank=rank, world_size=2)
    summary, final = shown(tmp_path)
    assert (summary["diagnosis"]["num_steps"], summary["diagnosis"]["ranks"]) == (45, [0, 1])
    assert final["step_time"]["global"]["average"]["step_time_ms"] == 100
    assert final["step_time"]["metadata"]["training_total_steps"] == 60
    (row,) = [row for row in compared(tmp_path, tmp_path)[1]["rows"] if (row["domain"], row["rank"]) == ("step", None)]
    assert row["first_ns"] == 100 * MS


def test_steps_of_two_trainings_with_one_number_are_two(tmp_path):
    first = [step(number, **USUAL) for number in range(10)]
    again = {"kind": "open", "run_id": "r", "rank": 0, "world_size": 2}
    for rank in (0, 1):
        lines = [*first, CLOSE, again | {"rank": rank}, *(step(number, 200, **USUAL) for number in range(10)), CLOSE]
        write(tmp_path, *lines, rank=rank, world_size=2)
    summary, final = shown(tmp_path)
    assert summary["diagnosis"]["num_steps"] == 20
    assert final["step_time"]["global"]["average"]["step_time_ms"] == 150


@pytest.mark.parametrize("name", ["step", "residual", "other", "(step)"])
def test_phase_of_a_user_called_as_one_of_ours_is_not_taken_for_it(tmp_path, name):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    for folder, own in ((a, 10), (b, 20)):
        write(folder, *(step(number, 100, forward=30, **{name: own}) for number in range(40)), CLOSE)
    code, found = compared(a, b)
    rows = {row["domain"]: row for row in found["rows"]}
    assert (code, found["verdict"], rows["step"]["first_ns"], rows["step"]["second_ns"]) == (0, "same", 1e8, 1e8)
    assert (rows["residual"]["first_ns"], rows["residual"]["second_ns"]) == (60 * MS, 50 * MS)
    summary, _ = shown(b)
    assert sum(row["share"] for row in summary["phases"]["0"]["table"] if row["share"]) == pytest.approx(1)


NUMBERS = st.sampled_from((0, 1, 5, -1, 10**6, 2**55, 2**55 + 1, 2**63, 10**30)) | st.integers(0, 10**9)
ANY_NAME = st.sampled_from((*NAMES, "validation", "callbacks", "recording", "größe \u202e", "[b]\x00", ""))
PHASES = st.dictionaries(ANY_NAME, st.tuples(st.integers(0, 10**8), st.integers(0, 3)), max_size=4)
GAPS = st.none() | st.fixed_dictionaries({"ns": st.integers(0, 10**9), "phases": PHASES})
FLAGS = st.lists(st.sampled_from(("first", "profiled", "partial", "update_skipped", "odd")), max_size=2)
STEPS = st.fixed_dictionaries(
    {"kind": st.just("step"), "step": st.integers(0, 60), "begin_ns": NUMBERS, "ns": st.just(10**9) | NUMBERS,
     "phases": PHASES, "gap": GAPS, "flags": FLAGS},
    optional={"rss_bytes": NUMBERS, "device_ns": st.dictionaries(ANY_NAME | st.just("(step)"), NUMBERS, max_size=3),
              "device_bytes": st.dictionaries(st.sampled_from(("capacity_bytes", "peak_reserved_bytes")), NUMBERS)},
)  # fmt: skip
LINES = STEPS | st.builds(measures) | st.fixed_dictionaries(
    {"kind": st.just("measures"), "phases": st.dictionaries(ANY_NAME, st.none() | st.just("größe"), max_size=3)}
)  # fmt: skip
RANKS = st.lists(st.tuples(st.lists(LINES, max_size=30), st.booleans(), st.integers(0, 40)), min_size=1, max_size=3)


@settings(max_examples=15, deadline=None)
@given(RANKS)
def test_odd_files_end_in_json_whose_sums_hold_and_in_which_nothing_is_negative(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("run")
    for rank, (lines, is_closed, lost) in enumerate(ranks):
        path = write(folder, *lines, *([CLOSE] if is_closed else []), rank=rank, world_size=len(ranks))
        path.write_bytes(path.read_bytes()[: -lost or None])
    summary, final = shown(folder)
    for found in summary["phases"].values():
        table = [row for row in found["table"] if row["mean_ns"] is not None]
        assert all(min(row["mean_ns"], row["median_ns"], row["p90_ns"]) >= 0 for row in table)
        if found["wall_ns"]:
            assert sum(row["share"] for row in table) == pytest.approx(1)
            assert 0 <= found["coverage"] <= 1
    for row in final["step_time"]["groups"]["rows"].values():
        assert min((ms for ms in row["metrics"].values() if ms is not None), default=0) >= 0
    code, result = compared(folder, folder)
    assert (code == 3) == (result["verdict"] == "inconclusive")
    assert code in (0, 3)
