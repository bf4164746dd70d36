"""Which batches a step of a MONAI trainer holds and which are lost, against what is in the gradients at each update."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from integrations.contract import our_warnings
from monai.handlers import ValidationHandler

from chakra_capture.integrations.monai import ChakraProfileHandler
from phases.monai_runs import calls, count_updates, lines, sized, steps, stream, trainer


class Marking(torch.nn.Module):
    """A network that leaves its mark in the gradient: iteration i in place i of its weight, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.engine: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight[self.engine.state.iteration] * torch.ones(len(inputs), 1)


@dataclass(frozen=True)
class Plan:
    batches: int
    group: int
    epochs: int
    is_sized: bool
    epoch_length: int | None = None
    cut_epoch_at: int | None = None
    interrupt_at: int | None = None
    end_at: int | None = None


def run(plan: Plan, folder: Path) -> list[list[int]]:
    """Train; returns the iterations whose gradients each update applies."""
    network = Marking()
    handler = ChakraProfileHandler({"enabled": True, "start_step": None, "trace_dir": str(folder)})
    loader = (sized if plan.is_sized else stream)(2 * plan.batches)
    made = trainer(
        handler, loader=loader, epochs=plan.epochs, epoch_length=plan.epoch_length, accumulation_steps=plan.group,
        network=network,
    )  # fmt: skip
    network.engine = made
    applied: list[list[int]] = []

    def note(*_: Any) -> None:
        applied.append(torch.nonzero(network.weight.grad).flatten().tolist())

    made.optimizer.register_step_pre_hook(note)
    for at, act in (
        (plan.cut_epoch_at, made.terminate_epoch), (plan.interrupt_at, made.interrupt), (plan.end_at, made.terminate)
    ):  # fmt: skip
        if at:
            made.add_event_handler(Events.ITERATION_COMPLETED(once=at), act)
    made.run()
    if plan.interrupt_at and made._internal_run_generator is not None:
        made.run()
    applied.append(list(range(1, made.state.iteration + 1)))
    return applied


at = st.none() | st.integers(1, 12)
plans = st.builds(
    Plan, batches=st.integers(1, 6), group=st.integers(1, 4), epochs=st.integers(1, 3), is_sized=st.booleans(),
    epoch_length=st.none() | st.integers(1, 8), cut_epoch_at=at, interrupt_at=at, end_at=at,
)  # fmt: skip


@settings(max_examples=25)
@example(Plan(5, 2, 2, True, cut_epoch_at=3))
@example(Plan(6, 3, 1, True, interrupt_at=2))
@example(Plan(5, 2, 2, False, cut_epoch_at=3))
@given(plans)
def test_steps_hold_the_batches_of_their_update_and_only_lost_ones_are_called_lost(plan):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        *applied, seen = run(plan, folder)
        found, lost = steps(folder), [batch for line in lines("dropped", folder) for batch in line["batches"]]
    never = [batch for batch in seen if not any(batch in group for group in applied)]
    sizes = [calls(step, "forward") for step in found]
    if plan.interrupt_at is None:
        assert sizes == [len(group) for group in applied]
        assert lost == never
    else:
        # The step that an interruption cuts is partial, and the next one holds the rest of its group.
        assert len(sizes) == len(applied)
        assert [size == len(group) for size, group in zip(sizes, applied, strict=True)].count(False) <= 1
        assert {*lost} <= {*never}


def test_a_group_that_goes_on_after_a_cut_epoch_is_one_step_and_nothing_is_said(tmp_path, caplog):
    applied = run(Plan(6, 3, 2, True, cut_epoch_at=4), tmp_path)[:-1]
    assert applied[:3] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [calls(step, "forward") for step in steps(tmp_path)] == [3] * len(applied)
    assert [said for said in our_warnings(caplog) if "iteration 4" in said] == []


@pytest.mark.parametrize("plan", [Plan(4, 3, 2, False), Plan(5, 2, 1, True, cut_epoch_at=3), Plan(5, 3, 1, False)])
def test_numbers_go_on_without_holes_in_a_second_run_of_a_trainer(tmp_path, plan):
    network = Marking()
    handler = ChakraProfileHandler({"enabled": True, "start_step": None, "trace_dir": str(tmp_path)})
    loader = (sized if plan.is_sized else stream)(2 * plan.batches)
    made = trainer(handler, loader=loader, epochs=plan.epochs, accumulation_steps=plan.group, network=network)
    network.engine = made
    if plan.cut_epoch_at:
        made.add_event_handler(Events.ITERATION_COMPLETED(once=plan.cut_epoch_at), lambda: made.terminate_epoch())
    updates = count_updates(made)
    made.run()
    made.state.max_epochs = plan.epochs + 2
    made.run()
    assert [step["step"] for step in steps(tmp_path)] == list(range(len(updates)))


class Unready:
    """A handler with an attribute that cannot be read yet."""

    @property
    def validator(self) -> Engine:
        raise RuntimeError("set_validator was not called")

    def tick(self, engine: Engine) -> None:
        pass


@pytest.mark.parametrize("other", [Unready(), ValidationHandler(1)])
def test_a_handler_without_its_evaluator_harms_no_run(tmp_path, other):
    handler = ChakraProfileHandler({"enabled": True, "start_step": None, "trace_dir": str(tmp_path)})
    made = trainer(handler)
    if isinstance(other, Unready):
        made.add_event_handler(Events.ITERATION_COMPLETED, other.tick)
    else:
        made.add_event_handler(Events.EPOCH_COMPLETED(once=9), other)
    made.run()
    assert (made.state.iteration, len(steps(tmp_path))) == (4, 4)
