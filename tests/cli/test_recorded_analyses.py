"""Analyses of what is recorded only when asked for, on runs that this project records itself."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from recording.recorded import read, settings
from torch.utils.checkpoint import checkpoint

from chakra_capture import capture

STEPS, BLOCKS = (2, 3), 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Net(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x


def record(folder: Path, net: Net, **changes: Any) -> Path:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with capture(settings(folder, *STEPS, **changes)) as session:
        for _, _ in session.steps(range(5)):
            x = torch.ones(8, 16, requires_grad=True)
            with session.phase("forward"):
                loss = net(x).double().sum()
            with session.phase("backward"):
                loss.backward()
            with session.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return folder


def answer(name: str, *args: Any) -> list[dict[str, Any]]:
    done = run("analyze", name, *args, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["rows"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("options", "again"), [
    ({}, {}),
    ({"use_reentrant": True}, {"aten::linear": 8, "aten::relu": 4}),
    # Stops as soon as it has what backward needs: the last linear of a block is not needed.
    ({"use_reentrant": False}, {"aten::linear": 8, "aten::relu": 4}),
])  # fmt: skip
def test_checkpoints_are_spotted_and_nothing_else_is(
    options: dict[str, bool], again: dict[str, int], tmp_path: Path
) -> None:
    rows = answer("spotted", record(tmp_path, Net(**options)))
    found = {row["name"]: row["count"] for row in rows if row["what"] == "recompute" and row["name"]}
    assert found == again
    (whole,) = [row for row in rows if row["what"] == "recompute" and row["name"] is None]
    assert (whole["count"], whole["device_ns"]) == (sum(again.values()), None)
    assert (whole["backward_share"] > 0) == bool(again)
    types = {row["name"]: row["count"] for row in rows if row["what"] == "dtype conversion" and row["name"]}
    assert types == {"float -> double": 2, "double -> float": 2}


def test_gradients_of_gradients_are_no_recompute(tmp_path: Path) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with capture(settings(tmp_path, *STEPS)) as session:
        for _, _ in session.steps(range(5)):
            (grad,) = torch.autograd.grad((weight @ weight).pow(3).sum(), weight, create_graph=True)
            grad.pow(2).sum().backward()
    assert [row["name"] for row in answer("spotted", tmp_path) if row["what"] == "recompute"] == [None]


def test_modules_and_allocations_of_a_recording_with_both(tmp_path: Path) -> None:
    record(tmp_path, Net(), with_stack=True, profile_memory=True)
    events = read(tmp_path / "0_kineto/rank-0.json")["traceEvents"]
    tree = answer("modules", tmp_path)
    calls = Counter(e["name"].removeprefix("nn.Module: ") for e in events if str(e["name"]).startswith("nn.Module: "))
    assert {row["module"]: row["count"] for row in tree} == calls
    net, *inside = [row for row in tree if row["depth"] <= 1]
    assert (net["path"], len(inside)) == ("Net_0", BLOCKS)
    assert net["total_ns"] == sum(row["self_ns"] for row in tree)
    assert all(row["backward_ns"] > 0 and row["device_total_ns"] is None for row in tree)
    by_step = [answer("modules", tmp_path, "--step", step)[0]["total_ns"] for step in STEPS]
    assert sum(by_step) == net["total_ns"]
    records = [e["args"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "[memory]"]
    (row,) = answer("allocations", tmp_path)
    assert row["allocator"] == "cpu"
    assert row["peak_reserved_bytes"] is None
    assert row["peak_bytes"] == max(max(a["Total Allocated"], a["Total Allocated"] - a["Bytes"]) for a in records)
    assert row["growth_bytes"] == sum(a["Bytes"] for a in records)
    phases = {row["phase"] for row in answer("allocations", tmp_path, "--by", "step", "phase") if row["step"] == 3}
    assert {"forward", "backward", "optimizer"} <= phases
    in_use = [row["in_use_bytes"] for row in answer("allocations", tmp_path, "--timeline")]
    assert in_use == [a["Total Allocated"] for a in records]


def test_what_was_not_asked_for_is_not_recorded_and_never_zero(tmp_path: Path) -> None:
    record(tmp_path, Net())
    for name, setting in (("allocations", "profile_memory"), ("modules", "with_stack")):
        shown = json.loads(run("analyze", name, tmp_path, "--json").out)
        assert shown["rows"] == []
        assert f"rank 0: {name} not recorded, record with {setting}: true" in shown["notes"]
