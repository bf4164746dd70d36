"""``compare`` on recorded steps of real trainings: what was changed leads, and the sums are exact."""

import json
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run
from recording.recorded import settings

from chakra_capture import capture

FIRST, LAST = 2, 9
BATCH, WIDTH = 256, 384


def train(folder: Path, *, width: int = WIDTH, extra: bool = False, label: str = "encoder", sleep: float = 0.0) -> Path:
    """A training of three layers that records eight steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be most of the noise
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, width), torch.nn.Linear(width, WIDTH)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    values = torch.rand(500_000, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with capture(settings(folder, FIRST, LAST)) as session:
        for step in range(LAST + 1):
            with session.step(step):
                with session.phase("input_wait"):
                    time.sleep(0.001 + sleep)
                    batch = torch.ones(BATCH, WIDTH)
                with session.phase("forward"):
                    with torch.profiler.record_function(label):
                        out = model(batch)
                    loss = out.mean()
                    if extra:
                        loss = loss + values.sort().values[0]
                with session.phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                with session.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs by what is changed in them, each recorded once."""

    @cache
    def one(**changes: Any) -> Path:
        return train(tmp_path_factory.mktemp("run"), **changes)

    return one


def compared(*args: Any) -> dict[str, Any]:
    done = run("compare", *args, "--json")
    assert (done.code in (0, 3), done.err) == (True, "")  # too few steps outside the window for a verdict
    recorded = json.loads(done.out)["recorded_steps"]
    assert recorded["reason"] is None
    worst: dict[str, Any] = recorded["worst"]
    whole = worst["exact_difference"]
    parts = [row for row in worst["tables"]["phases"]["rows"] if row["part"] == "loop"]
    assert sum(row["exact_difference"] for row in worst["tables"]["ops"]["rows"]) == whole
    assert sum(row["exact_difference"] for row in parts) == whole
    assert worst["steps"] == [list(range(FIRST, LAST + 1))] * 2
    return worst


def ops(worst: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = worst["tables"]["ops"]["rows"]
    return rows


def structural(worst: dict[str, Any]) -> set[tuple[str, str]]:
    """What is not the same call in every step."""
    num = LAST - FIRST + 1
    return {
        (row["status"], row["name"])
        for row in ops(worst)
        if row["status"] != "matched" and row["first_seen"] in (0, num) and row["second_seen"] in (0, num)
    }


def test_run_does_not_differ_from_itself_and_one_that_is_run_again_makes_the_same_calls(runs: Any) -> None:
    itself = compared(runs(), runs())
    assert {row["exact_difference"] for row in ops(itself)} == {0}
    assert {row["change"] for row in ops(itself)} == {"within_noise"}
    assert structural(compared(runs(), runs(sleep=0))) == set()


def with_lead(folder: Path, expected: Any, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Train before and after a change until what is expected leads; gives that comparison.

    On a machine that others use whatever they slow down may lead for once, not three times.
    """
    found = []
    for number in range(3):
        a, b = train(folder / f"a{number}", **before), train(folder / f"b{number}", **after)
        worst = compared(a, b)
        lead = ops(worst)[0]
        found.append({name: lead[name] for name in ("status", "name", "phase", "difference_ns", "change")})
        if lead["difference_ns"] > 0 and all(lead[name] in values for name, values in expected.items()):
            return worst
    pytest.fail(f"something else leads: {found}")


def test_layer_twice_as_wide_leads_as_the_same_calls_on_other_shapes(tmp_path: Path) -> None:
    narrow, wide = 4 * WIDTH, 8 * WIDTH
    expected = {"name": ("aten::linear", "AddmmBackward0"), "status": ("reshaped",)}
    worst = with_lead(tmp_path, expected, {"width": narrow}, {"width": wide})
    linear = next(row for row in ops(worst) if row["name"] == "aten::linear" and row["status"] == "reshaped")
    assert (str(wide) in linear["input_shapes"], str(narrow) in linear["first_shapes"]) == (True, True)
    assert not {status for status, _ in structural(worst)} & {"new", "gone"}


def test_op_that_was_added_leads_as_new_in_forward_with_what_it_adds_to_backward(tmp_path: Path) -> None:
    expected = {"name": ("aten::sort",), "status": ("new",), "phase": ("forward",), "change": ("slower",)}
    worst = with_lead(tmp_path, expected, {}, {"extra": True})
    lead = ops(worst)[0]
    assert (lead["parents"], lead["first_count"], lead["second_count"]) == ([], 0, LAST - FIRST + 1)
    assert lead["calls_ns"] == lead["difference_ns"]
    assert ("new", "autograd::engine::evaluate_function: SortBackward0") in structural(worst)


def test_module_that_was_renamed_is_not_new(runs: Any) -> None:
    worst = compared(runs(), runs(label="encoder_v2"))
    assert structural(worst) == {("renamed", "encoder_v2")}
    inside = [row for row in ops(worst) if row["parents"] == ["encoder_v2"]]
    assert {row["name"] for row in inside} == {"aten::linear", "aten::relu"}
    assert {tuple(row["first_parents"]) for row in inside} == {("encoder",)}


def test_loader_that_sleeps_leads_as_python_in_input_wait(tmp_path: Path) -> None:
    expected = {"name": ("(outside any op)",), "phase": ("input_wait",), "change": ("slower",)}
    worst = with_lead(tmp_path, expected, {}, {"sleep": 0.1})
    assert ops(worst)[0]["difference_ns"] == pytest.approx(100e6, rel=0.2)
    assert structural(worst) == set()


def test_section_is_short_fits_the_screen_and_is_written_too(runs: Any, tmp_path: Path) -> None:
    a, b = runs(), runs(extra=True)
    done = run("compare", a, b, "-o", tmp_path / "out")
    assert done.err == ""
    assert (tmp_path / "out" / "compare.txt").read_text() == done.out
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content == json.loads(run("compare", a, b, "--json").out)
    tables = content["recorded_steps"]["worst"]["tables"]
    for table in tables.values():
        assert all(column["meaning"] for column in table["columns"])
        assert all([*row] == [column["name"] for column in table["columns"]] for row in table["rows"])
    lines = done.out.splitlines()[2:]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 70
    assert any("new: aten::sort" in line for line in lines)
    assert "Recorded steps" not in run("compare", a, b, "--phases-only").out


def test_runs_without_traces_and_tables_without_phases(runs: Any, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    (alone / "0_phases").mkdir(parents=True)
    (alone / "0_phases" / "rank-0.jsonl").write_bytes((runs() / "0_phases" / "rank-0.jsonl").read_bytes())
    found = json.loads(run("compare", runs(), alone, "--json").out)
    assert found["recorded_steps"] is None
    compared(runs(), runs())  # merges
    tables = tmp_path / "tables"
    shutil.copytree(runs() / "0_merged", tables)
    done = run("compare", tables, tables, "--json")
    content = json.loads(done.out)
    assert (done.code, content["verdict"]) == (3, "inconclusive")
    assert content["reason"].endswith("it recorded no phases of its steps")
    assert content["recorded_steps"]["worst"]["exact_difference"] == 0
    refused(run("compare", tables, tables, "--phases-only"), "has no step phases to compare")
