"""Small MONAI trainers whose phases are known, and what the phase file says of them."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.inferers import SimpleInferer
from torch.utils.data import IterableDataset

CPU = torch.device("cpu")
PHASES = "0_phases/rank-0.jsonl"
PHASES_ONLY = {"enabled": True, "start_step": None, "trace_dir": "chakra_traces"}
# What an engine that is traced has.
OURS = "_chakra_capture_handler"


def rows(size: int) -> list[dict[str, torch.Tensor]]:
    return [{"image": torch.ones(1, 4), "label": torch.ones(1, 1)} for _ in range(size)]


class Slow(Dataset):
    """Items that take a known time to read."""

    def __init__(self, size: int, delay: float = 0.0) -> None:
        super().__init__(rows(size))
        self.delay = delay

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.delay)
        return self.data[index]


class Stream(IterableDataset):
    """Items without a number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        yield from rows(self.size)


def sized(size: int = 8, delay: float = 0.0, **more: Any) -> DataLoader:
    return DataLoader(Slow(size, delay), batch_size=2, **more)


def stream(size: int = 8) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Stream(size), batch_size=2)


class Napping(torch.nn.Module):
    """A network whose forward and backward take a known time."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.forward_s, self.backward_s = forward, backward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        out = self.layer(inputs)
        if self.backward_s and out.requires_grad:
            out.register_hook(lambda _: time.sleep(self.backward_s))
        return out


class NappingSGD(torch.optim.SGD):
    """An optimizer whose step takes a known time."""

    nap = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.nap)
        return super().step(closure)


def trainer(*handlers: Any, loader: Any = None, epochs: int = 1, kind: type = SupervisedTrainer, **changes: Any) -> Any:
    network = changes.pop("network", None) or torch.nn.Linear(4, 1)
    chosen = {
        "device": CPU,
        "max_epochs": epochs,
        "train_data_loader": sized() if loader is None else loader,
        "network": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.01),
        "loss_function": torch.nn.MSELoss(),
        "inferer": SimpleInferer(),
        "train_handlers": list(handlers),
    }
    return kind(**{**chosen, **changes})


def count_updates(made: Any) -> list[int]:
    """The iterations after which the optimizer has stepped, as the optimizer itself says."""
    found: list[int] = []
    made.optimizer.register_step_post_hook(lambda *_: found.append(made.state.iteration))
    return found


def lines(kind: str | None = None, folder: str | Path = "chakra_traces", job: str = "0") -> list[dict[str, Any]]:
    path = Path(folder) / PHASES.replace("0_", f"{job}_", 1)
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def steps(folder: str | Path = "chakra_traces") -> list[dict[str, Any]]:
    """The steps that came to their end."""
    return [line for line in lines("step", folder) if "partial" not in line.get("flags", [])]


def calls(step: dict[str, Any], name: str) -> int:
    return step["phases"].get(name, [0, 0])[1]


def ms(step: dict[str, Any], name: str) -> float:
    return step["phases"].get(name, [0, 0])[0] / 1e6


def work_ms(step: dict[str, Any]) -> float:
    """A step without what comes between its batches."""
    between = sum(step["phases"].get(name, [0])[0] for name in ("validation", "checkpoint", "callbacks"))
    return (step["ns"] - between) / 1e6


def residual_ms(step: dict[str, Any]) -> float:
    return (step["ns"] - sum(ns for ns, _ in step["phases"].values())) / 1e6


def measured(folder: str | Path = "chakra_traces") -> dict[str, str | None]:
    return lines("measures", folder)[-1]["phases"]
