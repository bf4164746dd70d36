"""What MONAI's users were promised of step phases, rule by rule (M1 to M32); times are known from sleeps."""

import copy
import gc
import json
import threading
import time
from typing import Any

import pytest
import torch
from handed import CASES, require
from ignite.engine import Events
from integrations.contract import our_warnings
from monai.data import ThreadDataLoader
from monai.engines import AdversarialTrainer, GanTrainer, SupervisedEvaluator, SupervisedTrainer
from monai.engines.utils import IterationEvents
from monai.handlers import ValidationHandler
from monai.inferers import Inferer, SimpleInferer
from monai.transforms import Compose, Lambdad
from requires import requires

from chakra_capture import capture
from chakra_capture.errors import InitError
from chakra_capture.integrations import monai
from chakra_capture.integrations.monai import ChakraProfileHandler, TraceMLHandler
from chakra_capture.integrations.monai.phases import TrainerPhases
from chakra_capture.recording import registry
from phases.monai_runs import (
    CPU,
    OURS,
    PHASES_ONLY,
    Napping,
    NappingSGD,
    Slow,
    calls,
    count_updates,
    lines,
    measured,
    ms,
    residual_ms,
    rows,
    sized,
    steps,
    stream,
    trainer,
    work_ms,
)

NAP = 0.02
NAP_MS = 20
PARTS = ("input_wait", "forward", "backward", "optimizer")


pytestmark = pytest.mark.usefixtures("own_folder")


def run(**chosen: Any) -> list[int]:
    """Train with the handler of the user's page; returns the iterations of the updates."""
    monai.init()
    made = trainer(TraceMLHandler(), **chosen)
    updates = count_updates(made)
    made.run()
    return updates


def sizes() -> list[int]:
    return [calls(step, "forward") for step in steps()]


def dropped() -> list[list[int]]:
    return [line["batches"] for line in lines("dropped")]


def nap(*_: Any) -> None:
    time.sleep(NAP)


def test_M1_each_iteration_is_a_step_with_one_of_each_part(caplog):
    assert run() == [1, 2, 3, 4]
    assert [step["step"] for step in steps()] == [0, 1, 2, 3]
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[1, 1, 1, 1]] * 4
    assert our_warnings(caplog) == []


def test_M2_the_rest_of_an_epoch_is_a_step_of_its_own_where_its_length_is_known():
    assert run(epochs=2, accumulation_steps=3) == [3, 4, 7, 8]
    assert sizes() == [3, 1, 3, 1]
    assert [calls(step, "optimizer") for step in steps()] == [1, 1, 1, 1]


def test_M3_a_group_whose_gradients_monai_zeroes_is_dropped_and_said_once(caplog):
    assert run(loader=stream(), epochs=2, accumulation_steps=3) == [3, 7, 8]
    assert sizes() == [3, 3, 1]
    assert dropped() == [[4]]
    assert ["zeroed" in said and "iteration 4" in said for said in our_warnings(caplog)] == [True]


def test_M4_groups_that_divide_an_epoch_of_unknown_length_are_all_steps(caplog):
    assert run(loader=stream(), epochs=2, accumulation_steps=2) == [2, 4, 6, 8]
    assert sizes() == [2, 2, 2, 2]
    assert (dropped(), our_warnings(caplog)) == ([], [])


def test_M5_a_group_that_is_open_when_the_run_ends_is_dropped():
    assert run(loader=stream(), accumulation_steps=3) == [3]
    assert (sizes(), dropped()) == ([3], [[4]])
    assert [line["kind"] for line in lines() if line["kind"] != "measures"] == ["open", "step", "dropped", "close"]


def test_M6_epochs_shorter_and_longer_than_the_loader():
    assert run(epochs=2, epoch_length=3, accumulation_steps=2) == [2, 3, 5, 6]
    assert sizes() == [2, 1, 2, 1]


def test_M6_a_loader_that_begins_again_does_so_inside_a_fetch():
    assert run(epoch_length=6) == [1, 2, 3, 4, 5, 6]
    assert [calls(step, "input_wait") for step in steps()] == [1] * 6


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [sized, stream])
def test_M7_there_are_as_many_steps_as_updates_and_numbers_have_no_holes(size, make):
    updates = run(loader=make(), epochs=3, accumulation_steps=size)
    assert [step["step"] for step in steps()] == list(range(len(updates)))


