"""A training made of sleeps of known phases, for truth_phases.py: it notes by its own clock how long each part took.

    truth_job.py CASE TOOL OUT.json      TOOL: ours | theirs (TraceML 0.5)

OUT.json holds, of each update in order, how long each phase took, and how long its sleeps alone, in ns.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

SLEEPS = {"input_wait": 0.008, "forward": 0.010, "backward": 0.012, "optimizer": 0.007, "residual": 0.005}
GAP = 0.006
BATCHES, EPOCHS = 10, 3


class Truth:
    """Sleeps, and sums by update what each part took by the clock."""

    def __init__(self) -> None:
        self.updates: list[dict[str, int]] = []
        self.gaps: list[int] = []
        self.num_sleeps = self.overshoot_ns = self.backward_began = 0
        self._now: dict[str, int] = {}

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter_ns()
        time.sleep(seconds)
        self.num_sleeps += 1
        self.overshoot_ns += time.perf_counter_ns() - start - round(seconds * 1e9)

    def add(self, phase: str, start: int) -> None:
        self._now[phase] = self._now.get(phase, 0) + time.perf_counter_ns() - start

    def update(self) -> None:
        self.updates.append(self._now)
        self._now = {}

    def begin_backward(self, _: object) -> None:
        self.backward_began = time.perf_counter_ns()

    def drop(self) -> None:
        """What was done since the last update comes to nothing."""
        self._now = {}

    def gap(self) -> None:
        start = time.perf_counter_ns()
        self.sleep(GAP)
        self.gaps.append(time.perf_counter_ns() - start)


TRUTH = Truth()


def read_one() -> torch.Tensor:
    start = time.perf_counter_ns()
    TRUTH.sleep(SLEEPS["input_wait"])
    row = torch.ones(1)
    TRUTH.add("input_wait", start)
    return row


class Sized(Dataset):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return read_one()


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(BATCHES):
            yield read_one()


class Slow(torch.autograd.Function):
    """Sleeps in both directions."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        TRUTH.sleep(SLEEPS["forward"])
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        TRUTH.sleep(SLEEPS["backward"])
        return gradient


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        # The last thing that runs backward.
        self.weight.register_post_accumulate_grad_hook(lambda _: TRUTH.add("backward", TRUTH.backward_began))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter_ns()
        outputs = Slow.apply(self.weight * inputs)
        TRUTH.add("forward", start)
        return outputs


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        # As torch's own: what a trainer gives as closure runs first.
        loss = closure() if closure is not None else None
        start = time.perf_counter_ns()
        TRUTH.sleep(SLEEPS["optimizer"])
        super().step()
        TRUTH.add("optimizer", start)
        TRUTH.update()
        return loss


def loss_of(outputs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    start = time.perf_counter_ns()
    TRUTH.sleep(SLEEPS["residual"])
    loss = outputs.sum()
    # The first thing that runs backward.
    loss.register_hook(TRUTH.begin_backward)
    TRUTH.add("residual", start)
    return loss


def plain(tool: str, accumulation: int, is_sized: bool) -> None:
    network = Network()
    optimizer: Any = Optimizer(network.parameters(), lr=0.01)
    loader: Any = DataLoader(Sized(), batch_size=None)
    step: Callable[[], Any] = nullcontext
    if tool == "ours":
        from chakra_capture import phases

        phases.init()
        loader, forward, wrap_loss = phases.wrap_dataloader(loader), phases.wrap_forward(network), phases.wrap_backward
    else:
        import traceml_ai as phases

        phases.init(mode="manual")
        loader, forward, wrap_loss = (
            phases.wrap_dataloader_fetch(loader),
            phases.wrap_forward(network),
            phases.wrap_backward,
        )

        def step() -> Any:
            return phases.trace_step(network)

    phases.wrap_optimizer(optimizer)
    for _ in range(EPOCHS):
        for batch in loader:
            with step():
                optimizer.zero_grad()
                wrap_loss(loss_of(forward(batch))).backward()
                optimizer.step()
            TRUTH.gap()


def monai(tool: str, accumulation: int, is_sized: bool) -> None:
    if tool == "ours":
        from chakra_capture.integrations import monai as adapter
    else:
        from traceml_ai.integrations import monai as adapter
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer

    adapter.init()
    network = Network()
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=EPOCHS,
        train_data_loader=DataLoader(Sized() if is_sized else Unsized(), batch_size=None),
        prepare_batch=lambda batch, *_, **__: (batch, batch),
        network=network,
        optimizer=Optimizer(network.parameters(), lr=0.01),
        loss_function=loss_of,
        train_handlers=[adapter.TraceMLHandler()],
        decollate=False,
        accumulation_steps=accumulation,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TRUTH.gap)
    if not is_sized:
        # In the first epoch MONAI does not know the length, and loses the gradients of the batches that are left.
        trainer.add_event_handler(Events.EPOCH_COMPLETED, TRUTH.drop)
    trainer.run()


def lightning(tool: str, accumulation: int, is_sized: bool) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return loss_of(self.network(batch))

        def configure_optimizers(self) -> Any:
            return Optimizer(self.parameters(), lr=0.01)

        def on_train_batch_end(self, *_: Any) -> None:
            TRUTH.gap()

    if tool == "ours":
        from chakra_capture import ChakraProfileConfig
        from chakra_capture.integrations.lightning import ChakraProfileCallback

        chosen = ChakraProfileConfig(enabled=True, start_step=None, trace_dir="chakra_traces")
        callback: Any = ChakraProfileCallback(chosen)
    else:
        from traceml_ai.integrations import lightning as adapter

        adapter.init()
        callback = adapter.TraceMLCallback()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulation,
        callbacks=[callback],
        **quiet,
    )
    trainer.fit(Module(), DataLoader(Sized(), batch_size=None))


CASES: dict[str, tuple[Callable[[str, int, bool], None], int, bool]] = {
    "plain": (plain, 1, True),
    "monai": (monai, 1, True),
    "monai, 3 to an update": (monai, 3, True),
    "monai, 3 to an update, unsized": (monai, 3, False),
    "lightning": (lightning, 1, True),
    "lightning, 3 to an update": (lightning, 3, True),
}


def main(case: str, tool: str, out: str) -> None:
    train, accumulation, is_sized = CASES[case]
    torch.set_num_threads(1)
    train(tool, accumulation, is_sized)
    overshoot = TRUTH.overshoot_ns / TRUTH.num_sleeps
    Path(out).write_text(json.dumps({"updates": TRUTH.updates, "gaps": TRUTH.gaps, "overshoot_ns": overshoot}))


if __name__ == "__main__":
    main(*sys.argv[1:])
