"""Trainings of chaos.py with one framework: each a framework, a fault, a way out and options, with or without us.

Reads a list of trainings from stdin, imports the framework once and forks a process for each training. That prints a
digest of weights, optimizer state and random state before every batch, and at the end; what goes wrong on purpose ends
the process as it would end a job. Prints the exit statuses as a list; null for a training that hangs.
"""

import argparse
import atexit
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
import torch._dynamo
import torch.distributed.fsdp
from integrations import contract
from integrations.contract import Plan
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

# Where its job is, and what that imports, to be imported once.
FRAMEWORKS = {
    "plain": ("test_contract_plain", "PlainJob", ["chakra_capture"]),
    "fabric": ("test_contract_fabric", "FabricJob", ["lightning_fabric"]),
    "lightning": ("test_contract_lightning", "TestLightning", ["lightning.pytorch", "pytorch_lightning"]),
    "pytorch_lightning": (
        "test_contract_lightning",
        "TestPytorchLightning",
        ["lightning.pytorch", "pytorch_lightning"],
    ),
    "ignite": ("test_contract_ignite", "IgniteJob", ["ignite.engine"]),
    "monai": ("test_contract_monai", "MonaiJob", ["ignite.engine", "monai.engines", "monai.handlers"]),
    "huggingface": ("test_contract_huggingface", "HuggingFaceJob", ["transformers.trainer", "accelerate"]),
}
TIMEOUT_S = 120


def fail() -> None:
    raise RuntimeError("training failed")


def interrupt() -> None:
    raise KeyboardInterrupt


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


