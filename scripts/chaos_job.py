"""One training of chaos.py: a framework, a fault, a way out and options, with or without a recording.

Prints a digest of weights and random state before every batch, and at the end; what went wrong on purpose ends the
process as it would end a job.
"""

import argparse
import ctypes
import hashlib
import importlib
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from integrations import contract
from integrations.contract import Plan
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

FRAMEWORKS = {
    "plain": ("test_contract_plain", "PlainJob"),
    "fabric": ("test_contract_fabric", "FabricJob"),
    "lightning": ("test_contract_lightning", "TestLightning"),
    "pytorch_lightning": ("test_contract_lightning", "TestPytorchLightning"),
    "ignite": ("test_contract_ignite", "IgniteJob"),
    "monai": ("test_contract_monai", "MonaiJob"),
    "huggingface": ("test_contract_huggingface", "HuggingFaceJob"),
}


def fail() -> None:
    raise RuntimeError("training failed")


def interrupt() -> None:
    raise KeyboardInterrupt


EXITS: dict[str, Callable[[], Any]] = {
    "end": lambda: None,
    "second_fit": lambda: None,
    "exception": fail,
    "interrupt": interrupt,
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys_exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(9),
}


def small_files(folder: Path) -> None:
    """Every file of this process ends at 20 kB, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def take_session(folder: Path) -> None:
    """Start a profiler inside the recording, as a library may; what it raises is its own affair."""
    try:
        with profile(activities=[ProfilerActivity.CPU]):
            torch.ones(2).sum()
    except RuntimeError as error:
        print(f"stolen: {error}", file=sys.stderr)


def link_targets(folder: Path) -> None:
    (folder / "0_chakra").mkdir(parents=True, exist_ok=True)
    victim = folder.parent / "victim"
    victim.write_text("keep")
    for name in ("rank-0.json", "rank-0.json.part"):
        if not (folder / "0_chakra" / name).exists():
            (folder / "0_chakra" / name).symlink_to(victim)


def observe(folder: Path) -> None:
    observer = ExecutionTraceObserver().register_callback(str(folder.parent / "theirs.json"))
    observer.start()


FAULTS: dict[str, Callable[[Path], Any]] = {
    "none": lambda folder: None,
    "folder_gone": lambda folder: shutil.rmtree(folder, ignore_errors=True),
    "disk_full": small_files,
    "stolen": take_session,
    "symlink": link_targets,
    "observer": observe,
    "gc": lambda folder: importlib.import_module("gc").collect(),
    "fork": lambda folder: os.waitpid(os.fork() or os._exit(0), 0),  # type: ignore[func-returns-value]
}
BEFORE = ("symlink", "observer")  # faults that are there before the window


def digest(network: torch.nn.Module) -> str:
    parts = [weight.detach().contiguous().view(torch.uint8).numpy().tobytes() for weight in network.parameters()]
    parts += [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def use(options: list[str]) -> None:
    """Change what the contract's jobs train with."""
    make_network, loss = contract.make_network, contract.Batches.loss

    def network() -> torch.nn.Module:
        made = make_network()
        if "compile" in options:
            made.compile(backend="eager")
        return made

    def data(plan: Plan) -> DataLoader[Any]:
        return DataLoader(contract.Items(plan.batches), batch_size=1, shuffle=True, num_workers=2)

    def other_loss(self: contract.Batches, made: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        if "bf16" in options:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss(self, made, inputs).float()
        if "checkpointing" in options:
            return loss(self, lambda x: checkpoint(made, x, use_reentrant=False), inputs)  # type: ignore[arg-type]
        return loss(self, made, inputs)

    contract.make_network, contract.Batches.loss = network, other_loss  # type: ignore[method-assign]
    if "workers" in options:
        contract.training_data = data
    if "threads" in options:
        threading.Thread(target=compute, daemon=True).start()


def compute() -> None:
    while True:
        torch.ones(16, 16) @ torch.ones(16, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--exit", choices=EXITS, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--options", nargs="*", default=[])
    parser.add_argument("--at", type=int, required=True, help="batch before which the fault, then the exit comes")
    parser.add_argument("--trace-dir", type=Path, required=True)
    parser.add_argument("--without", action="store_true", help="train without a recording")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: die with the process that started this one
    use(given.options)
    loss = contract.Batches.loss

    def watched(self: contract.Batches, network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        inner = getattr(network, "module", network)
        print(f"batch {self.number} {digest(inner)}", flush=True)
        if self.number == given.at:
            if given.fault not in BEFORE:
                FAULTS[given.fault](given.trace_dir)
            EXITS[given.exit]()
        return loss(self, network, inputs)

    contract.Batches.loss = watched  # type: ignore[method-assign]
    module, name = FRAMEWORKS[given.framework]
    found = getattr(importlib.import_module(f"integrations.{module}"), name)
    job = found.job if hasattr(found, "job") else found()
    accumulate = 2 if "accumulation" in given.options else 1
    plan = Plan(batches=12, accumulate=accumulate, validates="validation" in given.options)
    settings = {"enabled": True, "start_step": 2, "end_step": 4, "trace_dir": str(given.trace_dir)}
    adapter = None if given.without else job.adapter(settings, accumulate=accumulate)
    if given.fault in BEFORE:
        FAULTS[given.fault](given.trace_dir)
    for _ in range(2 if given.exit == "second_fit" else 1):
        result = job.train(adapter, plan)
        print("end", [weight.double().sum().item() for weight in result.weights], hash(str(result.random_states)))


if __name__ == "__main__":
    main()