def test_M8_a_step_is_the_sum_of_its_iterations():
    run(accumulation_steps=2, network=Napping(forward=NAP), loader=sized(delay=NAP / 4))
    for step in steps():
        assert [calls(step, part) for part in ("input_wait", "forward", "backward")] == [2, 2, 2]
        assert ms(step, "forward") >= 2 * NAP_MS
        assert ms(step, "input_wait") >= NAP_MS
        assert work_ms(step) >= 3 * NAP_MS


def test_M8_what_comes_between_the_iterations_of_a_step_is_no_work_of_it():
    monai.init()
    made = trainer(TraceMLHandler(), accumulation_steps=4)
    made.add_event_handler(Events.ITERATION_COMPLETED, nap)
    made.run()
    (step,) = steps()
    assert ms(step, "callbacks") >= 3 * NAP_MS
    assert work_ms(step) < step["ns"] / 1e6 - 3 * NAP_MS + 1e-6


def test_M9_a_threaded_loader_that_keeps_up_is_not_waited_for():
    wanted = json.loads((require(CASES / "070-threaded-loader-input-wait") / "expect.json").read_text())
    waits = {}
    for name, kind in (("plain_ms", None), ("thread_ms", ThreadDataLoader)):
        data = Slow(8, NAP)
        loader = torch.utils.data.DataLoader(data, batch_size=1) if kind is None else kind(data, batch_size=1)
        handler = ChakraProfileHandler({**PHASES_ONLY, "trace_dir": name})
        trainer(handler, loader=loader, network=Napping(forward=0.03)).run()
        waits[name] = sum(ms(step, "input_wait") for step in steps(name))
    assert waits["plain_ms"] >= wanted["plain_ms"][0]
    # Sleeps of a busy machine are longer, in both alike.
    assert waits["thread_ms"] <= max(wanted["thread_ms"][1], 0.4 * waits["plain_ms"])


def test_M10_amp_without_a_device_changes_no_count():
    assert run(amp=True) == [1, 2, 3, 4]
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[1, 1, 1, 1]] * 4


def run_scaled(bad: list[int], **chosen: Any) -> None:
    """Train with a real scaler that finds the gradients of some batches infinite."""
    data = rows(4)
    for number in bad:
        data[number]["image"].fill_(float("inf"))
    made = trainer(TraceMLHandler(), loader=torch.utils.data.DataLoader(data), amp=True, **chosen)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    made.add_event_handler(Events.STARTED, lambda e: setattr(e, "scaler", scaler))
    made.run()


def test_M10_an_update_that_the_scaler_skips_is_a_step_without_an_optimizer_phase():
    wanted = json.loads((require(CASES / "072-amp-skipped-update") / "expect.json").read_text())
    run_scaled([1])
    assert [calls(step, "optimizer") for step in steps()] == wanted["optimizer_calls_per_iteration"]
    assert len(steps()) == wanted["steps"]
    flagged = [step["step"] for step in steps() if "update_skipped" in step.get("flags", [])]
    assert flagged == wanted["skipped"]


def test_M10_where_all_updates_are_skipped_no_optimizer_phase_is_recorded():
    run_scaled([0, 1, 2, 3])
    assert [calls(step, "optimizer") for step in steps()] == [0, 0, 0, 0]
    assert all("update_skipped" in step["flags"] for step in steps())


def test_M10_a_fused_optimizer_is_called_by_the_scaler_either_way():
    network = torch.nn.Linear(4, 1)
    run_scaled([1], network=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.01, fused=True))
    assert [calls(step, "optimizer") for step in steps()] == [1, 1, 1, 1]


class Inheriting(SupervisedTrainer):
    pass


class Overriding(SupervisedTrainer):
    def _iteration(self, engine, batchdata):
        return super()._iteration(engine, batchdata)


def test_M11_a_subclass_with_the_iteration_of_monai_is_traced(caplog):
    assert run(kind=Inheriting) == [1, 2, 3, 4]
    assert (len(steps()), our_warnings(caplog)) == (4, [])


class Critic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs.mean()


