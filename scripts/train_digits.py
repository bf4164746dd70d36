"""Train a small network on scikit-learn's digits with Lightning DDP; Hydra can switch a recording on."""

import hydra
import torch
from omegaconf import DictConfig
from pytorch_lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from chakra_capture.integrations.lightning import ChakraProfileCallback


class Digits(LightningModule):
    """A convolution and two linear layers for 8x8 images of ten digits."""

    def __init__(self, hidden: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 64, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 10),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def digits() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """The 1797 images that ship with scikit-learn, split into training and validation data."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    train, validation = random_split(TensorDataset(images, torch.tensor(data.target)), [0.8, 0.2])
    return train, validation


@hydra.main(version_base="1.3", config_path="../configs", config_name="digits")
def main(config: DictConfig) -> None:
    seed_everything(config.seed, verbose=False)
    train, validation = digits()
    loaders = DataLoader(train, config.batch_size, shuffle=True), DataLoader(validation, config.batch_size)
    trainer = Trainer(**config.trainer, callbacks=[ChakraProfileCallback(config.chakra_profile)])
    trainer.fit(Digits(config.hidden, config.learning_rate), *loaders)
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"].item()
        print(f"{trainer.global_step} steps on {trainer.world_size} processes, validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
