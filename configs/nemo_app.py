"""A module built as NeMo builds its models: it holds ``cfg``, and profiling is a section of that."""

import hydra
import torch
from omegaconf import DictConfig
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture.integrations.lightning import ChakraProfilingMixin


class Model(ChakraProfilingMixin, LightningModule):
    """A small network in the shape of NeMo's ModelPT."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, cfg.hidden), torch.nn.ReLU(), torch.nn.Linear(cfg.hidden, 1)
        )
        self._setup_chakra_profiling()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


@hydra.main(version_base="1.3", config_path=".", config_name="nemo_app")
def main(config: DictConfig) -> None:
    """Train on random data."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))
    trainer = Trainer(**config.trainer)
    trainer.fit(Model(config.model), DataLoader(data, batch_size=16))
    print(f"{trainer.global_step} steps, traces in {config.model.chakra_profile.trace_dir}")


if __name__ == "__main__":
    main()