def adversaries(handler: Any, first: torch.nn.Module, second: torch.nn.Module) -> dict[str, Any]:
    """What both kinds of adversarial trainer take."""
    return {
        "device": CPU,
        "max_epochs": 1,
        "train_data_loader": sized(),
        "g_network": first,
        "g_optimizer": torch.optim.SGD(first.parameters(), lr=0.01),
        "d_network": second,
        "d_optimizer": torch.optim.SGD(second.parameters(), lr=0.01),
        "train_handlers": [handler],
    }


def gan(handler: Any) -> Any:
    first, second = torch.nn.Linear(4, 4), Critic()
    return GanTrainer(
        **adversaries(handler, first, second),
        g_loss_function=lambda found: second(found).mean(),
        d_loss_function=lambda fake, real: second(fake).mean() - second(real).mean(),
        g_prepare_batch=lambda num_latents, **_: torch.ones(num_latents, 4),
        d_prepare_batch=lambda batch, *_, **__: batch["image"],
        d_train_steps=1,
        latent_shape=4,
    )


def adversarial(handler: Any) -> Any:
    return AdversarialTrainer(
        **adversaries(handler, torch.nn.Linear(4, 1), Critic()),
        g_loss_function=lambda found: found.mean(),
        recon_loss_function=torch.nn.MSELoss(),
        d_loss_function=lambda real, fake: fake.mean() - real.mean(),
    )


def evaluator(*handlers: Any, **chosen: Any) -> SupervisedEvaluator:
    network = chosen.pop("network", None) or torch.nn.Linear(4, 1)
    return SupervisedEvaluator(
        device=CPU, val_data_loader=sized(4), network=network, val_handlers=list(handlers), **chosen
    )


UNTRACED = {
    "overridden": lambda handler: trainer(handler, kind=Overriding),
    "update": lambda handler: trainer(handler, iteration_update=lambda *_: {}),
    "borrowed": lambda handler: trainer(handler, iteration_update=trainer()._iteration),
    "gan": gan,
    "adversarial": adversarial,
    "evaluator": lambda handler: evaluator(handler),
}


@pytest.mark.parametrize("which", [name for name in UNTRACED if name != "borrowed"])
def test_M11_engines_with_an_iteration_of_their_own_are_left_alone_with_one_warning(which, caplog):
    made = UNTRACED[which](TraceMLHandler())
    assert [type(made).__name__ in said for said in our_warnings(caplog)] == [True]
    assert not hasattr(made, OURS)
    made.run()
    assert len(our_warnings(caplog)) == 1
    assert lines() == []


def test_M11_the_iteration_of_another_trainer_is_none_of_its_own(caplog):
    made = UNTRACED["borrowed"](TraceMLHandler())
    assert len(our_warnings(caplog)) == 1
    assert not hasattr(made, OURS)


@pytest.mark.parametrize("which", [name for name in UNTRACED if name != "borrowed"])
def test_engines_with_an_iteration_of_their_own_get_a_labelled_partial_record(which, caplog):
    made = UNTRACED[which](ChakraProfileHandler(PHASES_ONLY))
    made.run()
    assert len(steps()) == made.state.iteration > 0
    assert [[calls(step, part) for part in ("input_wait", "iteration")] for step in steps()] == [[1, 1]] * len(steps())
    assert {name for name, why_not in measured().items() if why_not} == {"h2d", "forward", "backward", "optimizer"}
    assert ["input_wait and iteration alone" in said for said in our_warnings(caplog)] == [True]


def test_M12_a_second_handler_on_a_trainer_is_refused_and_nothing_counts_twice(caplog):
    made = trainer(TraceMLHandler(), TraceMLHandler())
    made.run()
    assert ["count twice" in said for said in our_warnings(caplog)] == [True]
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[1, 1, 1, 1]] * 4


def test_M12_a_handler_traces_one_trainer(caplog):
    handler = TraceMLHandler()
    first, second = trainer(handler), trainer(handler)
    assert ["traces a SupervisedTrainer already" in said for said in our_warnings(caplog)] == [True]
    second.run()
    assert steps() == []
    first.run()
    assert len(steps()) == 4


def test_M13_a_handler_shared_with_an_evaluator_traces_the_trainer(caplog):
    handler = TraceMLHandler()
    validating, made = evaluator(handler), trainer(handler)
    made.add_event_handler(Events.EPOCH_COMPLETED, lambda: validating.run())
    made.run()
    assert ["SupervisedEvaluator" in said for said in our_warnings(caplog)] == [True]
    assert len(steps()) == 4


