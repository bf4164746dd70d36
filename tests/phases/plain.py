"""A plain loop that notes when each thing happens, and where those moments lie in what was recorded of it."""

import json
import time
from pathlib import Path
from typing import Any

import torch

PHASES = "0_phases/rank-0.jsonl"


def lines(trace_dir: Path, kind: str = "step") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (trace_dir / PHASES).read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def calls(trace_dir: Path, *flags: str) -> list[dict[str, int]]:
    """How often each phase was entered, of every step that is not cut short."""
    whole = [line for line in lines(trace_dir) if "partial" not in line.get("flags", ())]
    return [{name: count for name, (_, count) in line["phases"].items()} for line in whole]


def numbers(trace_dir: Path) -> list[tuple[int, bool]]:
    """Number of every step in the file, and whether it is whole."""
    return [(line["step"], "partial" not in line.get("flags", ())) for line in lines(trace_dir)]


class Tape:
    """Moments of the loop, by the clock of the recording."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []
        self.begin_ns = time.monotonic_ns()

    def __call__(self, name: str) -> None:
        self.notes.append((name, time.monotonic_ns()))

    def placed(self, trace_dir: Path) -> list[tuple[str, int | None, str | None]]:
        """Of every moment, the step that holds it and the innermost phase in that step."""
        # A later training of the same process goes on in the same file.
        steps = [step for step in lines(trace_dir) if step["begin_ns"] + step["ns"] >= self.begin_ns]
        return [(name, *_place(steps, when)) for name, when in self.notes]


def _place(steps: list[dict[str, Any]], when: int) -> tuple[int | None, str | None]:
    for step in steps:
        since = when - step["begin_ns"]
        if 0 <= since <= step["ns"]:
            around = [(begin, name) for name, begin, end in step["spans"] if begin <= since <= end]
            return step["step"], max(around)[1] if around else None
    return None, None


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, tape: Tape) -> torch.Tensor:
        ctx.tape = tape
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tape("backward")
        return gradient, None


class Network(torch.nn.Module):
    """One weight; notes its forward and its backward."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.tape = tape

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.tape("forward")
        return _Noted.apply(self.layer(inputs), self.tape)


class Optimizer(torch.optim.SGD):
    def __init__(self, network: torch.nn.Module, tape: Tape) -> None:
        super().__init__(network.parameters(), lr=0.1)
        self.tape = tape

    def step(self, closure: Any = None) -> Any:
        self.tape("optimizer")
        return super().step(closure)


class Batches:
    """An iterable without length; notes the reading of each batch, and the end."""

    def __init__(self, tape: Tape, num_batches: int, name: str = "fetch") -> None:
        self.tape, self.num_batches, self.name = tape, num_batches, name

    def __iter__(self) -> Any:
        for _ in range(self.num_batches):
            self.tape(self.name)
            yield torch.ones(1, 1)
        self.tape(f"{self.name} ends")
