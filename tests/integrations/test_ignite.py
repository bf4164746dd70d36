"""What only Ignite engines do: groups over epochs, runs without data, terminating, interrupting, other listeners."""

import logging
from itertools import count

import pytest
from ignite.engine import Engine, Events
from recording.loops import work
from recording.recorded import check_pair, entries, files, manifest, settings
from torch.profiler import record_function

from chakra_capture.annotations import VALIDATION
from chakra_capture.errors import SettingsError
from chakra_capture.integrations.ignite import ChakraProfileHandler
from integrations.contract import batches, our_warnings


def engine(handler, at=None, action=None, **events):
    """An engine whose batches are visible as ``batch <iteration>``."""

    def update(running, batch):
        with record_function(f"batch {running.state.iteration - 1}"):
            if running.state.iteration - 1 == at:
                action(running)
            work()

    made = Engine(update)
    handler.attach(made)
    return made


def test_group_that_an_epoch_leaves_unfinished_goes_on_in_the_next(tmp_path):
    # As create_supervised_trainer counts: 3 iterations to an update, 4 to an epoch.
    handler = ChakraProfileHandler(settings(tmp_path, 1, 2), gradient_accumulation_steps=3)
    engine(handler).run(range(4), max_epochs=3)

    check_pair(tmp_path, [1, 2])
    assert batches(tmp_path) == [3, 4, 5, 6, 7, 8]


def test_accumulation_over_nothing_is_an_error():
    with pytest.raises(SettingsError, match="gradient_accumulation_steps is 0"):
        ChakraProfileHandler({}, gradient_accumulation_steps=0)


def test_run_without_data(tmp_path):
    engine(ChakraProfileHandler(settings(tmp_path, 1, 2))).run(epoch_length=4)

    check_pair(tmp_path, [1, 2])
    assert batches(tmp_path) == [1, 2]


def test_epoch_of_unknown_length_ends_with_a_request_that_is_no_step(tmp_path):
    engine(ChakraProfileHandler(settings(tmp_path, 2, 4))).run((n for n in range(3)), max_epochs=1)

    said = manifest(tmp_path)["windows"][0]
    assert (said["steps"], said["aborted_steps"]) == ([2], [3])


def test_data_that_begins_again_within_an_epoch(tmp_path):
    engine(ChakraProfileHandler(settings(tmp_path, 1, 4))).run([1, 2], epoch_length=6)

    check_pair(tmp_path, [1, 2, 3, 4])
    assert batches(tmp_path) == [1, 2, 3, 4]


def test_epoch_that_is_cut_short(tmp_path):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 4))
    cut, num_requests = engine(handler), count()
    third = Events.GET_BATCH_COMPLETED(event_filter=lambda *_: next(num_requests) == 2)
    cut.add_event_handler(third, lambda running: running.terminate_epoch())
    cut.run(range(4), max_epochs=2)

    said = manifest(tmp_path)["windows"][0]
    assert (said["steps"], said["aborted_steps"]) == ([1, 2, 3, 4], [2])
    assert batches(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("skip_completed", [False, True])
def test_terminating_closes_the_window(tmp_path, skip_completed):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 9))
    engine(handler, 3, lambda running: running.terminate(skip_completed=skip_completed)).run(range(9))

    check_pair(tmp_path, [1, 2, 3])
    assert manifest(tmp_path)["reason"] == "training ended"


def test_interrupted_run_gives_the_profiler_back_and_goes_on_in_a_new_file(tmp_path):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 5))
    paused = engine(handler, 2, lambda running: running.interrupt())
    paused.run(range(8))
    check_pair(tmp_path, [1, 2])

    paused.run(range(8))
    check_pair(tmp_path, [3, 4, 5], cycle=1)


def failing(error):
    def action(_):
        raise error

    return action


