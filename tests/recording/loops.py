"""Small training loops."""

from collections.abc import Iterator

import torch


class Clock:
    """Goes on by a nanosecond whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def work() -> None:
    """One real forward and backward."""
    weight = torch.ones(4, 4, requires_grad=True)
    (weight @ weight).sum().backward()


def train(session, num_steps: int, first: int = 0) -> None:
    for step in range(first, num_steps):
        with session.step(step):
            work()


def micro_batches(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(step, micro-batch in it) of each of ``total`` batches, ``size`` to a step."""
    for batch in range(total):
        yield batch // size, batch % size
