"""Small Lightning modules and a trainer without trimmings."""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

warnings.filterwarnings("ignore", module="pytorch_lightning")
warnings.filterwarnings("ignore", module="lightning_fabric")


class Model(pl.LightningModule):
    """One linear layer; each batch is visible in a trace as ``batch <epoch>.<batch_idx>``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with record_function(f"batch {self.current_epoch}.{batch_idx}"):
            return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with record_function("validation"):
            self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TwoOptimizers(Model):
    """Manual optimization; both optimizers step with every batch, so global_step rises by two."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.01) for p in self.layer.parameters()]


class Stream(IterableDataset):
    """A dataset without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        for _ in range(self.size):
            yield (torch.randn(4),)


def loader(size: int = 20, num_workers: int = 0) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(size, 4)), batch_size=1, num_workers=num_workers)


def trainer(*callbacks: Any, max_epochs: int = 1, **changes: Any) -> pl.Trainer:
    chosen = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": max_epochs,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**chosen, **changes})