def test_exception_that_another_handler_swallows_stays_swallowed(tmp_path):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 9))
    fails = engine(handler, 2, failing(RuntimeError("training failed")))
    heard = []
    fails.add_event_handler(Events.EXCEPTION_RAISED, lambda _, error: heard.append(error))
    fails.run(range(9))

    assert [str(error) for error in heard] == ["training failed"]
    check_pair(tmp_path, [1, 2])
    assert manifest(tmp_path)["reason"] == "exception"


def test_exception_with_two_of_our_handlers_reaches_the_caller(tmp_path, caplog):
    first, second = (ChakraProfileHandler(settings(tmp_path / name, 1, 9)) for name in "ab")
    fails = engine(first, 2, failing(error := RuntimeError("training failed")))
    second.attach(fails)
    with pytest.raises(RuntimeError) as caught:
        fails.run(range(9))

    assert caught.value is error
    recorded = [folder for folder in (tmp_path / "a", tmp_path / "b") if (folder / "0_kineto").exists()]
    assert len(recorded) == 1
    check_pair(recorded[0], [1, 2])
    assert ["another chakra-capture session" in r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_engine_inside_another_with_the_same_handler_leaves_the_outer_recording_alone(tmp_path, caplog):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 3))
    inner = Engine(lambda *_: None)
    handler.attach(inner)
    engine(handler, 2, lambda _: inner.run([0])).run(range(5))

    check_pair(tmp_path, [1, 2, 3])
    assert ["is recording the outer one" in said for said in our_warnings(caplog)] == [True]


def test_attached_twice_records_once(tmp_path):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 2))
    twice = engine(handler)
    handler.attach(twice)
    twice.run(range(4))

    check_pair(tmp_path, [1, 2])
    assert [name for name in files(tmp_path) if "cycle" in name] == []


def noted(name):
    def note():
        with record_function(name):
            work()

    return note


def test_validation_is_marked_from_the_first_to_the_last_handler_of_its_engine(tmp_path, caplog):
    handler = ChakraProfileHandler(settings(tmp_path, 1, 3, validation="exclude"))
    evaluator = Engine(lambda *_: work())
    evaluator.add_event_handler(Events.STARTED, noted("first"))
    handler.attach_validation(evaluator)
    handler.attach_validation(evaluator)
    evaluator.add_event_handler(Events.COMPLETED, noted("last"))
    trainer = engine(handler)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: evaluator.run([0]))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), noted("other work"))
    trainer.run(range(5))

    check_pair(tmp_path, [1, 2, 3])
    events = {e["name"]: e for e in entries(tmp_path / "0_kineto/rank-0.json") if "dur" in e}
    order = ["ProfilerStep#1", VALIDATION, "first", "last", "other work", "ProfilerStep#2"]
    assert sorted(order, key=lambda name: events[name]["ts"]) == order
    assert events["last"]["ts"] < events[VALIDATION]["ts"] + events[VALIDATION]["dur"] < events["other work"]["ts"]
    assert our_warnings(caplog) == []


def test_validation_that_fails_and_is_forgiven_is_marked_until_the_next_step(tmp_path):
    def fail(*_):
        raise RuntimeError

    def forgive():
        with pytest.raises(RuntimeError):
            evaluator.run([0])

    handler, evaluator = ChakraProfileHandler(settings(tmp_path, 1, 3, validation="exclude")), Engine(fail)
    handler.attach_validation(evaluator)
    trainer = engine(handler)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), forgive)
    trainer.run(range(5))

    check_pair(tmp_path, [1, 2, 3])
    events = {e["name"]: e for e in entries(tmp_path / "0_kineto/rank-0.json") if "dur" in e}
    assert events[VALIDATION]["ts"] + events[VALIDATION]["dur"] <= events["ProfilerStep#2"]["ts"]


def test_validation_that_is_to_be_excluded_without_an_engine_that_validates_is_said(tmp_path, caplog):
    engine(ChakraProfileHandler(settings(tmp_path, 1, 2, validation="exclude"))).run(range(4))

    assert ["Call handler.attach_validation(evaluator)" in said for said in our_warnings(caplog)] == [True]
