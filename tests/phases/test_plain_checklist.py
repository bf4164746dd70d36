"""Plain loops, by ``chakra_capture.phases``: one test per line of the checklist, and what else the wrappers promise."""

import copy
import gc
import inspect
import itertools
import json
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handed import CASES, require
from recording.recorded import check_pair, entries, settings
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader

from chakra_capture import phases
from chakra_capture.errors import ChakraCaptureError, InitError, SettingsError
from chakra_capture.phases import wrap_backward, wrap_dataloader, wrap_forward, wrap_optimizer
from chakra_capture.recording import registry
from phases.plain import Batches, Network, Optimizer, Tape, calls, lines, numbers

ONCE = {"input_wait": 1, "forward": 1, "backward": 1, "optimizer": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where ``init()`` without settings writes."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "chakra_traces"
    phases.close()


class Loop(SimpleNamespace):
    """A network, its optimizer and a tape, wrapped."""

    def update(self, batch: torch.Tensor) -> None:
        self.accumulate(batch)
        self.optimizer.step()
        self.tape("after")

    def accumulate(self, batch: torch.Tensor) -> None:
        wrap_backward(self.forward(batch).sum()).backward()


def loop() -> Loop:
    phases.init()
    tape = Tape()
    network = Network(tape)
    optimizer = wrap_optimizer(Optimizer(network, tape))
    return Loop(tape=tape, network=network, forward=wrap_forward(network), optimizer=optimizer)


def test_P1_an_exception_in_a_step_propagates_and_the_step_is_partial_and_not_counted(folder):
    made = loop()
    error = ValueError("in the third batch")

    def fail_in_a_loop() -> None:
        for number, batch in enumerate(wrap_dataloader([torch.ones(1, 1)] * 5)):
            made.accumulate(batch)
            if number == 2:
                raise error
            made.optimizer.step()

    def fail_in_a_block() -> None:
        with phases.step():
            made.accumulate(torch.ones(1, 1))
            raise error

    for fail in (fail_in_a_loop, fail_in_a_block):
        with pytest.raises(ValueError) as raised:
            fail()
        assert raised.value is error
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        made.update(batch)
    phases.close()
    assert numbers(folder) == [(0, True), (1, True), (2, False), (2, False), (2, True), (3, True)]
    assert calls(folder) == [ONCE] * 4


def test_P1_a_partial_step_ends_where_the_loop_is_left(folder):
    made = loop()
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        made.accumulate(batch)
        made.tape("left")
        break
    made.tape("between")
    for batch in wrap_dataloader([torch.ones(1, 1)]):
        made.update(batch)
    phases.close()
    assert numbers(folder) == [(0, False), (0, True)]
    placed = {name: step for name, step, _ in made.tape.placed(folder)}
    assert (placed["left"], placed["between"]) == (0, None)


def test_P2_forwards_and_updates_in_one_step_are_summed(folder):
    made = loop()
    other = wrap_optimizer(torch.optim.SGD(made.network.parameters(), lr=0.1))
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        for _ in range(2):
            made.accumulate(batch)
            made.optimizer.step()
        other.step()  # only now every optimizer has stepped
        made.tape("after")
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        with phases.step():
            for _ in range(3):
                made.update(batch)
                other.step()
    phases.close()
    twice, often = {"input_wait": 1, "forward": 2, "backward": 2}, {"input_wait": 1, "forward": 3, "backward": 3}
    assert calls(folder) == [{**twice, "optimizer": 3}] * 2 + [{**often, "optimizer": 6}] * 2
    assert [step for name, step, _ in made.tape.placed(folder) if name == "after"] == [None] * 2 + [2] * 3 + [3] * 3


def test_P3_validation_and_stray_updates_between_steps_are_in_no_step(folder, caplog):
    made = loop()
    for batch in wrap_dataloader(Batches(made.tape, 3)):
        made.update(batch)
        for held_out in Batches(made.tape, 2, "validation"):
            made.forward(held_out)
        made.optimizer.step()
    phases.close()
    assert calls(folder) == [ONCE] * 3
    in_step = [("fetch", "input_wait"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")]
    between = ["after", "validation", "forward", "validation", "forward", "validation ends", "optimizer"]
    expected: list[Any] = []
    for step in range(3):
        expected += [(name, step, phase) for name, phase in in_step] + [(name, None, None) for name in between]
    assert made.tape.placed(folder) == [*expected, ("fetch ends", None, None)]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "A wrapped optimizer ran after the update of step 0 and before the next batch"
    ]


def test_P3_another_wrapped_loader_inside_a_step_is_passed_over_with_one_warning(folder, caplog):
    made = loop()
    other = wrap_dataloader(["a", "b"])
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        assert list(other) == ["a", "b"]
        made.update(batch)
    with torch.no_grad():
        assert list(other) == ["a", "b"]
    phases.close()
    assert calls(folder) == [ONCE] * 2
    assert len(caplog.records) == 1
    assert "inside a step that iterates over another one" in caplog.text


def test_P3_a_wrapped_loader_read_without_gradients_makes_no_steps(folder, caplog):
    made = loop()
    with torch.no_grad():
        assert len(list(wrap_dataloader([1, 2]))) == 2
    for batch in wrap_dataloader([torch.ones(1, 1)]):
        made.update(batch)
    phases.close()
    assert numbers(folder) == [(0, True)]
    assert "as for validation" in caplog.text


def test_P3_a_nested_step_is_refused_with_one_warning(folder, caplog):
    phases.init()
    for _ in range(2):
        with phases.step():
            with phases.step():
                pass
    phases.close()
    assert numbers(folder) == [(0, True), (1, True)]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step() is called inside step 0"]


def test_P4_init_again_is_the_same_session_and_with_other_settings_an_error(tmp_path):
    session = phases.init()
    assert phases.init() is session
    with pytest.raises(InitError, match="with other settings") as raised:
        phases.init(settings(tmp_path, None, None))
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, ChakraCaptureError)
    phases.close()
    assert not session.is_open
    assert phases.init(settings(tmp_path, None, None)) is not session


def test_P4_one_owner_initialises_a_process():
    phases.init()
    assert registry.init_owner() == "phases"
    with pytest.raises(InitError, match=r"monai\.init\(\) was called, but this process is initialised by phases"):
        registry.claim_init("monai", None)
    phases.close()
    registry.claim_init("monai", None)
    try:
        with pytest.raises(InitError, match=r"initialised by monai\.init"):
            phases.init()
        with pytest.raises(InitError, match=r"monai\.init\(\) was called in this process"):
            wrap_dataloader([1])
        phases.close()
        assert registry.init_owner() == "monai"
    finally:
        registry.release_init()


def test_P4_nothing_is_wrapped_before_init_or_twice():
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters())
    loss = network(torch.ones(1, 1)).sum()
    for wrap, thing in ((wrap_dataloader, [1]), (wrap_forward, network), (wrap_optimizer, optimizer)):
        with pytest.raises(InitError, match=r"nobody has called init\(\).*Call it first"):
            wrap(thing)
    with pytest.raises(InitError, match="nobody"):
        phases.step()
    phases.init()
    for wrap, thing in (
        (wrap_dataloader, [1]),
        (wrap_dataloader, iter([1])),
        (wrap_forward, network),
        (wrap_optimizer, optimizer),
        (wrap_backward, loss),
    ):
        wrapped = wrap(thing)
        with pytest.raises(InitError, match="is wrapped already"):
            wrap(wrapped)


