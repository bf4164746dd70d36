"""A 3D UNet on patches of CT volumes, trained by MONAI: each flag changes one thing about how its data is loaded.

    monai_dataloading_bottleneck.py --data-dir data               # data/Task09_Spleen, of the Segmentation Decathlon
    monai_dataloading_bottleneck.py --data-dir made --synthetic   # makes such a folder first; downloads nothing
    monai_dataloading_bottleneck.py --data-dir data --num-workers 4 --trace-dir faster   # one thing changed

Two runs that differ in one flag measure that flag: chakra-capture compare chakra_traces faster. The same on CUDA and on
the CPU. Needs nibabel beside chakra-capture[monai].
"""

import argparse
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from monai.data import CacheDataset, DataLoader, Dataset, PersistentDataset, ThreadDataLoader
from monai.engines import SupervisedTrainer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    Lambdad,
    LoadImaged,
    Orientationd,
    RandCropByPosNegLabeld,
    RandFlipd,
    ScaleIntensityRanged,
    Spacingd,
    SpatialPadd,
)
from spleen_folder import KEYS, TASK, make_folder, read_folder, task_folder

from chakra_capture.integrations.monai import ChakraProfileHandler, TraceMLHandler, init

LEVELS = 4


def delayed(seconds: float, image: Any) -> Any:
    time.sleep(seconds)
    return image


def transforms(chosen: argparse.Namespace) -> Compose:
    """Up to the random ones they give the same for a volume every time: that is what the caches keep."""
    patch = (chosen.patch,) * 3
    return Compose(
        [
            LoadImaged(KEYS),
            *([Lambdad("image", functools.partial(delayed, chosen.read_delay))] if chosen.read_delay else []),
            EnsureChannelFirstd(KEYS),
            Orientationd(KEYS, axcodes="RAS", labels=None),
            Spacingd(KEYS, pixdim=(1.5, 1.5, 2.0), mode=("bilinear", "nearest")),
            ScaleIntensityRanged("image", a_min=-57, a_max=164, b_min=0.0, b_max=1.0, clip=True),
            CropForegroundd(KEYS, source_key="image", allow_smaller=True),
            SpatialPadd(KEYS, spatial_size=patch),
            RandCropByPosNegLabeld(
                KEYS,
                label_key="label",
                spatial_size=patch,
                pos=1,
                neg=1,
                num_samples=chosen.patches,
                image_key="image",
                image_threshold=0,
            ),
            RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        ]
    )


def make_loader(chosen: argparse.Namespace, pairs: list[dict[str, str]], cache_dir: str) -> DataLoader:
    change = transforms(chosen)
    if chosen.dataset == "cache":
        data: Dataset = CacheDataset(pairs, change, num_workers=max(1, chosen.num_workers), progress=False)
    elif chosen.dataset == "persistent":
        data = PersistentDataset(pairs, change, cache_dir=cache_dir)
        for _ in data:  # filled before the first step, as the cache in memory is
            pass
    else:
        data = Dataset(pairs, change)
    loader = ThreadDataLoader if chosen.loader == "thread" else DataLoader
    return loader(
        data,
        batch_size=chosen.batch_size,
        shuffle=True,
        num_workers=chosen.num_workers,
        persistent_workers=chosen.num_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


def train(chosen: argparse.Namespace, loader: DataLoader) -> int:
    """Train, record the phases of every step, and return how often the optimizer has stepped."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"device: {device}", flush=True)
    if chosen.amp and device.type == "cpu":
        print("--amp has no effect on the CPU: MONAI's trainer has mixed precision on CUDA alone.", file=sys.stderr)
    torch.manual_seed(0)
    channels = tuple(chosen.width * 2**level for level in range(LEVELS))
    network = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=channels, strides=(2,) * (LEVELS - 1), norm="batch"
    ).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    updates: Counter[str] = Counter()
    optimizer.register_step_post_hook(lambda *_: updates.update(["update"]))
    init()
    SupervisedTrainer(
        device=device,
        max_epochs=chosen.epochs,
        train_data_loader=loader,
        network=network,
        optimizer=optimizer,
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
        amp=chosen.amp and device.type == "cuda",
        train_handlers=[handler(chosen)],
    ).run()
    return updates["update"]


def handler(chosen: argparse.Namespace) -> ChakraProfileHandler:
    """Into the folder that was named; else TraceML's handler, which `chakra-capture run` gives a folder."""
    if chosen.trace_dir is None and chosen.run_name is None:
        return TraceMLHandler()
    folder = str(chosen.trace_dir or "chakra_traces")
    return ChakraProfileHandler({"enabled": True, "start_step": None, "trace_dir": folder, "job_id": chosen.run_name})


def patch_edge(text: str) -> int:
    if (edge := int(text)) < 1 or edge % 2 ** (LEVELS - 1):
        raise argparse.ArgumentTypeError(f"{edge} is no multiple of {2 ** (LEVELS - 1)}, which the UNet needs")
    return edge


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help=f"folder with dataset.json, or with {TASK} in it")
    add("--synthetic", action="store_true", help="make the folder first, if there is none")
    add("--volumes", type=int, default=12, help="of a synthetic folder (default: %(default)s)")
    add("--size", type=int, nargs=3, default=(160, 160, 64), help="voxels of a synthetic volume (default: 160 160 64)")
    add("--dataset", choices=("plain", "persistent", "cache"), default="plain", help="nothing kept, on disk, in memory")
    add("--num-workers", type=int, default=0, help="processes that load (default: 0, the training's own)")
    add("--loader", choices=("plain", "thread"), default="plain", help="DataLoader or ThreadDataLoader")
    add("--amp", action="store_true", help="mixed precision, on CUDA")
    add("--batch-size", type=int, default=2, help="volumes of a step (default: %(default)s)")
    add("--patches", type=int, default=4, help="patches cut from each volume (default: %(default)s)")
    add("--patch", type=patch_edge, default=96, help="voxels along the edge of a patch (default: %(default)s)")
    add("--width", type=int, default=16, help="channels of the UNet's first level (default: %(default)s)")
    add("--epochs", type=int, default=6, help="default: %(default)s")
    add(
        "--read-delay", type=float, default=0.0, metavar="S", help="sleep so long on each volume, as slow storage would"
    )
    add("--trace-dir", type=Path, help="where the run is written (default: chakra_traces)")
    add("--run-name", help="first part of the run's folder names")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    folder = task_folder(chosen.data_dir)
    if chosen.synthetic and not (folder / "dataset.json").is_file():
        make_folder(folder, chosen.volumes, tuple(chosen.size))
    pairs = read_folder(folder)
    with tempfile.TemporaryDirectory() as cache_dir:
        begin = time.monotonic()
        loader = make_loader(chosen, pairs, cache_dir)
        print(f"prepared in s: {time.monotonic() - begin:.2f}")
        updates = train(chosen, loader)
    print(f"updates made by the trainer: {updates}")


if __name__ == "__main__":
    main(sys.argv[1:])
