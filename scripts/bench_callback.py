"""What the recording costs per step outside its window: medians of interleaved blocks, in one process.

In the middle of a real Lightning fit, the hooks of one step (the loop's fetch hook, batch start, batch end) are called
in blocks, ours and an empty callback's in turn: with automatic optimization, in the middle of an accumulation, and with
manual optimization, once with an update in every batch and once without; and, with phases, everything that is hooked
up, around a step that computes nothing. Then the same for a plain session, and for one that times phases. Exit code 1
above a bar.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.integrations.lightning import ChakraProfileCallback
from chakra_capture.layout import RunPaths
from chakra_capture.recording import trigger
from chakra_capture.recording.disk import Disk
from chakra_capture.recording.manifest import Manifest
from chakra_capture.recording.run import Run
from chakra_capture.recording.session import Session
from chakra_capture.recording.trigger import Trigger
from chakra_capture.recording.trigger.meeting import Meeting, OwnStore

BAR_NS, PHASES_BAR_NS, LIGHTNING_PHASES_BAR_NS = 1000, 30_000, 50_000
FAR = 10**9
LOOK_S = 3


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ManualModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class StillSGD(torch.optim.SGD):
    def step(self, closure: Callable[[], object]) -> None:
        closure()


class StillModel(Model):
    """Goes through the parts of a step, and computes in none."""

    def __init__(self) -> None:
        super().__init__()
        self.still = torch.nn.Identity()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.still(batch[0])

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return StillSGD(self.parameters(), lr=0.01)


def median_ns(ours: Callable[[], object], empty: Callable[[], object], blocks: int, calls: int) -> tuple[float, float]:
    """Time both in alternating blocks and return the median cost of one call of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(blocks):
        for run, found in zip((ours, empty), times, strict=True):
            start = time.thread_time_ns()
            for _ in range(calls):
                run()
            found.append((time.thread_time_ns() - start) / calls)
    return statistics.median(times[0]), statistics.median(times[1])


class Probe(pl.Callback):
    """Measures in the middle of a fit, where both callbacks are live."""

    def __init__(self, ours: ChakraProfileCallback, blocks: int, calls: int, *, updates: bool) -> None:
        self.ours, self.blocks, self.calls, self.updates = ours, blocks, calls, updates
        self.result: tuple[float, float] | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx != 5:
            return
        loop = trainer.fit_loop.epoch_loop
        plain_fetch = type(loop)._on_before_fetch.__get__(loop)
        nothing = pl.Callback()
        # What torch's optimizers call after a step; ours is the only one.
        told = [*_global_optimizer_post_hooks.values()] if self.updates else []
        untold = [lambda *_: None for _ in told]

        def step(callback: pl.Callback, fetch: Callable[[], None], hooks: list[Callable[..., None]]) -> None:
            fetch()
            callback.on_train_batch_start(trainer, pl_module, batch, batch_idx)
            for hook in hooks:
                hook(None, (), {})
            callback.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

        self.result = median_ns(
            lambda: step(self.ours, loop._on_before_fetch, told),
            lambda: step(nothing, plain_fetch, untold),
            self.blocks,
            self.calls,
        )


