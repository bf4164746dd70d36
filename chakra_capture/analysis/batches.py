"""How many batches a step takes, and how many samples a batch holds."""

from statistics import median_low
from typing import NamedTuple

import polars as pl

from chakra_capture.annotations import INPUT_WAIT

# Each is called once per batch, as a rule, which tells how many batches a step takes.
_PER_BATCH = (INPUT_WAIT, "forward", "backward", "iteration")


class Batches(NamedTuple):
    """Micro-batches of a step: the mean, and whether all steps have as many."""

    mean: float
    are_even: bool


def batches_of(phases: pl.DataFrame, rows: pl.Series) -> Batches | None:
    """Micro-batches of a step, by how often most of its phases were called; None where nothing tells.

    One request may be for all batches of a step, and a model may be called more than once for one.
    """
    found = []
    for name in _PER_BATCH:
        calls = phases.filter(phase=name)["num_calls"].to_list()
        if len(calls) == len(rows) and calls and min(calls) > 0:
            found.append(Batches(sum(calls) / len(calls), len(set(calls)) == 1))
    return median_low(found) if found else None


def batch_sizes(steps: pl.DataFrame) -> tuple[int, int] | None:
    """The smallest and the largest batch that was looked at, in samples; None where none was."""
    found = steps["batch_size"].drop_nulls().to_list()
    return (min(found), max(found)) if found else None
