"""The phases of plain Ignite engines; times are known from sleeps."""

import time
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

from chakra_capture.integrations.ignite import ChakraProfileHandler
from phases.monai_runs import PHASES_ONLY, calls, lines, measured, ms, steps

NAP = 0.02
NAP_MS = 20


pytestmark = pytest.mark.usefixtures("own_folder")


def nap(*_: Any) -> None:
    time.sleep(NAP)


def napping(size: int) -> Any:
    for number in range(size):
        nap()
        yield number


def engine(**chosen: Any) -> tuple[Engine, ChakraProfileHandler]:
    made, handler = Engine(nap), ChakraProfileHandler(PHASES_ONLY, **chosen)
    handler.attach(made)
    return made, handler


def gaps() -> list[dict[str, list[int]]]:
    """What came after each step."""
    return [line["gap"]["phases"] for line in [*steps()[1:], lines("close")[0]]]


def test_the_wait_for_input_and_the_iteration_are_all_that_is_measured_and_said_so():
    made, _ = engine()
    made.run(napping(3), epoch_length=3)
    for step in steps():
        assert {name: count for name, (_, count) in step["phases"].items()} == {"input_wait": 1, "iteration": 1}
        assert ms(step, "input_wait") >= NAP_MS
        assert ms(step, "iteration") >= NAP_MS
    assert {*measured()} == {"input_wait", "iteration", "checkpoint", "callbacks", "validation"}


@pytest.mark.parametrize("is_before", [True, False])
def test_handlers_are_told_from_the_work_of_a_step_wherever_they_stand(is_before):
    made, handler = Engine(nap), ChakraProfileHandler(PHASES_ONLY)
    if not is_before:
        handler.attach(made)
    for event in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED):
        made.add_event_handler(event, nap)
    made.add_event_handler(Events.ITERATION_COMPLETED, nap)
    if is_before:
        handler.attach(made)
    made.run(range(3))
    for step in steps():
        assert ms(step, "callbacks") >= 2 * NAP_MS  # once the batch is there
        assert step["ns"] / 1e6 - ms(step, "callbacks") - ms(step, "iteration") < ms(step, "callbacks")
    assert all(gap["callbacks"][0] / 1e6 >= 2 * NAP_MS for gap in gaps()[:-1])  # at the end, and at the next request


def test_validation_and_checkpoints_between_the_steps_have_names_of_their_own(tmp_path):
    made, handler = engine()
    evaluator = Engine(nap)
    handler.attach_validation(evaluator)
    made.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: evaluator.run(range(2)))
    saver = Checkpoint({"network": torch.nn.Linear(2, 2)}, DiskSaver(str(tmp_path / "saved")), n_saved=None)
    made.add_event_handler(Events.ITERATION_COMPLETED(every=3), saver)
    made.run(range(6))
    assert [gap.get("validation", [0, 0])[1] for gap in gaps()] == [0, 1, 0, 1, 0, 1]
    assert all(gap["validation"][0] / 1e6 >= 2 * NAP_MS for gap in gaps() if "validation" in gap)
    saved = [gap["checkpoint"][0] for gap in gaps()]
    assert min(saved[2], saved[5]) > max(saved[0], saved[1], saved[3], saved[4])
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_a_group_goes_on_over_the_end_of_an_epoch_without_the_work_there():
    made, _ = engine(gradient_accumulation_steps=3)
    made.add_event_handler(Events.EPOCH_COMPLETED, lambda: time.sleep(10 * NAP))
    made.run(range(4), max_epochs=3)
    assert [calls(step, "iteration") for step in steps()] == [3, 3, 3, 3]
    between = [ms(step, "callbacks") >= 10 * NAP_MS for step in steps()]
    assert between == [False, True, True, False]
    assert all(ms(step, "iteration") >= 3 * NAP_MS for step in steps())


def test_an_update_between_the_iterations_is_in_no_step():
    made, _ = engine()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    made.add_event_handler(Events.ITERATION_COMPLETED, lambda: (nap(), optimizer.step()))
    made.run(range(3))
    assert all("optimizer" not in step["phases"] for step in steps())
    assert all(gap["callbacks"][0] / 1e6 >= NAP_MS for gap in gaps())


def test_a_failed_run_leaves_the_engine_without_our_phase_handlers():
    made, _ = engine()
    before = {event: len(found) for event, found in made._event_handlers.items() if found}
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run(range(3))
    after = {event: len(found) for event, found in made._event_handlers.items() if found}
    before[Events.ITERATION_COMPLETED] += 1
    assert after == before
    assert [step["step"] for step in steps()] == [0, 1]


def test_a_detached_engine_raises_what_it_raised_before():
    made, handler = engine()
    handler.detach(made)
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run(range(3))
    made, handler = engine()
    made.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: handler.detach(made))
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run(range(3))


def test_validation_that_fails_or_is_interrupted_ends_there():
    made, handler = engine()
    failing, interrupted = Engine(lambda *_: 1 / 0), Engine(lambda one, _: one.interrupt())
    for evaluator in (failing, interrupted):
        handler.attach_validation(evaluator)

    def validate(engine: Engine) -> None:
        if engine.state.iteration == 1:
            with pytest.raises(ZeroDivisionError):
                failing.run(range(2))
        else:
            interrupted.run(range(2))
        time.sleep(4 * NAP)

    made.add_event_handler(Events.ITERATION_COMPLETED, validate)
    made.run(range(2))
    assert [calls({"phases": gap}, "validation") for gap in gaps()] == [1, 1]
    assert all(gap["callbacks"][0] / 1e6 >= 4 * NAP_MS for gap in gaps())


def test_who_else_listens_decides_what_becomes_of_an_exception_of_validation():
    made, handler = engine()
    evaluator = Engine(lambda *_: 1 / 0)
    handler.attach_validation(evaluator)
    heard: list[BaseException] = []
    evaluator.add_event_handler(Events.EXCEPTION_RAISED, lambda error: heard.append(error))
    made.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: evaluator.run(range(2)))
    made.run(range(2))
    assert [type(error) for error in heard] == [ZeroDivisionError]
    assert len(steps()) == 2


def test_an_engine_without_data_waits_for_none_and_it_is_not_said_to_be_zero():
    made, _ = engine()
    made.run(epoch_length=2)
    assert [calls(step, "iteration") for step in steps()] == [1, 1]
    assert "without data" in str(measured()["input_wait"])


@pytest.mark.parametrize("event", [Events.STARTED, Events.EPOCH_STARTED])
def test_handlers_that_are_added_while_the_engine_runs_are_told_from_the_work_of_a_step(event, tmp_path):
    made, _ = engine()
    saver = Checkpoint({"network": torch.nn.Linear(2, 2)}, DiskSaver(str(tmp_path / "saved")), n_saved=None)

    def add_some() -> None:
        for late in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED):
            made.add_event_handler(late, lambda: time.sleep(5 * NAP))
        made.add_event_handler(Events.ITERATION_COMPLETED, saver)

    made.add_event_handler(event, add_some)
    made.run(range(3))
    for step in steps():
        assert ms(step, "callbacks") >= 10 * NAP_MS  # once the batch is there
        assert calls(step, "iteration") == 1
    assert [calls({"phases": gap}, "checkpoint") for gap in gaps()] == [1, 1, 1]
    # A request is told from what stands behind ours from the second one on.
    assert all(gap["callbacks"][0] / 1e6 >= 5 * NAP_MS for gap in gaps()[:-1])
