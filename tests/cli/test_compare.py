"""``compare``: verdicts, what they rest on, what refuses one, exit states and artifacts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused, run

STEPS = 60


def write(
    folder: Path, *, forward: float = 30_000, other: float = 10_000, rank: int = 0, world_size: int = 1, calls: int = 1,
    steps: int = STEPS, closed: bool = True, seed: int = 0
) -> Path:  # fmt: skip
    """A run whose steps are forward and a rest, a little noisy; the first and a profiled one are far off."""
    rng = np.random.default_rng(seed + rank)
    lines: list[dict[str, Any]] = [
        {"kind": "open", "run_id": "r", "rank": rank, "world_size": world_size},
        {"kind": "measures", "phases": {"forward": None, "h2d": "no device"}},
    ]
    for number in range(steps):
        noise = float(np.exp(rng.normal(0, 0.01)))
        own, rest = int(forward * noise * calls), int(other * noise * calls)
        line: dict[str, Any] = {"kind": "step", "step": number, "begin_ns": 0, "ns": own + rest + 500}
        line |= {"phases": {"forward": [own, calls], "checkpoint": [500, 1]}, "gap": {"ns": 1000, "phases": {}}}
        if number < 2:
            line |= {"ns": 9_000_000, "flags": ["first" if number == 0 else "profiled"]}
        lines.append(line)
    if closed:
        lines.append({"kind": "close", "gap": None})
    path = folder / "0_phases" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = folder / "0_run" / f"rank-{rank}.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"world_size": world_size, "rank": rank}))
    return folder


def result(*args: object) -> dict[str, Any]:
    done = run("compare", *args, "--json")
    assert done.err == ""
    return json.loads(done.out)  # type: ignore[no-any-return]


def test_C1_slower_step_is_named_with_its_part_and_the_change_is_b_against_a(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", forward=36_000, seed=7)
    found = result(a, b)
    assert (found["verdict"], found["dominant"]) == ("slower", "forward")
    assert found["change"] == pytest.approx(0.15, abs=0.01)  # 46 against 40
    rows = {row["domain"]: row for row in found["rows"]}
    assert list(rows) == ["step", "forward", "residual"]
    assert rows["forward"]["change"] == pytest.approx(0.2, abs=0.01)
    assert rows["residual"]["verdict"] == "same"
    assert rows["step"]["first_ns"] == pytest.approx(40_000, rel=0.01)  # without the first, the profiled, checkpoints
    assert rows["step"]["low"] < found["change"] < rows["step"]["high"]
    assert result(b, a)["verdict"] == "faster"


def test_C2_runs_on_a_cpu_have_a_verdict(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", seed=7)
    assert result(a, b)["verdict"] == "same"
    shown = run("compare", a, b)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.rstrip().endswith("B is as fast as A")
    assert max(map(len, shown.out.splitlines()[2:])) <= 80


def test_C3_what_is_no_run_ends_in_one_sentence(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    (tmp_path / "x.json").write_text('{"meta": {}}')
    refused(run("compare", a, tmp_path / "x.json"), "x.json is no summary of step times", "final_summary.json")
    refused(run("compare", a, tmp_path / "none"), "does not exist")
    (tmp_path / "empty").mkdir()
    refused(run("compare", a, tmp_path / "empty"), "holds no traces")
    usage = run("compare", a)
    assert (usage.code, "give two runs A B" in usage.err) == (2, True)
    assert run("compare", a, a, "--runs", a, "--vs", a).code == 2
    assert run("compare", a, a, "--max-regression", "-1").code == 2


@pytest.mark.parametrize(
    ("forward", "limit", "code"),
    [(36_000, None, 0), (36_000, "10", 4), (36_000, "20", 0), (30_000, "5", 0), (20_000, "5", 0)],
)
def test_C4_gate_passes_and_fails_and_writes_its_artifacts_first(
    forward: int, limit: str | None, code: int, tmp_path: Path
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", forward=forward, seed=7)
    gate = [] if limit is None else ["--max-regression", limit]
    done = run("compare", a, b, *gate, "-o", tmp_path / "out")
    assert (done.code, done.err) == (code, "")
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == result(a, b)
    assert (tmp_path / "out" / "compare.txt").read_text() == done.out


def test_C4_unequal_world_sizes_and_runs_that_are_not_whole_are_inconclusive(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    two = write(write(tmp_path / "two", world_size=2), world_size=2, rank=1)
    killed = write(tmp_path / "killed", closed=False)
    missing = write(tmp_path / "missing", world_size=2)
    for other, reason in ((two, "world sizes differ: 1 and 2"), (killed, "did not finish"), (missing, "1 and 2")):
        done = run("compare", a, other, "--max-regression", "5", "--json")
        assert (done.code, done.err) == (3, "")
        assert reason in json.loads(done.out)["reason"]
    assert "rank 1 of 2 is missing" in result(two, missing)["reason"]


def test_C5_steps_of_other_numbers_of_batches_are_compared_per_batch(tmp_path: Path) -> None:
    one, three = write(tmp_path / "one"), write(tmp_path / "three", calls=3, seed=7)
    found = result(one, three)
    assert (found["verdict"], found["per_batch"]) == ("same", True)
    assert found["rows"][0]["second_ns"] == pytest.approx(40_000, rel=0.01)
    assert "Median of a batch" in run("compare", one, three).out


def test_C5_unknown_number_of_batches_refuses_the_verdict(tmp_path: Path) -> None:
    known, odd = write(tmp_path / "known"), write(tmp_path / "odd")
    path = odd / "0_phases" / "rank-0.jsonl"
    path.write_text(
        path.read_text()
        .replace('"forward": [', '"forward": [', 1)
        .replace(', 1], "checkpoint"', ', 2], "checkpoint"', 5)
    )
    found = result(known, odd)
    assert found["verdict"] == "inconclusive"
    assert "how many batches a step takes" in found["reason"]


def test_several_runs_a_side_are_one_comparison(tmp_path: Path) -> None:
    firsts = [write(tmp_path / f"a{n}", seed=n) for n in range(3)]
    seconds = [write(tmp_path / f"b{n}", forward=40_000, seed=10 + n) for n in range(3)]
    found = result("--runs", *firsts, "--vs", *seconds)
    assert (found["verdict"], found["dominant"]) == ("slower", "forward")
    assert found["change"] == pytest.approx(0.25, abs=0.02)
    assert found["statistic"] == "lowest 10th percentile"
    for row in found["rows"]:  # the times shown are those that are judged
        assert row["second_ns"] / row["first_ns"] - 1 == pytest.approx(row["change"])
    two = run("compare", "--runs", *firsts[:2], "--vs", *seconds[:2], "--json")
    assert (two.code, "too few" in json.loads(two.out)["reason"]) == (3, True)


def test_the_part_that_is_named_moved_the_way_the_step_did_where_medians_of_runs_say_the_opposite(
    tmp_path: Path,
) -> None:
    firsts = [write(tmp_path / f"a{n}", forward=own, seed=n) for n, own in enumerate((50_000, 52_000, 52_000))]
    seconds = [write(tmp_path / f"b{n}", forward=own, seed=9 + n) for n, own in enumerate((30_000, 38_000, 90_000))]
    seconds += [write(tmp_path / f"b{n}", forward=90_000, seed=9 + n) for n in (3, 4)]
    found = result("--runs", *firsts, "--vs", *seconds[:3])
    assert (found["verdict"], found["dominant"]) == ("faster", "forward")
    found = result("--runs", *firsts, "--vs", *seconds)
    assert (found["verdict"], found["dominant"]) == ("inconclusive", None)
    assert [row["change"] < 0 for row in found["rows"]][:2] == [True, True]
    assert [row["second_ns"] < row["first_ns"] for row in found["rows"]][:2] == [True, True]


def test_ranks_have_rows_of_their_own_and_the_step_is_the_slowest_ranks(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for rank in (0, 1):
        write(a, rank=rank, world_size=2)
        write(b, rank=rank, world_size=2, other=20_000 if rank else 10_000, seed=7)
    found = result(a, b)
    by_rank = {row["rank"]: row["verdict"] for row in found["rows"] if row["rank"] is not None}
    assert by_rank == {0: "same", 1: "slower"}
    assert (found["verdict"], found["dominant"]) == ("slower", "residual")


def test_ranks_of_different_length_are_compared_over_the_steps_that_all_have(tmp_path: Path) -> None:
    a = write(write(tmp_path / "a", world_size=2), rank=1, world_size=2, steps=40)
    assert result(a, a)["verdict"] == "same"


def test_summaries_of_averages_state_the_change_and_no_verdict(tmp_path: Path) -> None:
    def summary(path: Path, **average: float | None) -> Path:
        content = {"schema_version": 1.9, "meta": {"world_size": 1}, "step_time": {"global": {"average": average}}}
        path.write_text(json.dumps(content))
        return path

    a = summary(tmp_path / "a.json", step_time_ms=0.04, forward_ms=0.03, h2d_ms=None)
    b = summary(tmp_path / "b.json", step_time_ms=0.05, forward_ms=0.04, h2d_ms=None)
    found = result(a, b)
    assert (found["verdict"], found["reason"]) == ("inconclusive", "averages alone do not tell a change from noise")
    assert {row["domain"]: row["change"] for row in found["rows"]} == pytest.approx({"step": 0.25, "forward": 1 / 3})
    mixed = result(write(tmp_path / "run"), b)
    assert mixed["rows"][0]["change"] == pytest.approx(0.25, abs=0.01)


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", seed=7)
    path = b / "0_phases" / "rank-0.jsonl"
    path.write_text(path.read_text() + '{"kind": "st')
    assert result(a, b)["verdict"] == "same"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "0_phases" / "rank-0.jsonl").read_text().splitlines()]


def accumulating(folder: Path, groups: list[int], steps: int = 60) -> Path:
    """A run of which each step takes the next number of batches, of 30 us each, and an update of 10 us."""
    write(folder, steps=steps)
    lines = lines_of(folder)
    for line in lines[2:-1]:
        calls = groups[line["step"] % len(groups)]
        line |= {"ns": 30_000 * calls + 10_500, "phases": {"forward": [30_000 * calls, calls], "checkpoint": [500, 1]}}
    (folder / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("groups", [[2], [3, 3, 3, 1], [2, 2, 2, 1]])
def test_C5_runs_whose_steps_take_other_numbers_of_batches_one_by_one_are_refused(groups, tmp_path: Path) -> None:
    uneven, other = accumulating(tmp_path / "a", [3, 1]), accumulating(tmp_path / "b", groups)
    for sides in ((uneven, other), (other, uneven)):
        found = result(*sides)
        # Two batches each are as many as three and one in the mean, and yet medians of them are not alike.
        assert (found["verdict"], found["per_batch"]) == ("inconclusive", False)
        assert "how many batches a step takes differs" in found["reason"]


def test_C5_runs_that_accumulate_alike_are_compared_though_their_steps_are_uneven(tmp_path: Path) -> None:
    a, b = accumulating(tmp_path / "a", [3, 3, 3, 1], 60), accumulating(tmp_path / "b", [3, 3, 3, 1], 64)
    assert result(a, b)["verdict"] == "same"


def test_C5_rows_of_ranks_are_per_batch_too(tmp_path: Path) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    for rank in (0, 1):
        write(one, rank=rank, world_size=2)
        write(three, rank=rank, world_size=2, calls=3, seed=7)
    found = result(one, three)
    assert found["per_batch"]
    by_rank = [row["second_ns"] for row in found["rows"] if row["rank"] is not None]
    assert by_rank == [pytest.approx(40_000, rel=0.01)] * 2


def test_C3_summaries_of_different_schemas_are_compared_with_a_note(tmp_path: Path) -> None:
    paths = []
    for version in (1.8, 1.9):
        paths.append(tmp_path / f"{version}.json")
        content = {"schema_version": version, "step_time": {"global": {"average": {"step_time_ms": 1.0}}}}
        paths[-1].write_text(json.dumps(content))
    assert result(*paths)["notes"] == ["the summaries have different schemas: 1.8 and 1.9"]
    assert result(paths[0], paths[0])["notes"] == []
    assert "note: the summaries have different schemas" in run("compare", *paths).out


def test_C4_what_cannot_be_told_writes_its_artifacts_too(tmp_path: Path) -> None:
    a, killed = write(tmp_path / "a"), write(tmp_path / "killed", closed=False)
    for number, sides in enumerate(((a, killed), (killed, a))):
        done = run("compare", *sides, "--max-regression", "5", "-o", tmp_path / f"out{number}")
        assert done.code == 3
        assert (tmp_path / f"out{number}" / "compare.txt").read_text() == done.out
        assert json.loads((tmp_path / f"out{number}" / "compare.json").read_text())["verdict"] == "inconclusive"


def test_C4_artifacts_are_written_before_anything_is_printed(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", forward=36_000, seed=7)
    (tmp_path / "file").write_text("")
    done = run("compare", a, b, "--max-regression", "5", "-o", tmp_path / "file")
    assert done.out == ""
    refused(done, "cannot be written")


@pytest.mark.parametrize("opened", [2, 2**61])
def test_C4_rank_that_is_missing_is_known_from_the_phase_files_alone(opened: int, tmp_path: Path) -> None:
    a = write(tmp_path / "a", world_size=opened)
    (a / "0_run" / "rank-0.json").unlink()
    done = run("compare", a, a, "--json")
    assert (done.code, json.loads(done.out)["reason"]) == (3, f"{a}: rank 1 of {opened} is missing")


@pytest.mark.parametrize(("limit", "code"), [("24.9", 4), ("25", 0), ("25.1", 0)])
def test_C4_a_change_of_the_limit_itself_passes(limit: str, code: int, tmp_path: Path) -> None:
    sides: list[list[Path]] = [[], []]
    for side, work in enumerate((40_000, 50_000)):
        for number in range(3):
            sides[side].append(write(tmp_path / f"{side}{number}"))
            lines = lines_of(sides[side][-1])
            for line in lines[4:-1]:
                line |= {"ns": work, "phases": {"forward": [work // 2, 1]}}
            path = sides[side][-1] / "0_phases" / "rank-0.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("compare", "--runs", *sides[0], "--vs", *sides[1], "--max-regression", limit, "--json")
    assert (done.code, json.loads(done.out)["change"]) == (code, 0.25)


def test_C4_change_within_noise_passes_a_gate_of_0(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", forward=30_600, seed=7)
    done = run("compare", a, b, "--max-regression", "0", "--json")
    assert (done.code, json.loads(done.out)["verdict"]) == (0, "same")
    assert json.loads(done.out)["change"] > 0


def test_C2_step_alone_has_a_verdict(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", forward=36_000, seed=7)
    for folder in (a, b):
        lines = [line | ({"phases": {}} if line["kind"] == "step" else {}) for line in lines_of(folder)]
        (folder / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = result(a, b)
    assert [row["domain"] for row in found["rows"]] == ["step"]
    assert (found["verdict"], found["dominant"]) == ("slower", None)


def calling(folder: Path, input_wait: int, forward: int, backward: int, batches: int) -> Path:
    """A run whose phases are called so often in a step of so many batches of 40 us."""
    write(folder)
    lines = lines_of(folder)
    calls = {"input_wait": input_wait, "forward": forward, "backward": backward}
    for line in lines[2:-1]:
        phases = {name: [10_000 * batches, number] for name, number in calls.items()}
        line |= {"ns": 40_000 * batches, "phases": phases}
    (folder / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_C5_one_request_for_all_batches_of_a_step_does_not_hide_how_many_they_are(tmp_path: Path) -> None:
    one, three = calling(tmp_path / "1", 1, 1, 1, 1), calling(tmp_path / "3", 1, 3, 3, 3)
    found = result(one, three)
    assert (found["verdict"], found["per_batch"], found["change"]) == ("same", True, pytest.approx(0))


def test_C5_model_that_is_called_twice_for_a_batch_is_slower_not_of_two_batches(tmp_path: Path) -> None:
    one, twice = calling(tmp_path / "1", 1, 1, 1, 1), calling(tmp_path / "2", 1, 2, 1, 2)
    found = result(one, twice)
    assert (found["verdict"], found["per_batch"], found["change"]) == ("slower", False, pytest.approx(1))


@pytest.mark.parametrize("side", [0, 1])
def test_C4_training_that_failed_is_not_whole_though_its_phases_were_followed_to_the_end(
    side: int, tmp_path: Path
) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b")]
    head = {"world_size": 1, "rank": 0, "reason": "exception", "detail": "ValueError: no batch"}
    (runs[side] / "0_run" / "rank-0.json").write_text(json.dumps(head))
    done = run("compare", *runs, "--max-regression", "5", "--json")
    reason = f"{runs[side]}: the training failed (rank 0: ValueError: no batch)"
    assert (done.code, json.loads(done.out)["reason"]) == (3, reason)


def holding(folder: Path, samples: object, *, ns_per_sample: int = 1000, calls: int = 1, name: str = "forward") -> Path:
    """A run of steps whose batches hold so many samples, as far as they say."""
    write(folder)
    lines = lines_of(folder)
    size = samples if isinstance(samples, int) else 8
    for at, line in enumerate(lines[2:-1]):
        took = ns_per_sample * size * calls
        line |= {"ns": took, "phases": {name: [took // 2, calls]}, "gap": {"ns": 0, "phases": {}}}
        if samples is not None and at % 20 == 0:
            line["batch_size"] = samples if isinstance(samples, int) else (8, 5)[at > 20]
    (folder / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("calls", [1, 2])
def test_C5_batches_of_other_sizes_are_compared_per_sample(calls: int, tmp_path: Path) -> None:
    small = holding(tmp_path / "8", 8)
    large, slow = (holding(tmp_path / f"{ns}", 16, ns_per_sample=ns, calls=calls) for ns in (1000, 1500))
    found = result(small, large)
    assert (found["verdict"], found["per_sample"], found["per_batch"]) == ("same", True, False)
    assert {row["first_ns"] for row in found["rows"] if row["domain"] == "step"} == {1000}
    found = result(small, slow)
    assert (found["verdict"], found["change"]) == ("slower", pytest.approx(0.5))
    assert "of a sample" in run("compare", small, slow).out


def test_C5_batches_of_one_size_are_compared_by_step(tmp_path: Path) -> None:
    found = result(holding(tmp_path / "a", 8), holding(tmp_path / "b", 8))
    assert (found["verdict"], found["per_sample"], found["per_batch"], found["notes"]) == ("same", False, False, [])


@pytest.mark.parametrize("other", [None, "uneven"])
def test_C5_sizes_that_are_not_known_of_all_are_said_and_not_used(other: object, tmp_path: Path) -> None:
    found = result(holding(tmp_path / "a", 8), holding(tmp_path / "b", other))
    assert (found["verdict"], found["per_sample"]) == ("same", False)
    assert found["notes"] == ["how many samples a batch holds is known of some runs only, or differs within one"]


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16)])
def test_C5_ranks_with_batches_of_other_sizes_have_none_in_common(sizes: tuple[int, int], tmp_path: Path) -> None:
    folder = tmp_path / "b"
    holding(folder, sizes[1])
    second = (folder / "0_phases/rank-0.jsonl").read_text().replace('"rank": 0', '"rank": 1')
    holding(folder, sizes[0])
    (folder / "0_phases/rank-1.jsonl").write_text(second)
    found = result(holding(tmp_path / "a", 4), folder)
    assert not found["per_sample"]
    assert found["notes"] == ["how many samples a batch holds is known of some runs only, or differs within one"]


def test_C5_sizes_without_the_number_of_batches_are_no_verdict(tmp_path: Path) -> None:
    found = result(holding(tmp_path / "a", 8, name="mine"), holding(tmp_path / "b", 16, name="mine"))
    assert (found["verdict"], found["per_sample"]) == ("inconclusive", False)
    assert found["reason"] == "batches hold 8 and 16 samples, and how many a step takes is not known"


@pytest.mark.parametrize("flag", ["first", "profiled", "partial"])
def test_C1_steps_that_did_not_run_as_they_always_do_do_not_count_however_many_they_are(
    flag: str, tmp_path: Path
) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", seed=7)
    lines = lines_of(b)
    for line in lines[2:42]:
        line |= {"ns": 900_000, "flags": [flag]}
    (b / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = result(a, b)
    assert (found["change"], found["rows"][0]["second_ns"]) == (
        pytest.approx(0, abs=0.02),
        pytest.approx(40_000, rel=0.01),
    )


def test_C3_run_that_recorded_traces_alone_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "0_kineto").mkdir()
    (tmp_path / "0_kineto" / "rank-0.json").write_text("{}")
    refused(run("compare", tmp_path, tmp_path), "has no step phases to compare")


def test_C5_run_of_which_nothing_tells_how_many_batches_a_step_takes_is_not_held_against_one_of_which_it_is_known(
    tmp_path: Path,
) -> None:
    known, silent = write(tmp_path / "known"), write(tmp_path / "silent")
    lines = [line | ({"phases": {}} if line["kind"] == "step" else {}) for line in lines_of(silent)]
    (silent / "0_phases" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for sides in ((known, silent), (silent, known)):
        done = run("compare", *sides, "--json")
        reason = "how many batches a step takes is known of some runs only, and may differ"
        assert (done.code, json.loads(done.out)["reason"]) == (3, reason)
