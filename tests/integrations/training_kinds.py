"""Ways to train that reach deep into torch: compiled, checkpointed, in lower precision, with unusual optimizers.

Each makes a network and a function that does one update with it; ``train`` runs one with a session and one without.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from chakra_capture.recording.session import Session

NUM_STEPS = 7
Update = Callable[[torch.Tensor], None]


@dataclass
class Trainee:
    """A network, how it is updated, and whatever holds the optimizer's state."""

    network: torch.nn.Module
    update: Update
    optimizers: list[torch.optim.Optimizer]


class Block(torch.nn.Module):
    """Dropout draws random numbers; a name that the profiler sees stands inside what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(inputs))))


def make_network() -> torch.nn.Module:
    random.seed(3)
    torch.manual_seed(3)
    return torch.nn.Sequential(Block(), Block())


def trainee(network: torch.nn.Module, forward: Callable[..., torch.Tensor] | None = None) -> Trainee:
    """Update with AdamW, whose state is checked too."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    call = network if forward is None else forward  # a compiled network has no truth value

    def update(inputs: torch.Tensor) -> None:
        call(inputs).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainee(network, update, [optimizer])


def checkpointed(reentrant: bool) -> Trainee:
    network = make_network()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        for block in network:
            inputs = checkpoint(block, inputs.requires_grad_(), use_reentrant=reentrant)
        return inputs

    return trainee(network, forward)


def autocast() -> Trainee:
    network = make_network()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return network(inputs)

    return trainee(network, forward)


def lbfgs() -> Trainee:
    network = make_network()
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.01, max_iter=3)

    def update(inputs: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Trainee(network, update, [optimizer])


def optimizer_in_backward() -> Trainee:
    network = make_network()
    _apply_optimizer_in_backward(torch.optim.AdamW, network.parameters(), {"lr": 0.01})
    optimizers = [o for weight in network.parameters() for o in weight._in_backward_optimizers]
    return Trainee(network, lambda inputs: network(inputs).sum().backward(), optimizers)


def optimizer_in_gradient_hook() -> Trainee:
    network, optimizers = make_network(), []
    for weight in network.parameters():
        optimizer = torch.optim.AdamW([weight], lr=0.01)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
        optimizers.append(optimizer)
    return Trainee(network, lambda inputs: network(inputs).sum().backward(), optimizers)


def train(made: Trainee, session: Session | None = None, before_step: Callable[[int], Any] = lambda step: None) -> None:
    for step in range(NUM_STEPS):
        before_step(step)
        with session.step(step) if session is not None else nullcontext():
            made.update(torch.randn(2, 8))


def state(made: Trainee) -> list[Any]:
    """All that the next step depends on, exactly."""
    found: list[Any] = [w.detach() for w in made.network.parameters()]
    for optimizer in made.optimizers:
        found += _values(optimizer.state_dict()["state"])
    local = [value.to_local() if hasattr(value, "to_local") else value for value in found]
    plain = [value.tolist() if isinstance(value, torch.Tensor) else value for value in local]
    return [*plain, torch.get_rng_state().tolist(), random.getstate()]


def _values(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _values(value)
    elif isinstance(content, list):
        for value in content:
            yield from _values(value)
    else:
        yield content