def test_what_cannot_be_wrapped_is_said():
    phases.init()
    with pytest.raises(SettingsError, match="accumulation_steps is 0"):
        wrap_dataloader([1], accumulation_steps=0)
    with pytest.raises(TypeError, match="wrap_optimizer got a list, which has no step"):
        wrap_optimizer([])
    for thing in (torch.nn.MSELoss(), 3):
        with pytest.raises(TypeError, match=r"has no backward\(\)"):
            wrap_backward(thing)


def test_switched_off_the_wrappers_give_back_what_they_got(folder, monkeypatch):
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
    assert not phases.init().is_open
    network, loader = torch.nn.Linear(1, 1), [1]
    optimizer = torch.optim.SGD(network.parameters())
    before = dict(vars(optimizer))
    assert wrap_dataloader(loader) is loader
    assert wrap_forward(network) is network
    assert wrap_backward(torch.autograd.backward) is torch.autograd.backward
    assert wrap_optimizer(optimizer) is optimizer
    assert vars(optimizer) == before
    with phases.step():
        pass
    assert not folder.exists()


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_step_is_one_update_of_an_accumulating_loop(folder, is_sized):
    made = loop()
    batches = [torch.ones(1, 1)] * 4
    loader = wrap_dataloader(batches if is_sized else iter(batches * 2), accumulation_steps=3)
    for _ in range(2 if is_sized else 1):
        for number, batch in enumerate(loader, 1):
            made.accumulate(batch)
            if number % 3 == 0 or (is_sized and number == 4):
                made.optimizer.step()
    phases.close()
    if is_sized:
        assert [found["input_wait"] for found in calls(folder)] == [3, 1, 3, 1]
        assert numbers(folder) == [(0, True), (1, True), (2, True), (3, True)]
    else:
        # The two batches that are left got no update; the request that found the end is in that step.
        assert [found["forward"] for found in calls(folder)] == [3, 3]
        assert numbers(folder) == [(0, True), (1, True), (2, False)]
        assert lines(folder)[-1]["phases"]["forward"][1] == 2
    assert all(found["optimizer"] == 1 for found in calls(folder))


