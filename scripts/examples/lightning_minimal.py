"""A small network trained by Lightning: where does the time of its steps go, and that between them?

Downloads nothing and takes some seconds. Prints the trainer's own count of updates beside the steps recorded, and the
mean of every phase; ``chakra-capture summary chakra_traces`` shows more of it.
"""

import argparse
import json
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture.integrations.lightning import ChakraProfileCallback

PHASES_ONLY = {"enabled": True, "start_step": None, "trace_dir": "chakra_traces"}


class Digits(pl.LightningModule):
    """Tells which of ten corners of a cube a point lies next to."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def points(number: int) -> TensorDataset:
    corners = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(number) % 10
    return TensorDataset(corners[labels] + 0.5 * torch.randn(number, 64), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulation-steps", type=int, default=1)
    chosen = parser.parse_args()
    trainer = pl.Trainer(
        max_epochs=chosen.epochs,
        accumulate_grad_batches=chosen.accumulation_steps,
        callbacks=[ChakraProfileCallback(PHASES_ONLY)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(points(640), batch_size=64, shuffle=True), DataLoader(points(128), batch_size=64))

    (path,) = Path("chakra_traces").glob("*_phases/rank-0.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines() if '"kind":"step"' in line]
    print(f"updates made by the trainer: {trainer.global_step}")
    print(f"steps recorded: {len(steps)}")
    for name in ("input_wait", "forward", "backward", "optimizer"):
        print(f"{name:12} {sum(step['phases'].get(name, [0])[0] for step in steps) / len(steps) / 1e6:8.3f} ms")


if __name__ == "__main__":
    main()