class PhasesProbe(Probe):
    """Measures the same of all that is hooked up for phases, against the methods of the classes."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx != 5:
            return
        loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
        plugin, nothing, closure = strategy.precision_plugin, pl.Callback(), lambda: None

        def calls(*, plain: bool) -> list[Callable[..., object]]:
            methods = [(loop, "_on_before_fetch"), (loop, "_on_after_fetch"), (strategy, "training_step")]
            methods += [(plugin, "backward"), (strategy, "optimizer_step")]
            return [getattr(type(o), m).__get__(o) if plain else getattr(o, m) for o, m in methods]

        def step(callback: pl.Callback, parts: list[Callable[..., object]], optimizer: torch.optim.Optimizer) -> None:
            before_fetch, after_fetch, training_step, backward, optimizer_step = parts
            before_fetch()
            after_fetch()
            callback.on_train_batch_start(trainer, pl_module, batch, batch_idx)
            loss = training_step(batch, batch_idx)
            backward(loss, pl_module, optimizer)
            optimizer_step(optimizer, closure)
            callback.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

        wrapped, plain = calls(plain=False), calls(plain=True)
        ours, theirs = trainer.optimizers[0], pl_module.configure_optimizers()
        self.result = median_ns(
            lambda: step(self.ours, wrapped, ours), lambda: step(nothing, plain, theirs), self.blocks, self.calls
        )


def lightning_cost(
    settings: ChakraProfileConfig,
    blocks: int,
    calls: int,
    *,
    manual: bool = False,
    updates: bool = False,
    group: int = 1,
) -> tuple[float, float]:
    ours = ChakraProfileCallback(settings)
    probe = (PhasesProbe if settings.phases else Probe)(ours, blocks, calls, updates=updates)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ours, probe],
        accumulate_grad_batches=group,
    )
    model = StillModel() if settings.phases else ManualModel() if manual else Model()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 4))))
    assert probe.result is not None
    return probe.result


def lightning_phases_cost(settings: ChakraProfileConfig, blocks: int, calls: int) -> tuple[float, float]:
    # A call takes some hundred times that of the others.
    return lightning_cost(replace(settings, phases=True), blocks, max(1, calls // 20))


def session_cost(settings: ChakraProfileConfig, blocks: int, calls: int) -> tuple[float, float]:
    def nothing(step: int) -> None:
        pass

    with capture(settings) as session:
        session.start_step(0)
        session.end_step(0)
        start, end = session.start_step, session.end_step
        return median_ns(lambda: (start(7), end(7)), lambda: (nothing(7), nothing(7)), blocks, calls)


def phases_cost(settings: ChakraProfileConfig, blocks: int, calls: int) -> tuple[float, float]:
    """A step of a plain loop with its four phases timed, against one with four empty brackets."""

    def step(session: Session) -> None:
        session.start_step(steps[0])
        for name in ("input_wait", "forward", "backward", "optimizer"):
            with session.phase(name):
                pass
        session.end_step(steps[0])
        steps[0] += 1

    steps = [0]
    with capture(replace(settings, phases=True)) as session, capture(replace(settings, enabled=False)) as off:
        return median_ns(lambda: step(session), lambda: step(off), blocks, calls)


def look_cost(settings: ChakraProfileConfig, *, in_store: bool) -> float:
    """CPU time (ns) of one look for a request, in the thread that looks; a job pays it once a second."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False) if in_store else OwnStore()
    told = Manifest("id", "look", int(in_store), 1 + in_store, settings={}, versions={})
    run = Run(RunPaths(Path(settings.trace_dir), "look"), told, Disk(Path(settings.trace_dir)))
    looks = Trigger(settings, run, lambda: None)
    looks._meeting = Meeting("id", 2, lambda: store)
    threads = {thread.ident for thread in threading.enumerate()}
    before, trigger.INTERVAL_S = trigger.INTERVAL_S, 0.01
    try:
        looks.start()
        (thread,) = [thread for thread in threading.enumerate() if thread.ident not in threads]
        clock = time.pthread_getcpuclockid(thread.ident)
        time.sleep(0.1)
        start, begin = time.clock_gettime_ns(clock), time.monotonic()
        time.sleep(LOOK_S)
        num_looks = (time.monotonic() - begin) / trigger.INTERVAL_S
        return (time.clock_gettime_ns(clock) - start) / num_looks
    finally:
        trigger.INTERVAL_S = before
        looks.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=31)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = ChakraProfileConfig(enabled=True, start_step=FAR, end_step=FAR, trace_dir=folder, phases=False)
        bars = {phases_cost: PHASES_BAR_NS, lightning_phases_cost: LIGHTNING_PHASES_BAR_NS}
        measures = {
            "lightning callback": lightning_cost,
            "lightning, accumulating": partial(lightning_cost, group=4),
            "lightning, manual": partial(lightning_cost, manual=True, updates=True),
            "lightning, manual, no update": partial(lightning_cost, manual=True),
            "lightning callback, phases": lightning_phases_cost,
            "plain session": session_cost,
            "plain session, phases": phases_cost,
        }
        for name, measure in measures.items():
            ours, empty = measure(settings, chosen.blocks, chosen.calls)
            bar = bars.get(measure, BAR_NS)
            rows[name] = {"ours_ns": ours, "empty_ns": empty, "own_ns": ours - empty, "bar_ns": bar}
        looks = {
            "rank 0, for a file": look_cost(settings, in_store=False),
            "other ranks, in the store": look_cost(settings, in_store=True),
        }
    if chosen.json:
        print(json.dumps({"rows": rows, "look_ns": looks}))
    else:
        print(f"{'per step, outside the window':30} {'with us':>9} {'empty':>9} {'our own':>9} {'bar':>9}")
        for name, row in rows.items():
            print(
                f"{name:30} {row['ours_ns']:6.0f} ns {row['empty_ns']:6.0f} ns {row['own_ns']:6.0f} ns "
                f"{row['bar_ns']:6d} ns"
            )
        for name, ns in looks.items():
            print(f"a request looked for once a second, by a thread: {name}: {ns / 1000:.0f} us of CPU")
    return int(any(row["own_ns"] > row["bar_ns"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