def test_without_an_optimizer_a_step_ends_with_the_next_request(folder):
    phases.init()
    tape = Tape()
    for number, _ in enumerate(wrap_dataloader(Batches(tape, 5), accumulation_steps=2)):
        tape(f"body {number}")
    phases.close()
    placed = [(name, step) for name, step, _ in tape.placed(folder) if name.startswith("body")]
    assert placed == [("body 0", 0), ("body 1", 0), ("body 2", 1), ("body 3", 1), ("body 4", 2)]
    assert numbers(folder) == [(0, True), (1, True), (2, True)]
    assert not any("update_skipped" in line.get("flags", ()) for line in lines(folder))


def test_blocks_end_the_steps_of_an_accumulating_loop(folder):
    made = loop()
    for number, batch in enumerate(wrap_dataloader([torch.ones(1, 1)] * 4, accumulation_steps=2), 1):
        with phases.step():
            made.accumulate(batch)
            if number % 2 == 0:
                made.optimizer.step()
                made.tape("in the block")
        made.tape("after")
    phases.close()
    assert [found["forward"] for found in calls(folder)] == [2, 2]
    placed = [(name, step) for name, step, _ in made.tape.placed(folder) if name in ("in the block", "after")]
    in_step = [[("after", number), ("in the block", number), ("after", None)] for number in (0, 1)]
    assert placed == in_step[0] + in_step[1]


def test_a_block_holds_the_batches_requested_in_it(folder):
    made = loop()
    batches = iter(wrap_dataloader([torch.ones(1, 1)] * 4))
    for _ in range(2):
        with phases.step():
            for batch in itertools.islice(batches, 2):
                made.accumulate(batch)
            made.optimizer.step()
    phases.close()
    assert calls(folder) == [{"input_wait": 2, "forward": 2, "backward": 2, "optimizer": 1}] * 2


def test_looking_at_a_batch_is_no_step(folder):
    made = loop()
    loader = wrap_dataloader([torch.ones(1, 1)] * 2)
    next(iter(loader))
    for batch in loader:
        made.update(batch)
    phases.close()
    assert numbers(folder) == [(0, True), (1, True)]


def test_steps_count_on_over_epochs_from_the_first_step(folder):
    phases.init(first_step=7)
    loader = wrap_dataloader(DataLoader([1.0, 2.0]))
    assert (len(loader), loader.batch_size) == (2, 1)
    for _ in range(2):
        for _ in loader:
            pass
    phases.close()
    assert [line["step"] for line in lines(folder)] == [7, 8, 9, 10]


