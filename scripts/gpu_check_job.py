"""The trainings of gpu_check.py, each recorded in a window in its middle.

    gpu_check_job.py FOLDER SECONDS [CASE]...

Each writes FOLDER/told/CASE.json: what it says of its own steps, by its own clock and CUDA events of its own, to hold
the recording against. With CUDA every case has a process of its own, for an error on the device ends all work of a
process; without, one process runs them all, smaller, and those that need a device say that they do.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from chakra_capture import capture

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = "needs a CUDA device"
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
# Steps before the window, in it and after it.
STEPS = (60, 3, 60) if HAS_CUDA else (4, 2, 4)
CASE_LIMIT_S = 120.0
PHASES = ("input_wait", "h2d", "forward", "backward", "optimizer")
Batch = tuple[torch.Tensor, torch.Tensor]


class Skipped(Exception):
    """This machine cannot run the case; the text says why."""


@dataclass
class Case:
    """One training: where it is recorded, and what it says of itself."""

    name: str
    folder: Path
    phases: tuple[str, ...] = PHASES
    steps_ns: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    num_steps = sum(STEPS)
    window = (STEPS[0], STEPS[0] + STEPS[1] - 1)

    @property
    def settings(self) -> dict[str, Any]:
        first, last = self.window
        place = {"trace_dir": str(self.folder), "job_id": self.name}
        return {"enabled": True, "start_step": first, "end_step": last, **place, "compress": True}

    @contextmanager
    def phase(self, session: Any, name: str) -> Iterator[None]:
        """A phase of the recording, and around it a pair of CUDA events of the training's own."""
        first = _event()
        with session.phase(name):
            yield
        self.marks.append((name, first, _event()))

    @contextmanager
    def step(self, session: Any, step: int) -> Iterator[None]:
        begin = time.perf_counter_ns()
        with session.step(step):
            yield
        self.steps_ns.append(time.perf_counter_ns() - begin)

    def told(self) -> dict[str, Any]:
        """As JSON; the device has come to its end."""
        device_ns: dict[str, list[int]] = {}
        if HAS_CUDA:
            torch.cuda.synchronize()
            for name, first, last in self.marks:
                device_ns.setdefault(name, []).append(round(first.elapsed_time(last) * 1e6))
        return {
            "window": self.window,
            "phases": self.phases,
            "steps_ns": self.steps_ns,
            "device_ns": device_ns,
            **self.facts,
        }


def _event() -> Any:
    if not HAS_CUDA:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def conv() -> nn.Module:
    width, size = (64, 10) if HAS_CUDA else (4, 10)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, size)).to(DEVICE)


def images() -> Iterator[Batch]:
    number, size = (128, 64) if HAS_CUDA else (2, 8)
    return _repeated(lambda: (torch.randn(number, 3, size, size), torch.randn(number, 10)))


def transformer() -> nn.Module:
    width, heads, layers = (512, 8, 4) if HAS_CUDA else (16, 2, 1)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(width, 16)).to(DEVICE)


def sequences() -> Iterator[Batch]:
    shape = (16, 256, 512) if HAS_CUDA else (2, 8, 16)
    return _repeated(lambda: (torch.randn(shape), torch.randn(*shape[:2], 16)))


def _repeated(make: Callable[[], Batch]) -> Iterator[Batch]:
    """Some batches over and over, in memory that the device can read by itself."""
    batches = [make() for _ in range(4)]
    if HAS_CUDA:
        batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
    return cycle(batches)


def to_device(batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)


def plain(
    case: Case,
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    precision: torch.dtype | None = None,
    stage: Callable[[Batch], Batch] = to_device,
    after_backward: Callable[[torch.Tensor], None] = lambda _: None,
) -> None:
    """A loop of one's own. Every step ends with the loss on the host, so it waits for the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Without scaling it hands through; with it, half precision needs it.
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision is torch.float16)
    with capture(case.settings) as session:
        for step in range(case.num_steps):
            with case.step(session, step):
                with case.phase(session, "input_wait"):
                    batch = next(batches)
                with case.phase(session, "h2d"):
                    inputs, targets = stage(batch)
                with case.phase(session, "forward"):
                    with torch.autocast(DEVICE.type, dtype=precision) if precision else nullcontext():
                        outputs = model(inputs)
                    loss = mse_loss(outputs.float(), targets)
                with case.phase(session, "backward"):
                    scaler.scale(loss).backward()
                    after_backward(loss)
                with case.phase(session, "optimizer"):
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                loss.item()


def side_stream(case: Case) -> None:
    """Batches are copied and scaled on a stream of their own, for which the other one waits."""
    aside = torch.cuda.Stream()

    def stage(batch: Batch) -> Batch:
        with torch.cuda.stream(aside):
            inputs, targets = to_device(batch)
            inputs = inputs * 0.5
        main = torch.cuda.current_stream()
        main.wait_stream(aside)
        for tensor in (inputs, targets):
            tensor.record_stream(main)  # or its memory may be given away while the other stream reads it
        return inputs, targets

    plain(case, conv(), images(), stage=stage)


def cuda_graph(case: Case) -> None:
    """A whole step, captured before the recording begins and replayed in every step."""
    case.phases = ("h2d", "replay")
    model, batches = conv(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = to_device(next(batches))

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()
    with capture(case.settings) as session:
        for step in range(case.num_steps):
            with case.step(session, step):
                with case.phase(session, "h2d"):
                    for held, new in zip((inputs, targets), next(batches), strict=True):
                        held.copy_(new, non_blocking=True)
                with case.phase(session, "replay"):
                    graph.replay()
                loss.item()


def compiled(case: Case) -> None:
    """A compiled model, by inductor where it can make kernels."""
    why = NEEDS_CUDA if not HAS_CUDA else None if _has_compiler() else "inductor needs a C compiler"
    case.facts["no_inductor"] = why
    plain(case, torch.compile(transformer(), backend="eager" if why else "inductor"), sequences())


def _has_compiler() -> bool:
    return any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def process_group(case: Case) -> None:
    """DistributedDataParallel, and collectives of the loop's own, in a group of one process: NCCL, else gloo."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    case.facts["backend"] = backend = "nccl" if HAS_CUDA else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else None
    if not dist.is_backend_available(backend):
        raise Skipped(f"this torch has no {backend}")
    store = dist.FileStore(str(case.folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)

    def after_backward(loss: torch.Tensor) -> None:
        mean = loss.detach().reshape(1).clone()
        dist.all_reduce(mean)
        dist.all_gather([torch.empty_like(mean)], mean)

    try:
        model = nn.parallel.DistributedDataParallel(conv(), device_ids=None if device is None else [device])
        plain(case, model, images(), after_backward=after_backward)
    finally:
        dist.destroy_process_group()


def monai(case: Case) -> None:
    """MONAI's SupervisedTrainer on a small UNet, with mixed precision on CUDA."""
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    from chakra_capture.integrations.monai import ChakraProfileHandler

    case.phases = ("input_wait", "forward", "backward", "optimizer")
    channels, size = ((16, 32, 64), 48) if HAS_CUDA else ((2, 4), 8)
    network = UNet(3, 1, 1, channels, strides=(2,) * (len(channels) - 1)).to(DEVICE)
    volume = {"image": torch.randn(1, size, size, size), "label": torch.ones(1, size, size, size)}
    SupervisedTrainer(
        device=DEVICE,
        max_epochs=1,
        train_data_loader=DataLoader(Dataset([volume] * 2 * case.num_steps), batch_size=2),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1e-3),
        loss_function=DiceLoss(sigmoid=True),
        amp=HAS_CUDA,
        train_handlers=[ChakraProfileHandler(case.settings)],
    ).run()