def test_M14_where_the_process_is_initialised_for_plain_loops_the_handler_declines(caplog):
    registry.claim_init("phases", None)
    made = trainer(TraceMLHandler(), epochs=2)
    prepare, inferer = made.prepare_batch, made.inferer
    made.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append((e.prepare_batch, e.inferer)))
    seen: list[Any] = []
    made.run()
    made.state.max_epochs = 3
    made.run()
    assert ["This run is not traced" in said for said in our_warnings(caplog)] == [True]
    assert all(found == (prepare, inferer) for found in seen)
    assert lines() == []


@pytest.mark.parametrize("order", [("phases", "monai"), ("monai", "phases")])
def test_M14_two_ways_to_initialise_do_not_go_together(order):
    claims = {"phases": lambda: registry.claim_init("phases", None), "monai": monai.init}
    claims[order[0]]()
    claims[order[0]]()
    with pytest.raises(InitError, match="counted twice") as caught:
        claims[order[1]]()
    assert isinstance(caught.value, RuntimeError)


def test_M15_what_happens_before_the_run_is_in_no_step():
    monai.init()
    made = trainer(TraceMLHandler())
    next(iter(made.data_loader))
    made.inferer(torch.ones(1, 4), made.network).sum().backward()
    made.optimizer.step()
    made.add_event_handler(Events.STARTED, lambda e: (e.inferer(torch.ones(1, 4), e.network), e.optimizer.step()))
    made.run()
    assert [calls(steps()[0], part) for part in PARTS] == [1, 1, 1, 1]
    assert not {"forward", "backward", "optimizer", "input_wait"} & {*steps()[0]["gap"]["phases"]}


class Failing(SimpleInferer):
    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.number = at, error, 0

    def __call__(self, inputs, network, *args, **kwargs):
        self.number += 1
        if self.number == self.at:
            raise self.error
        return super().__call__(inputs, network)


@pytest.mark.parametrize("error", [ValueError("once"), KeyboardInterrupt(), SystemExit(3)])
def test_M16_an_exception_goes_its_way_and_leaves_the_steps_before_it(error):
    made = trainer(TraceMLHandler(), inferer=Failing(3, error))
    prepare, inferer = made.prepare_batch, made.inferer
    with pytest.raises(type(error)) as caught:
        made.run()
    assert caught.value is error
    assert [step["step"] for step in steps()] == [0, 1]
    assert (made.prepare_batch, made.inferer) == (prepare, inferer)
    assert len(made.optimizer._optimizer_step_pre_hooks) == len(made.optimizer._optimizer_step_post_hooks) == 0
    assert getattr(made, OURS) is not None
    trainer(TraceMLHandler()).run()
    assert [step["step"] for step in steps()] == [0, 1, 0, 1, 2, 3]
    assert len(lines("open")) == 2


def test_M16_who_listens_for_exceptions_decides_what_becomes_of_them():
    made, heard = trainer(TraceMLHandler(), inferer=Failing(2, ValueError("once"))), []
    made.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: heard.append(str(error)))
    made.run()
    assert (heard, len(steps())) == (["once"] * len(heard), 1)
    assert heard


def test_M17_terminating_inside_a_group_drops_it():
    made = trainer(TraceMLHandler(), accumulation_steps=3)
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e: e.terminate())
    made.run()
    assert (steps(), dropped()) == ([], [[1, 2]])
    assert lines()[-1]["kind"] == "close"


def test_M18_a_second_run_goes_on_and_hooks_nothing_twice():
    made = trainer(TraceMLHandler())
    made.run()
    made.state.max_epochs = 2
    made.run()
    assert [step["step"] for step in steps()] == list(range(8))
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[1, 1, 1, 1]] * 8
    assert len(made.optimizer._optimizer_step_pre_hooks) == 0


class Stateful(SimpleInferer):
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, inputs, network, *args, **kwargs):
        self.seen += 1
        return super().__call__(inputs, network)


