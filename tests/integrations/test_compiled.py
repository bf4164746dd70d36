"""Compiled and modern training: nothing of ours is traced, breaks a graph or changes a bit."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from recording.recorded import check_pair, device_ids, entries, host_ids, manifest, settings, steps
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from chakra_capture import capture
from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations import training_kinds
from integrations.models import Model, loader, trainer
from integrations.training_kinds import Trainee, make_network, state, train, trainee


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass
class Counted:
    """What was compiled in one training, as dynamo and the backend that it calls count it."""

    backend: CompileCounterWithBackend = field(default_factory=lambda: CompileCounterWithBackend("eager"))

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()

    @property
    def numbers(self) -> dict[str, Any]:
        found = {name: dict(counters[name]) for name in ("graph_break", "stats", "unimplemented", "resumes")}
        return {**found, "graphs": self.backend.frame_count, "ops": self.backend.op_count}


def whole(backend: Any) -> Trainee:
    network = make_network()
    return trainee(network, torch.compile(network, backend=backend))


def in_place(backend: Any) -> Trainee:
    network = make_network()
    network.compile(backend=backend)
    return trainee(network)


def fullgraph(backend: Any) -> Trainee:
    network = make_network()
    return trainee(network, torch.compile(network, backend=backend, fullgraph=True))


def children(backend: Any) -> Trainee:
    network = make_network()
    for block in network:
        block.compile(backend=backend)
    return trainee(network)


def with_broken_graph(backend: Any) -> Trainee:
    network = make_network()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        inputs = network[0](inputs)
        torch._dynamo.graph_break()
        with torch.profiler.record_function("second"):
            return network[1](inputs)

    return trainee(network, torch.compile(forward, backend=backend))


def with_optimizer(backend: Any) -> Trainee:
    made = trainee(make_network()[0].first)
    made.optimizers[0].step = torch.compile(made.optimizers[0].step, backend=backend)
    return made


def rounds(make: Callable[[Any], Trainee], trace_dir: Path | None) -> list[Any]:
    """Train twice: what is compiled is so in the first round with us attached already, in the second before that."""
    counted = Counted()
    made, seen = make(counted.backend), []
    for _ in range(2):
        with capture(settings(trace_dir, 2, 4) if trace_dir else {"enabled": False}) as session:
            train(made, session)
        seen.append((counted.numbers, state(made)))
    return seen


def check_two_rounds(trace_dir: Path) -> None:
    check_pair(trace_dir, [2, 3, 4])
    check_pair(trace_dir, [2, 3, 4], cycle=1)
    assert manifest(trace_dir)["complete"]


@pytest.mark.parametrize("make", [whole, in_place, fullgraph, children, with_broken_graph, with_optimizer])
def test_compiled_training_compiles_and_computes_the_same_with_us(tmp_path, make):
    bare = rounds(make, None)
    assert bare[0][0]["graphs"] > 0

    assert rounds(make, tmp_path) == bare
    check_two_rounds(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: trainee(make_network()),
        partial(training_kinds.checkpointed, reentrant=True),
        training_kinds.autocast,
        training_kinds.lbfgs,
        training_kinds.optimizer_in_backward,
        training_kinds.optimizer_in_gradient_hook,
    ],
    ids=["eager", "reentrant", "bf16", "lbfgs", "optimizer_in_backward", "optimizer_in_gradient_hook"],
)
def test_modern_training_computes_the_same_with_us(tmp_path, make):
    bare = rounds(lambda _: make(), None)
    assert bare[0][1] != bare[1][1]

    assert rounds(lambda _: make(), tmp_path) == bare
    check_two_rounds(tmp_path)


def test_checkpointing_that_stops_recomputing_early_computes_the_same_with_us(tmp_path):
    def make(_: Any) -> Trainee:
        return training_kinds.checkpointed(reentrant=False)

    assert rounds(make, tmp_path) == rounds(make, None)
    host, device = tmp_path / "0_chakra/rank-0.json", tmp_path / "0_kineto/rank-0.json"
    assert steps(host) == steps(device) == [2, 3, 4]
    # An exception of torch's own ends the recomputation in the last layer of each of two blocks, in each of three
    # steps; the observer does not write ops that end so.
    missing = device_ids(device) - host_ids(host)
    cut = [e["name"] for e in entries(device) if e.get("args", {}).get("Record function id") in missing]
    assert sorted(cut) == 6 * ["aten::addmm"] + 6 * ["aten::linear"]


def test_tensors_of_the_window_can_be_swapped_as_soon_as_it_is_over(tmp_path):
    # Moving a module that fully_shard has sharded swaps its weights, which fails while anything refers to them weakly;
    # events with shapes do. Lightning moves the module when training ends.
    weight = torch.ones(4, 4)
    gc.disable()
    try:
        with capture(settings(tmp_path, 1, 2)) as session:
            for step in range(3):
                with session.step(step):
                    weight @ weight
            torch.utils.swap_tensors(weight, torch.zeros(4, 4))
    finally:
        gc.enable()
    assert weight.sum() == 0
    check_pair(tmp_path, [1, 2])


class Layer(torch.nn.Linear):
    """A layer of the user's own: torch does not compile one of its own layers alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(inputs))


class CompiledChild(Model):
    """Lightning sees a module of which a part is compiled."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = Layer(4, 1)
        self.layer.compile(backend=backend, fullgraph=True)


class CompiledStep(Model):
    """The optimizer's step is compiled; Lightning cannot see when it updates, so we watch every optimizer."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.backend = backend

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        self.compiled_step = torch.compile(optimizer.step, backend=self.backend)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.compiled_step()
        self.optimizers(use_pl_optimizer=False).zero_grad()


def fits(make: Callable[[Any], Any], trace_dir: Path | None) -> list[Any]:
    counted = Counted()
    made, seen = make(counted.backend), []
    callbacks = [ChakraProfileCallback(settings(trace_dir, 2, 4))] if trace_dir else []
    torch.manual_seed(4)
    for _ in range(2):
        trainer(*callbacks).fit(made, loader(7))
        seen.append((counted.numbers, [w.tolist() for w in made.parameters()], torch.get_rng_state().tolist()))
    return seen


@pytest.mark.parametrize(
    "make",
    [lambda backend: torch.compile(CompiledChild("eager"), backend=backend), CompiledChild, CompiledStep],
    ids=["module", "child", "optimizer"],
)
def test_lightning_compiles_and_computes_the_same_with_us(tmp_path, make):
    bare = fits(make, None)
    assert bare[0][0]["graphs"] > 0

    assert fits(make, tmp_path) == bare
    check_two_rounds(tmp_path)