def test_starting_the_workers_is_input_wait_before_the_step_that_the_first_request_begins(folder):
    class Slow(Batches):
        def __iter__(self) -> Any:
            time.sleep(0.02)
            tape("workers start")
            return super().__iter__()

    phases.init()
    tape = Tape()
    batches = iter(wrap_dataloader(Slow(tape, 1)))
    tape("something else")
    list(batches)
    phases.close()
    expected = [("workers start", None), ("something else", None), ("fetch", 0), ("fetch ends", None)]
    assert [(name, step) for name, step, _ in tape.placed(folder)] == expected
    (step,) = lines(folder)
    waited, times = step["gap"]["phases"]["input_wait"]
    assert (waited >= 20_000_000, times, step["phases"]["input_wait"][1]) == (True, 1, 1)


@pytest.mark.parametrize("skips", ["second", "all"])
def test_case_072_an_update_that_the_scaler_skips_is_flagged_and_has_no_optimizer_time(folder, skips):
    expected = json.loads((require(CASES / "072-amp-skipped-update") / "expect.json").read_text())
    phases.init()
    network = torch.nn.Linear(2, 1)
    optimizer = wrap_optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    scaler, forward = torch.amp.GradScaler("cpu", init_scale=4.0), wrap_forward(network)
    bad = expected["skipped"] if skips == "second" else range(expected["steps"])
    for number, batch in enumerate(wrap_dataloader([torch.ones(1, 2)] * expected["steps"])):
        optimizer.zero_grad()
        loss = forward(batch * float("inf") if number in bad else batch).sum()
        wrap_backward(scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
    phases.close()
    skipped = [line["step"] for line in lines(folder) if "update_skipped" in line.get("flags", ())]
    assert skipped == list(bad)
    per_step = [found.get("optimizer", 0) for found in calls(folder)]
    assert per_step == (expected["optimizer_calls_per_iteration"] if skips == "second" else [0] * expected["steps"])


def test_time_asleep_and_validation_between_steps_are_in_the_gap_where_theirs_are_lost(folder):
    made = loop()
    session = phases.init()
    asleep = 0
    for number, batch in enumerate(wrap_dataloader([torch.ones(1, 1)] * 10)):
        made.update(batch)
        if number % 5 == 4:
            start = time.monotonic_ns()
            with session.phase("validation"):
                time.sleep(0.05)
            asleep += time.monotonic_ns() - start
    phases.close()
    found = lines(folder)
    last = lines(folder, "close")[0]["gap"]
    gaps = [line["gap"] for line in found[1:]] + [last]
    assert [number for number, gap in enumerate(gaps) if "validation" in gap["phases"]] == [4, 9]
    validated = sum(gap["phases"]["validation"][0] for gap in gaps if "validation" in gap["phases"])
    assert 100_000_000 <= validated <= asleep
    # Steps and gaps are all of the time: nothing is lost.
    for before, after in itertools.pairwise(found):
        assert before["begin_ns"] + before["ns"] + after["gap"]["ns"] == after["begin_ns"]


def test_one_forward_missing_in_100_steps_leaves_99(folder):
    made = loop()
    for number, batch in enumerate(wrap_dataloader([torch.ones(1, 1)] * 100)):
        call = made.network.forward if number == 50 else made.forward
        wrap_backward(call(batch).sum()).backward()
        made.optimizer.step()
    phases.close()
    found = calls(folder)
    assert [number for number, one in enumerate(found) if "forward" not in one] == [50]
    assert sum(one.get("forward", 0) for one in found) == 99
    assert all(one["backward"] == one["optimizer"] == 1 for one in found)


def test_forwards_count_once_with_gradients_and_in_a_step_alone(folder):
    class Twice(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = [inner]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner[0](self.inner[0](inputs))

    made = loop()
    outer = wrap_forward(Twice(made.forward))
    made.forward(torch.ones(1, 1))
    for batch in wrap_dataloader([torch.ones(1, 1)]):
        with torch.no_grad():
            made.forward(batch)
        outer(batch)
        made.optimizer.step()
        made.forward(batch)
    phases.close()
    assert calls(folder) == [{"input_wait": 1, "forward": 1, "optimizer": 1}]
    forwards = [(step, phase) for name, step, phase in made.tape.placed(folder) if name == "forward"]
    assert forwards == [(None, None), (0, None), (0, "forward"), (0, "forward"), (None, None)]
    assert [name for name, _, _ in lines(folder)[0]["spans"]] == ["input_wait", "forward", "optimizer"]


@pytest.mark.parametrize("is_backward_wrapped", [True, False])
def test_a_forward_run_again_by_checkpointing_is_no_forward(folder, is_backward_wrapped):
    from torch.utils.checkpoint import checkpoint

    made = loop()
    for batch in wrap_dataloader([torch.ones(1, 1)]):
        loss = checkpoint(made.forward, batch, use_reentrant=False).sum()
        wrap_backward(loss).backward() if is_backward_wrapped else loss.backward()
        made.optimizer.step()
    phases.close()
    assert calls(folder)[0]["forward"] == 1
    again = [(step, phase) for name, step, phase in made.tape.placed(folder) if name == "forward"][1]
    assert again == (0, "backward" if is_backward_wrapped else None)


def test_an_update_inside_backward_ends_the_step_after_it(folder):
    made = loop()
    made.network.layer.weight.register_post_accumulate_grad_hook(lambda _: made.optimizer.step())
    # What stepped in a backward that is not wrapped ends with the next request, whatever the size of the group.
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2, accumulation_steps=2):
        made.network(batch).sum().backward()
        made.tape("after")
    phases.close()
    assert [found["optimizer"] for found in calls(folder)] == [1, 1]
    assert [step for name, step, _ in made.tape.placed(folder) if name == "after"] == [0, 1]

    made = loop()
    made.network.layer.weight.register_post_accumulate_grad_hook(lambda _: made.optimizer.step())
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        loss = made.forward(batch).sum()
        loss.register_hook(lambda _: made.tape("backward begins"))
        wrap_backward(loss).backward()
        made.tape("after")
    phases.close()
    assert calls(folder)[2:] == [ONCE] * 2
    placed = made.tape.placed(folder)
    assert [place for place in placed if place[0] in ("optimizer", "after")] == [
        ("optimizer", 0, "optimizer"),
        ("after", None, None),
        ("optimizer", 1, "optimizer"),
        ("after", None, None),
    ]


def test_an_update_inside_a_function_that_runs_backward_ends_the_step_after_it(folder):
    made = loop()

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        made.optimizer.step()
        made.tape("in the function")

    timed = wrap_backward(backward)
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        timed(made.forward(batch).sum())
        made.tape("after")
    phases.close()
    assert calls(folder) == [ONCE] * 2
    placed = [place for place in made.tape.placed(folder) if place[0] in ("in the function", "after")]
    assert placed == [
        (name, at, phase)
        for step in (0, 1)
        for name, at, phase in (
            ("in the function", step, "backward"),
            ("after", None, None),
        )
    ]


def test_forward_and_backward_inside_a_closure_are_not_optimizer_time(folder):
    made = loop()
    optimizer = wrap_optimizer(torch.optim.LBFGS(made.network.parameters(), max_iter=1))
    made.optimizer.step()
    for batch in wrap_dataloader([torch.ones(1, 1)]):
        made.optimizer.step()

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            loss = made.forward(batch).square().sum()
            time.sleep(0.03)
            wrap_backward(loss).backward()
            time.sleep(0.03)
            return loss

        optimizer.step(closure)
    phases.close()
    (step,) = lines(folder)
    places = [phase for name, _, phase in made.tape.placed(folder) if name in ("forward", "backward")]
    assert places == ["forward", "backward"]
    assert step["phases"]["optimizer"][0] >= 60_000_000
    around = [end - begin for name, begin, end in step["spans"] if name == "optimizer"]
    within = step["phases"]["forward"][0] + step["phases"]["backward"][0]
    assert step["phases"]["optimizer"][0] == sum(around) - within


def test_a_wrapped_module_stays_what_it_was():
    network = torch.nn.Sequential(torch.nn.Linear(1, 1))
    before, content = dict(vars(network)), pickle.dumps(network)
    phases.init()
    wrapped = wrap_forward(network)
    assert vars(network) == before
    assert pickle.dumps(network) == content
    assert list(wrapped.parameters()) == list(network.parameters())
    wrapped.mark = 3
    assert network.mark == 3
    del wrapped.mark
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(twin) is torch.nn.Sequential
        assert twin.state_dict() == network.state_dict()
    assert copy.deepcopy(wrap_dataloader([1, 2])) == [1, 2]


def test_a_compiled_module_is_compiled_once_and_alike(folder):
    backend = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    network = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    compiled = torch.compile(network, backend=backend, fullgraph=True)
    compiled(torch.ones(1, 1)).sum().backward()
    assert backend.frame_count == 1
    phases.init()
    forward, optimizer = wrap_forward(compiled), wrap_optimizer(optimizer)
    whole = torch.compile(wrap_forward(network), backend=backend, fullgraph=True)
    counts = []
    for batch in wrap_dataloader([torch.ones(1, 1)] * 3):
        whole(batch)
        wrap_backward(forward(batch).sum()).backward()
        optimizer.step()
        counts.append(backend.frame_count)
    phases.close()
    torch._dynamo.reset()
    assert counts == [2, 2, 2]  # the other one is that of `whole`
    assert calls(folder) == [ONCE] * 3


def test_an_update_inside_a_compiled_function_is_the_same_with_us_and_not_taken_for_skipped(folder):
    def weights(is_wrapped: bool) -> tuple[list[Any], int]:
        backend = CompileCounterWithBackend("eager")
        torch._dynamo.reset()
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(network.parameters())
        if is_wrapped:
            phases.init()
            wrap_optimizer(optimizer)
        compiled = torch.compile(lambda: optimizer.step(), backend=backend)
        for batch in wrap_dataloader([torch.ones(1, 2)] * 3) if is_wrapped else [torch.ones(1, 2)] * 3:
            network(batch).sum().backward()
            compiled()
            optimizer.zero_grad()
        return [weight.tolist() for weight in network.parameters()], backend.frame_count

    assert weights(True) == weights(False)
    torch._dynamo.reset()
    phases.close()
    assert calls(folder) == [{"input_wait": 1}] * 3
    assert [line.get("flags") for line in lines(folder)] == [["first"], None, None]
    assert lines(folder, "measures")[-1]["phases"]["optimizer"] == "optimizer.step() is inside a compiled function"


@pytest.mark.parametrize("is_scheduled_before", [True, False])
def test_schedulers_and_scalers_find_the_optimizer_as_it_was(folder, is_scheduled_before, recwarn):
    phases.init()
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    signature = inspect.signature(optimizer.step)
    if is_scheduled_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        signature, inner = inspect.signature(optimizer.step), optimizer.step
    assert wrap_optimizer(optimizer) is optimizer
    assert inspect.signature(optimizer.step) == signature
    assert "step" not in optimizer.__getstate__()
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    if not is_scheduled_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in wrap_dataloader([torch.ones(1, 1)] * 2):
        network(batch).sum().backward()
        optimizer.step()
        scheduler.step()
    phases.close()
    assert calls(folder) == [{"input_wait": 1, "optimizer": 1}] * 2
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)] == []
    if is_scheduled_before:
        assert optimizer.step is inner
    optimizer.step()  # by whatever is on it