def test_M19_reads_and_writes_reach_the_real_inferer_while_its_calls_are_timed():
    real, found = Stateful(), []
    made = trainer(TraceMLHandler(), inferer=real)

    def look(engine: Any) -> None:
        proxy = engine.inferer
        found.append((isinstance(proxy, Inferer), "timed" in repr(proxy), proxy.seen, copy.deepcopy(proxy)))
        proxy.note = engine.state.iteration

    made.add_event_handler(Events.ITERATION_COMPLETED, look)
    made.run()
    assert [each[:3] for each in found] == [(False, True, number) for number in (1, 2, 3, 4)]
    assert [type(each[3]) for each in found] == [Stateful] * 4
    assert (made.inferer is real, real.note, real.seen) == (True, 4, 4)
    assert isinstance(copy.deepcopy(made).inferer, Stateful)


def test_M20_an_inferer_replaced_in_the_middle_is_left_alone_and_said_once(caplog):
    other = SimpleInferer()
    made = trainer(TraceMLHandler())
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e: setattr(e, "inferer", other))
    made.run()
    assert [calls(step, "forward") for step in steps()] == [1, 1, 0, 0]
    assert ["forward is not measured any more" in said for said in our_warnings(caplog)] == [True]
    assert measured()["forward"] is not None
    assert made.inferer is other


def test_M20_an_inferer_replaced_before_the_run_is_timed_and_given_back():
    other = SimpleInferer()
    made = trainer(TraceMLHandler())
    made.inferer = other
    made.run()
    assert [calls(step, "forward") for step in steps()] == [1, 1, 1, 1]
    assert made.inferer is other


class SlowZero(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        nap()
        super().zero_grad(set_to_none)


class SlowLoss(torch.nn.MSELoss):
    def forward(self, found, wanted):
        nap()
        return super().forward(found, wanted)


def test_M21_zeroing_gradients_and_the_loss_are_in_the_step_and_in_no_phase():
    network = torch.nn.Linear(4, 1)
    run(network=network, optimizer=SlowZero(network.parameters(), lr=0.01), loss_function=SlowLoss())
    for step in steps():
        assert residual_ms(step) >= 2 * NAP_MS


def test_M22_the_optimizer_phase_is_the_step_alone_and_one_for_a_step_that_calls_its_base():
    network = torch.nn.Linear(4, 1)
    optimizer = NappingSGD(network.parameters(), lr=0.01)
    optimizer.nap = NAP
    run(network=network, optimizer=optimizer)
    assert [calls(step, "optimizer") for step in steps()] == [1, 1, 1, 1]
    assert all(ms(step, "optimizer") >= NAP_MS for step in steps())


def test_M22_steps_and_forwards_between_iterations_are_not_recorded():
    made = trainer(TraceMLHandler(), accumulation_steps=2)

    def stray(engine: Any) -> None:
        engine.optimizer.step()
        engine.inferer(torch.ones(1, 4), engine.network)

    made.add_event_handler(Events.ITERATION_COMPLETED, stray)
    made.run()
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[2, 2, 2, 1]] * 2
    assert not any({"forward", "optimizer"} & {*step["gap"]["phases"]} for step in steps())


@pytest.mark.parametrize("is_before", [True, False])
def test_M23_handlers_between_loss_and_backward_are_not_taken_for_backward(is_before):
    handler = TraceMLHandler()
    made = trainer(*([] if is_before else [handler]))
    made.add_event_handler(IterationEvents.LOSS_COMPLETED, nap)
    made.add_event_handler(IterationEvents.BACKWARD_COMPLETED, nap)
    if is_before:
        handler.attach(made)
    made.run()
    for step in steps():
        assert residual_ms(step) >= 2 * NAP_MS
        assert step["ns"] / 1e6 - ms(step, "backward") >= 2 * NAP_MS


@pytest.mark.parametrize("is_first", [True, False])
def test_M24_postprocessing_is_in_the_step_and_handlers_of_its_end_are_not(is_first):
    network = torch.nn.Linear(4, 1)
    validating = evaluator(network=network, inferer=Napper())
    others = [ValidationHandler(1, validating, epoch_level=False), AtTheEnd()]
    handlers = [TraceMLHandler(), *others] if is_first else [*others, TraceMLHandler()]
    post = Compose([Lambdad("pred", lambda pred: (nap(), pred)[1])])
    trainer(*handlers, network=network, postprocessing=post).run()
    for step in steps():
        assert residual_ms(step) >= 2 * NAP_MS  # two items
        assert "validation" not in step["phases"]
    gaps = [line["gap"]["phases"] for line in [*steps()[1:], lines("close")[0]]]
    assert all(gap["validation"][0] / 1e6 >= 2 * NAP_MS for gap in gaps)  # two batches
    assert all(gap["callbacks"][0] / 1e6 >= NAP_MS for gap in gaps)