EXITS: dict[str, Callable[[], Any]] = {
    "end": lambda: None,
    "second_fit": lambda: None,
    "exception": fail,
    "out_of_memory": run_out_of_memory,
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


def keep_profiling(folder: Path) -> None:
    profile(activities=[ProfilerActivity.CPU]).start()


def catch_error_of_op(folder: Path) -> None:
    try:
        torch.ones(2, 3) @ torch.ones(2, 3)
    except RuntimeError:
        print("caught", file=sys.stderr)


FAULTS: dict[str, Callable[[Path], Any]] = {
    "none": lambda folder: None,
    "folder_gone": lambda folder: shutil.rmtree(folder, ignore_errors=True),
    "disk_full": small_files,
    "hung": lambda folder: (folder.parent / "hung").touch(),  # tests/recording/hang.c does the rest
    "symlink": link_targets,
    "stolen": take_session,
    "profiler": keep_profiling,
    "observer": observe,
    "op_error": catch_error_of_op,
    "gc": lambda folder: gc.collect(),
    "fork": lambda folder: os.waitpid(os.fork() or os._exit(0), 0),  # type: ignore[func-returns-value]
}
BEFORE = ("symlink", "profiler", "observer")  # faults that are there before the window


@dataclass
class Training:
    """What is watched of one training."""

    at: int
    fault: Callable[[], Any]
    leave: Callable[[], Any]
    network: torch.nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def say(self, name: object) -> None:
        """Print a digest of all that training depends on."""
        state = [list(self.network.parameters()) if self.network is not None else []]
        state += [list(optimizer.state.values()) for optimizer in self.optimizers]
        parts = [*tensors_and_numbers(state), torch.get_rng_state().numpy().tobytes()]
        numpy_state: Any = np.random.get_state()
        parts += [repr(random.getstate()).encode(), numpy_state[1].tobytes(), repr(numpy_state[2:]).encode()]
        print(name, hashlib.sha256(b"".join(parts)).hexdigest()[:16], flush=True)

    def reach(self, number: int, network: torch.nn.Module) -> None:
        """Stand before a batch."""
        self.network = network
        self.say(f"batch {number}")
        if number == self.at:
            self.fault()
            self.leave()


def tensors_and_numbers(state: object) -> Iterator[bytes]:
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        yield local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(state, dict):
        for key, value in state.items():
            yield str(key).encode()
            yield from tensors_and_numbers(value)
    elif isinstance(state, list):
        for value in state:
            yield from tensors_and_numbers(value)
    else:
        yield repr(state).encode()


class WithItsClosure(torch.optim.LBFGS):
    """LBFGS of a loop that the user writes, which gives it the closure that only LBFGS needs."""

    def __init__(self, parameters: Iterable[torch.Tensor], closure: Callable[[], torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.01, max_iter=3)
        self.closure = closure

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure or self.closure)


def use(options: list[str], training: Training) -> None:
    """Change what the contract's jobs train with."""
    make_network, loss = contract.make_network, contract.Batches.loss
    latest: list[Any] = []

    def network() -> torch.nn.Module:
        np.random.seed(1)
        made = make_network()
        training.optimizers.clear()
        if "fsdp2" in options:
            shard(made)
        if "compile" in options:
            made.compile(backend="eager")
        return made

    def optimizer(made: torch.nn.Module) -> torch.optim.Optimizer:
        chosen = torch.optim.AdamW(made.parameters(), lr=0.01)
        if "lbfgs" in options:
            chosen = WithItsClosure(made.parameters(), repeat)
        training.optimizers.append(chosen)
        return chosen

    def data(plan: Plan) -> DataLoader[Any]:
        return DataLoader(contract.Items(plan.batches), batch_size=1, shuffle=True, num_workers=2)

    def forward(made: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in options):
            if "checkpointing" in options:
                return checkpoint(made, inputs, use_reentrant=False)  # type: ignore[no-any-return]
            return made(inputs)  # type: ignore[no-any-return]

    def repeat() -> torch.Tensor:
        with torch.enable_grad():
            training.optimizers[-1].zero_grad()
            value = forward(*latest).float().sum()
            value.backward()
        return value

    def other_loss(self: contract.Batches, made: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        training.reach(self.number, getattr(made, "module", made))
        latest[:] = made, inputs
        return loss(self, lambda x: forward(made, x), inputs).float()  # type: ignore[arg-type]

    contract.make_network, contract.make_optimizer = network, optimizer
    contract.Batches.loss = other_loss  # type: ignore[method-assign]
    if "workers" in options:
        contract.training_data = data
        if "transformers" in sys.modules:
            transformers: Any = sys.modules["transformers"]
            transformers.TrainingArguments = functools.partial(transformers.TrainingArguments, dataloader_num_workers=2)
    if "threads" in options:
        ended = threading.Event()
        thread = threading.Thread(target=compute, args=(ended,), daemon=True)
        # A thread that computes when the interpreter has ended ends the process (torch). Ours closes before this.
        atexit.register(lambda: (ended.set(), thread.join()))
        thread.start()


def shard(network: torch.nn.Module) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in (network[0], network[2], network):  # type: ignore[index]
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)


def compute(ended: threading.Event) -> None:
    while not ended.is_set():
        torch.ones(16, 16) @ torch.ones(16, 16)


def train(framework: str, task: dict[str, Any]) -> None:
    """Be the process of one training."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: die with the process that started this one
    os.chdir(task["folder"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    traces, options = Path(task["folder"]) / "traces", task["options"]
    if task["fault"] == "hung":
        os.environ.update(HANG_UNDER=str(traces), HANG_WHILE=str(traces.parent / "hung"))
    fault = functools.partial(FAULTS[task["fault"]], traces)
    is_before = task["fault"] in BEFORE
    training = Training(task["at"], (lambda: None) if is_before else fault, EXITS[task["exit"]])
    use(options, training)
    module, name, _ = FRAMEWORKS[framework]
    found = getattr(importlib.import_module(f"integrations.{module}"), name)
    job = found.job if hasattr(found, "job") else found()
    accumulate = 2 if "accumulation" in options else 1
    plan = Plan(batches=12, accumulate=accumulate, validates="validation" in options)
    settings = {"enabled": True, "start_step": 2, "end_step": 4, "trace_dir": str(traces)}
    adapter = job.adapter(settings, accumulate=accumulate) if task["records"] else None
    if is_before:
        fault()
    for _ in range(2 if task["exit"] == "second_fit" else 1):
        job.train(adapter, plan)
        training.say("end")
    if "compile" in options:
        counted = torch._dynamo.utils.counters
        print("end", sorted((kind, sorted(counts.items())) for kind, counts in counted.items()))


def wait_for(child: int) -> int | None:
    """Return the exit status of a process, negative for a signal; None if it had to be ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    framework = parser.parse_args().framework
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    tasks = json.loads(sys.stdin.read())
    for package in FRAMEWORKS[framework][2]:
        importlib.import_module(package)
    gc.freeze()  # The end of a child would visit, and so copy, all of what it inherits.
    statuses = []
    for task in tasks:
        child = os.fork()
        if child == 0:
            train(framework, task)
            return
        statuses.append(wait_for(child))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