def test_a_wrapped_optimizer_is_put_back_and_freed_at_once(folder):
    phases.init()
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    wrap_optimizer(optimizer)
    assert "step" in vars(optimizer)
    phases.close()
    assert "step" not in vars(optimizer)
    phases.init()
    wrap_optimizer(optimizer)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_an_optimizer_that_cannot_be_timed_costs_its_phase_alone(folder, caplog):
    class Closed:
        __slots__ = ("__weakref__",)

        def step(self) -> None:
            pass

    phases.init()
    optimizer = wrap_optimizer(Closed())
    for _ in wrap_dataloader([1, 2]):
        optimizer.step()
    phases.close()
    assert calls(folder) == [{"input_wait": 1}] * 2
    assert "The phase optimizer is not measured" in caplog.text
    assert lines(folder, "measures")[-1]["phases"]["optimizer"].startswith("TypeError")


def test_what_is_wrapped_and_never_called_is_said_and_not_claimed_to_be_measured(folder, caplog):
    made = loop()
    for batch in wrap_dataloader([torch.ones(1, 1)] * 4):
        wrap_backward(made.network(batch).sum()).backward()
        made.optimizer.step()
    phases.close()
    assert caplog.text.count("The phase forward is not measured") == 1
    measured = lines(folder, "measures")[-1]["phases"]
    assert measured["forward"] == "what is wrapped was not called in steps 0 and 1"
    assert [measured[name] for name in ("input_wait", "backward", "optimizer")] == [None] * 3


