"""A small UNet on synthetic volumes, trained by MONAI: where does the time of its steps go?

Downloads nothing and takes some seconds. Prints how often the trainer itself has updated beside the steps recorded, and
the mean of every phase; the lines it reads are those of chakra_traces/0_phases/rank-0.jsonl.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandGaussianNoised

from chakra_capture.integrations.monai import TraceMLHandler, init


def volumes(number: int, size: int) -> Dataset:
    """Noise with a bright cube in it, and the cube as its label."""
    generator, items = torch.Generator().manual_seed(0), []
    for _ in range(number):
        label = torch.zeros(1, size, size, size)
        corner = torch.randint(0, size // 2, (3,), generator=generator).tolist()
        label[(0, *(slice(c, c + size // 2) for c in corner))] = 1
        items.append({"image": label + torch.randn(label.shape, generator=generator), "label": label})
    keys = ("image", "label")
    change = [RandFlipd(keys, prob=0.5), RandGaussianNoised("image", prob=1.0), EnsureTyped(keys)]
    return Dataset(items, Compose(change))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volumes", type=int, default=16)
    parser.add_argument("--size", type=int, default=16, help="voxels along an edge")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulation-steps", type=int, default=1)
    chosen = parser.parse_args()

    network = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    updates: Counter[str] = Counter()
    optimizer.register_step_post_hook(lambda *_: updates.update(["update"]))

    init()
    SupervisedTrainer(
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_epochs=chosen.epochs,
        train_data_loader=DataLoader(volumes(chosen.volumes, chosen.size), batch_size=2),
        network=network,
        optimizer=optimizer,
        loss_function=DiceLoss(sigmoid=True),
        accumulation_steps=chosen.accumulation_steps,
        train_handlers=[TraceMLHandler()],
    ).run()

    (path,) = Path("chakra_traces").glob("*_phases/rank-0.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    print(f"updates made by the trainer: {updates['update']}")
    print(f"steps recorded:              {len(steps)}")
    for name in ("input_wait", "forward", "backward", "optimizer"):
        print(f"{name:12} {sum(step['phases'].get(name, [0])[0] for step in steps) / len(steps) / 1e6:8.3f} ms")
    print(f"{'whole step':12} {sum(step['ns'] for step in steps) / len(steps) / 1e6:8.3f} ms")


if __name__ == "__main__":
    main()