def lightning(case: Case) -> None:
    """Lightning's Trainer, in mixed precision."""
    from pytorch_lightning import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from chakra_capture.integrations.lightning import ChakraProfileCallback

    case.phases = ("input_wait", "forward", "backward", "optimizer")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = conv()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = cross_entropy(self.network(batch[0]).float(), batch[1])
            loss.item()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    number, size = (32, 64) if HAS_CUDA else (2, 8)
    data = TensorDataset(
        torch.randn(number * case.num_steps, 3, size, size), torch.arange(number * case.num_steps) % 10
    )
    Trainer(
        accelerator="gpu" if HAS_CUDA else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ChakraProfileCallback(case.settings)],
    ).fit(Module(), DataLoader(data, batch_size=number, pin_memory=HAS_CUDA))


CASES: dict[str, Callable[[Case], None]] = {
    "conv-fp32": lambda case: plain(case, conv(), images()),
    "conv-bf16": lambda case: plain(case, conv(), images(), precision=torch.bfloat16),
    "transformer-fp32": lambda case: plain(case, transformer(), sequences()),
    "transformer-amp": lambda case: plain(case, transformer(), sequences(), precision=torch.float16),
    "side-stream": side_stream,
    "cuda-graph": cuda_graph,
    "compiled": compiled,
    "process-group": process_group,
    "monai": monai,
    "lightning": lightning,
}
NEED_CUDA = {"transformer-amp", "side-stream", "cuda-graph"}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run one case; what it says of itself, or why there is nothing to say."""
    case, began = Case(name, folder), time.monotonic()
    try:
        if name in NEED_CUDA and not HAS_CUDA:
            raise Skipped(NEEDS_CUDA)
        torch.manual_seed(0)
        CASES[name](case)
        return {"outcome": "ran", "seconds": round(time.monotonic() - began, 1), **case.told()}
    except ImportError as fault:
        return {"outcome": "skipped", "why": f"{fault.name or fault} is not installed"}
    except Skipped as skipped:
        return {"outcome": "skipped", "why": str(skipped)}
    except Exception as fault:  # noqa: BLE001 (whatever becomes of one case, the others are wanted)
        traceback.print_exc()
        return {"outcome": "failed", "why": f"{type(fault).__name__}: {fault}".splitlines()[0]}


def run_apart(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """The same in a process of its own, which may crash or hang."""
    if seconds <= 0:
        return {"outcome": "skipped", "why": "the time for the whole check was up"}
    command = [sys.executable, __file__, str(folder), str(seconds), name]
    try:
        done = subprocess.run(command, check=False, timeout=min(seconds, CASE_LIMIT_S))
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "why": f"it did not end within {min(seconds, CASE_LIMIT_S):.0f} s"}
    if done.returncode:
        return {"outcome": "failed", "why": f"its process ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(_told(folder, name).read_text())
    return found


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "has_cuda": HAS_CUDA}
    if HAS_CUDA:
        found |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
    return {**found, "num_cpus": os.cpu_count()}


def _told(folder: Path, name: str) -> Path:
    return folder / "told" / f"{name}.json"


def main() -> None:
    folder, ends = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    names = sys.argv[3:]
    is_apart = HAS_CUDA and len(names) != 1
    _told(folder, "x").parent.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        told = run_apart(name, folder, ends - time.monotonic()) if is_apart else run(name, folder)
        _told(folder, name).write_text(json.dumps(told))
    (folder / "machine.json").write_text(json.dumps(machine()))


if __name__ == "__main__":
    main()