def test_what_another_thread_does_is_in_no_phase(folder, caplog):
    made = loop()
    loader = wrap_dataloader([torch.ones(1, 1)] * 2)

    def elsewhere() -> None:
        made.forward(torch.ones(1, 1))
        made.optimizer.step()
        list(loader)

    for batch in loader:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        made.tape("joined")
        made.forward(batch)
        made.tape("after")
    phases.close()
    assert calls(folder) == [{"input_wait": 1, "forward": 1}] * 2
    assert not any("update_skipped" in line.get("flags", ()) for line in lines(folder))
    assert [step for name, step, _ in made.tape.placed(folder) if name == "after"] == [0, 1]
    assert [step for name, step, _ in made.tape.placed(folder) if name == "joined"] == [0, 1]
    assert caplog.text.count("it is iterated in another thread") == 1


def test_the_recorded_steps_hold_whole_updates(tmp_path):
    phases.init(settings(tmp_path, 1, 2))
    network = torch.nn.Linear(1, 1)
    optimizer = wrap_optimizer(torch.optim.SGD(network.parameters()))
    forward, backward = wrap_forward(network), wrap_backward(torch.autograd.backward)
    for batch in wrap_dataloader([torch.ones(1, 1)] * 4):
        backward(forward(batch).sum())
        optimizer.step()
        torch.ones(3).sum()
    phases.close()
    check_pair(tmp_path, [1, 2])
    events = entries(tmp_path / "0_kineto" / "rank-0.json")
    spans = {
        name: [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == name and e.get("ph") == "X"]
        for name in ("ProfilerStep#1", "ProfilerStep#2", *ONCE, "Optimizer.step#SGD.step")
    }
    for name in (*ONCE, "Optimizer.step#SGD.step"):
        assert len(spans[name]) == 2, name
        for step, (begin, end) in zip((1, 2), spans[name], strict=True):
            around = spans[f"ProfilerStep#{step}"][0]
            assert around[0] <= begin <= end <= around[1]
    assert calls(tmp_path) == [ONCE] * 4


