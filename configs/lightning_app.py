"""A Lightning training whose Hydra configuration records a window of its steps: one callback, nothing else."""

import hydra
import torch
from omegaconf import DictConfig
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture.integrations.lightning import ChakraProfileCallback


class Regression(LightningModule):
    """A small network."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


@hydra.main(version_base="1.3", config_path=".", config_name="lightning_app")
def main(config: DictConfig) -> None:
    """Train on random data."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))
    trainer = Trainer(**config.trainer, callbacks=[ChakraProfileCallback(config.chakra_profile)])
    trainer.fit(Regression(config.hidden), DataLoader(data, batch_size=16))
    print(f"{trainer.global_step} steps, traces in {config.chakra_profile.trace_dir}")


if __name__ == "__main__":
    main()
