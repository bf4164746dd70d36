"""The folder of the Medical Segmentation Decathlon's spleen task: read, or made of noise in the same form."""

import json
from pathlib import Path

import nibabel
import numpy as np

TASK = "Task09_Spleen"
KEYS = ("image", "label")
VOXEL_MM = (1.0, 1.0, 2.5)


def task_folder(data_dir: Path) -> Path:
    """The folder of the task: ``data_dir`` itself, or in it."""
    return data_dir if (data_dir / "dataset.json").is_file() else data_dir / TASK


def make_folder(folder: Path, number: int, size: tuple[int, int, int]) -> None:
    """Write a folder as the Decathlon has it: noise of a body in air, and a brighter organ with its label."""
    pairs = [{key: f"./{key}sTr/spleen_{at}.nii.gz" for key in KEYS} for at in range(1, number + 1)]
    for key in KEYS:
        (folder / f"{key}sTr").mkdir(parents=True, exist_ok=True)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in size), indexing="ij"))
    is_body = (grid**2).sum(axis=0) < 0.9
    for at, pair in enumerate(pairs):
        noise = np.random.default_rng(at)
        centre = noise.uniform(-0.3, 0.3, 3)[:, None, None, None]
        is_organ = ((grid - centre) ** 2).sum(axis=0) < 0.12
        hounsfield = np.where(is_body, np.where(is_organ, 120, 40), -1000) + noise.normal(0, 20, size)
        for key, values in zip(KEYS, (hounsfield.astype(np.int16), is_organ.astype(np.uint8)), strict=True):
            nibabel.save(nibabel.Nifti1Image(values, np.diag([*VOXEL_MM, 1.0])), folder / pair[key])
    described = {
        "name": "Spleen",
        "description": "Synthetic volumes in the form of the spleen task",
        "reference": "none",
        "licence": "none: random numbers",
        "release": "1.0",
        "tensorImageSize": "3D",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "spleen"},
        "numTraining": number,
        "numTest": 0,
        "training": pairs,
        "test": [],
    }
    # Last: a folder without it is made again.
    (folder / "dataset.json").write_text(json.dumps(described, indent=1))


def read_folder(folder: Path) -> list[dict[str, str]]:
    """Paths of image and label of each training volume."""
    listed = folder / "dataset.json"
    if not listed.is_file():
        raise SystemExit(
            f"{folder} has no dataset.json. Give --data-dir the folder that holds {TASK}, or make one with --synthetic."
        )
    try:
        pairs = [{key: str(folder / pair[key]) for key in KEYS} for pair in json.loads(listed.read_bytes())["training"]]
    except (ValueError, KeyError, TypeError) as fault:
        raise SystemExit(
            f"{listed} is none of the Decathlon ({fault!r}). It needs a list 'training' of image and label."
        ) from fault
    paths = [Path(pair[key]) for pair in pairs for key in KEYS]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"names {missing[0]}, which is not there" if missing else "lists no training volume"
        raise SystemExit(f"{listed} {what}. Unpack the task again, or give another folder with --data-dir.")
    return pairs