def test_without_phases_a_window_ends_its_steps_with_the_updates(tmp_path):
    phases.init(settings(tmp_path, 1, 1, phases=False))
    network = torch.nn.Linear(1, 1)
    optimizer = wrap_optimizer(torch.optim.SGD(network.parameters()))
    for batch in wrap_dataloader([torch.ones(1, 1)] * 3):
        network(batch).sum().backward()
        optimizer.step()
        torch.ones(3).cumsum(0)
    phases.close()
    assert "step" not in vars(optimizer)
    check_pair(tmp_path, [1])
    assert "aten::cumsum" not in {event["name"] for event in entries(tmp_path / "0_kineto" / "rank-0.json")}
    assert not (tmp_path / "0_phases").exists()


def test_after_the_last_recorded_step_everything_is_put_back_and_training_goes_on(tmp_path):
    phases.init(settings(tmp_path, None, None, max_recorded_steps=2))
    network = torch.nn.Linear(1, 1)
    optimizer = wrap_optimizer(torch.optim.SGD(network.parameters()))
    forward = wrap_forward(network)
    for batch in wrap_dataloader([torch.ones(1, 1)] * 4):
        wrap_backward(forward(batch).sum()).backward()
        optimizer.step()
    assert "step" not in vars(optimizer)
    phases.close()
    assert calls(tmp_path) == [ONCE] * 2