class Napper(SimpleInferer):
    def __call__(self, inputs, network, *args, **kwargs):
        nap()
        return super().__call__(inputs, network)


class AtTheEnd:
    """A handler that takes its time when an iteration has ended."""

    def attach(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, nap)


def test_M25_the_work_after_an_epoch_is_in_no_fetch():
    made = trainer(TraceMLHandler(), loader=stream(), epochs=2)
    made.add_event_handler(Events.EPOCH_COMPLETED, lambda: time.sleep(10 * NAP))
    made.run()
    assert [calls(step, "input_wait") for step in steps()] == [1] * 8
    assert steps()[4]["gap"]["phases"]["callbacks"][0] / 1e6 >= 10 * NAP_MS
    waits = [ms(step, "input_wait") for step in steps()] + [steps()[4]["gap"]["phases"]["input_wait"][0] / 1e6]
    assert sum(waits) < steps()[4]["gap"]["ns"] / 1e6 + sum(waits) - 10 * NAP_MS


def start_slowly(_: int) -> None:
    time.sleep(0.3)


@pytest.mark.parametrize("is_kept", [False, True])
def test_M26_starting_the_workers_of_an_epoch_is_input_wait_of_its_first_step(is_kept):
    loader = sized(num_workers=1, worker_init_fn=start_slowly, persistent_workers=is_kept)
    run(loader=loader, epochs=2)
    loader._iterator = None
    while gc.collect() or any(thread.name == "QueueFeederThread" for thread in threading.enumerate()):
        time.sleep(0.01)
    waits = [ms(step, "input_wait") for step in steps()]
    assert waits[4] >= 300 if not is_kept else waits[4] < waits[0] + 300
    assert (max(waits[1:]) >= 300) is not is_kept


class NoHooks:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.01 * parameter.grad


def test_M27_an_optimizer_without_hooks_costs_its_phase_alone(caplog):
    network = torch.nn.Linear(4, 1)
    trainer(TraceMLHandler(), network=network, optimizer=NoHooks(network.parameters())).run()
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[1, 1, 1, 0]] * 4
    assert "update_skipped" not in str(steps())
    assert ["NoHooks has no hooks" in said for said in our_warnings(caplog)] == [True]
    assert "NoHooks" in str(measured()["optimizer"])


@pytest.mark.parametrize(
    ("method", "part"), [("_stand_in_for_inferer", "forward"), ("_listen_to_backward", "backward")]
)
def test_M27_a_phase_that_cannot_be_hooked_up_costs_itself_alone(method, part, monkeypatch, caplog):
    def fail(_: Any) -> None:
        raise OSError("cannot")

    monkeypatch.setattr(TrainerPhases, method, fail)
    assert run() == [1, 2, 3, 4]
    assert [[calls(step, each) for each in PARTS] for step in steps()] == [[int(each != part) for each in PARTS]] * 4
    assert [f"The phase {part} is not measured" in said for said in our_warnings(caplog)] == [True]


def test_M28_switched_off_nothing_is_touched(monkeypatch):
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
    bare = trainer()
    monai.init()
    made = trainer(TraceMLHandler())
    assert {event: len(found) for event, found in made._event_handlers.items() if found} == {
        event: len(found) for event, found in bare._event_handlers.items() if found
    }
    made.run()
    assert lines() == []


def test_M28_switched_off_in_the_middle_everything_is_put_back(monkeypatch):
    made = trainer(TraceMLHandler(), accumulation_steps=2, epochs=2)
    inferer, found = made.inferer, []
    made.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1"))
    made.add_event_handler(Events.ITERATION_COMPLETED, lambda e: found.append(e.inferer is inferer))
    made.run()
    assert [step["step"] for step in steps()] == [0, 1]
    assert found == [False] * 3 + [True] * 5
    assert lines()[-1]["kind"] == "close"
    assert len(made.optimizer._optimizer_step_pre_hooks) == 0


def test_M29_no_more_steps_are_timed_than_asked_for_and_training_goes_on():
    made = trainer(ChakraProfileHandler({**PHASES_ONLY, "max_recorded_steps": 2}))
    inferer, found, updates = made.inferer, [], count_updates(made)
    made.add_event_handler(Events.ITERATION_COMPLETED, lambda e: found.append(e.inferer is inferer))
    made.run()
    assert (len(steps()), updates) == (2, [1, 2, 3, 4])
    assert found == [False, True, True, True]


def copying(device: str) -> Any:
    """A trainer whose batches are copied: two tensors a batch, in prepare_batch and nowhere else."""
    network = torch.nn.Linear(4, 1, device=device)

    def copy_elsewhere(*_: Any) -> None:
        torch.ones(1).to(device)

    made = trainer(TraceMLHandler(), device=torch.device(device), network=network, decollate=False)
    made.add_event_handler(IterationEvents.MODEL_COMPLETED, copy_elsewhere)
    return made


def test_M30_copies_of_prepare_batch_are_timed_where_there_is_a_device_and_put_back():
    made = copying("meta")  # a device that computes nothing
    prepare = made.prepare_batch
    made.run()
    assert [calls(step, "h2d") for step in steps()] == [2, 2, 2, 2]
    assert measured()["h2d"] is None
    assert made.prepare_batch is prepare


def test_M30_on_the_cpu_there_is_nothing_to_copy_and_it_is_not_said_to_be_zero():
    made = copying("cpu")
    prepare, found = made.prepare_batch, []
    made.add_event_handler(Events.ITERATION_STARTED, lambda e: found.append(e.prepare_batch is prepare))
    made.run()
    assert [calls(step, "h2d") for step in steps()] == [0, 0, 0, 0]
    assert (measured()["h2d"], found) == ("there is no device to copy to", [True] * 4)


def test_M30_a_prepare_batch_replaced_in_the_middle_costs_h2d_alone(caplog):
    made = copying("meta")
    other = made.prepare_batch
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e: setattr(e, "prepare_batch", other))
    made.run()
    assert [[calls(step, part) for part in ("h2d", *PARTS)] for step in steps()] == [[2, 1, 1, 1, 1]] * 2 + [
        [0, 1, 1, 1, 1]
    ] * 2
    assert ["h2d is not measured any more" in said for said in our_warnings(caplog)] == [True]
    assert made.prepare_batch is other


@requires("cuda")
def test_M30_on_a_device_its_own_times_are_recorded():
    made = copying("cuda")
    made.add_event_handler(IterationEvents.FORWARD_COMPLETED, lambda: torch.cuda._sleep(10_000_000))
    made.run()
    for step in steps():
        assert calls(step, "h2d") == 2
        times = step["device_ns"]
        assert {"(step)", "h2d", "forward", "backward", "optimizer"} <= {*times}
        assert 0 < sum(ns for name, ns in times.items() if name != "(step)") < times["(step)"]


def test_M31_another_recording_in_the_middle_of_a_group_changes_nothing(tmp_path):
    made = trainer(TraceMLHandler(), accumulation_steps=2)

    def record_something_else(_: Any) -> None:
        with capture({**PHASES_ONLY, "trace_dir": str(tmp_path / "other")}) as session:
            for _ in session.steps(range(2)):
                with session.phase("forward"):
                    pass

    made.add_event_handler(IterationEvents.FORWARD_COMPLETED, record_something_else)
    made.run()
    assert [[calls(step, part) for part in PARTS] for step in steps()] == [[2, 2, 2, 1]] * 2
    assert [step["step"] for step in steps()] == [0, 1]


def test_M32_an_optimizer_replaced_in_the_middle_is_timed_from_there_and_said(caplog):
    made = trainer(TraceMLHandler())
    first = made.optimizer

    def replace(engine: Any) -> None:
        engine.optimizer = torch.optim.SGD(engine.network.parameters(), lr=0.02)

    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), replace)
    made.run()
    assert [calls(step, "optimizer") for step in steps()] == [1, 1, 1, 1]
    assert ["optimizer was replaced" in said for said in our_warnings(caplog)] == [True]
    assert len(first._optimizer_step_pre_hooks) == len(made.optimizer._optimizer_step_pre_hooks) == 0
