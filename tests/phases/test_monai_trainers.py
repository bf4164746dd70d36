"""MONAI trainers as they are used: accumulated, copied, pickled, detached, from a bundle, on several ranks."""

import copy
import json
import pickle
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from handed import CASES, require
from ignite.engine import Events
from integrations.contract import our_warnings
from monai.bundle import ConfigWorkflow
from monai.engines import SupervisedEvaluator
from monai.handlers import CheckpointSaver, ValidationHandler
from recording.recorded import check_pair, manifest

from chakra_capture.integrations.monai import ChakraProfileHandler, TraceMLHandler
from phases.monai_runs import (
    CPU,
    OURS,
    PHASES_ONLY,
    Slow,
    Stream,
    calls,
    count_updates,
    lines,
    ms,
    sized,
    steps,
    trainer,
)

pytestmark = pytest.mark.usefixtures("own_folder")


def test_groups_are_those_of_the_handed_case():
    wanted = json.loads((require(CASES / "071-monai-accumulation-steps") / "expect.json").read_text())
    made = {"n10_acc4": (10, 4, 1), "n10_acc4_2ep": (10, 4, 2), "n4_acc3_2ep": (4, 3, 2)}
    for name, (size, group, epochs) in made.items():
        loader = torch.utils.data.DataLoader(Slow(size))
        handler = ChakraProfileHandler({**PHASES_ONLY, "trace_dir": name})
        trainer(handler, loader=loader, epochs=epochs, accumulation_steps=group).run()
        assert len(steps(name)) == wanted[name]["steps"]
        sizes = [calls(step, "forward") for step in steps(name)]
        assert sizes == wanted[name].get("iterations_per_step", sizes)
    name = "iter_n10_acc4_2ep"
    handler = ChakraProfileHandler({**PHASES_ONLY, "trace_dir": name})
    trainer(handler, loader=torch.utils.data.DataLoader(Stream(10)), epochs=2, accumulation_steps=4).run()
    assert [calls(step, "forward") for step in steps(name)] == wanted[name]["iterations_per_step"]
    assert len(steps(name)) == wanted[name]["steps"]
    assert [len(line["batches"]) for line in lines("dropped", name)] == [wanted[name]["dropped_iterations"]]


def copied(made: Any) -> Any:
    return copy.deepcopy(made)


def pickled(made: Any) -> Any:
    return pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("again", [copied, pickled])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_copy_of_a_trainer_runs_untraced_and_can_be_traced_by_a_handler_of_its_own(again, has_run):
    made = trainer(TraceMLHandler(), decollate=False)
    if has_run:
        made.run()
        made.state.output = None  # tensors with a history, which nothing can copy
    other = again(made)
    other.state.max_epochs = 2
    assert getattr(other, OURS) is None
    other.run()
    assert len(steps()) == 4 * has_run
    TraceMLHandler().attach(other)
    other.state.max_epochs = 3
    other.run()
    assert len(steps()) == 4 * has_run + 4


@pytest.mark.parametrize("again", [copied, pickled])
def test_a_copy_raises_what_it_would_raise_without_us(again):
    other = again(trainer(TraceMLHandler(), decollate=False))
    other.loss_function = fail
    with pytest.raises(ZeroDivisionError):
        other.run()


def fail(*_: Any) -> torch.Tensor:
    raise ZeroDivisionError


def handlers_of(made: Any) -> dict[str, int]:
    return {str(event): len(found) for event, found in made._event_handlers.items() if found}


def test_detaching_leaves_the_trainer_as_it_was(caplog):
    bare = handlers_of(trainer())
    handler = TraceMLHandler()
    made = trainer(handler)
    assert hasattr(made, OURS)
    handler.detach()
    assert (hasattr(made, OURS), handlers_of(made)) == (False, bare)
    made.run()
    assert lines() == []
    handler.attach(made)
    made.state.max_epochs = 2
    made.run()
    assert (len(steps()), our_warnings(caplog)) == (4, [])


def test_detaching_in_the_middle_of_a_run_ends_what_is_recorded_there():
    handler = TraceMLHandler()
    made = trainer(handler)
    inferer = made.inferer
    made.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: handler.detach())
    made.run()
    assert len(steps()) == 2
    assert lines()[-1]["kind"] == "close"
    assert (made.state.iteration, made.inferer is inferer, hasattr(made, OURS)) == (4, True, False)


def test_checkpoints_and_validation_have_names_of_their_own_between_the_steps(tmp_path):
    network = torch.nn.Linear(4, 1)
    validating = SupervisedEvaluator(device=CPU, val_data_loader=sized(4, 0.01), network=network)
    others = [
        CheckpointSaver(str(tmp_path / "saved"), {"network": network}, save_interval=2, epoch_level=False),
        ValidationHandler(3, validating, epoch_level=False),
    ]
    trainer(*others, TraceMLHandler(), network=network).run()
    gaps = [line["gap"]["phases"] for line in [*steps()[1:], lines("close")[0]]]
    assert ["validation" in gap for gap in gaps] == [False, False, True, False]
    assert gaps[2]["validation"][0] >= 4 * 10_000_000
    saved = [gap["checkpoint"][0] for gap in gaps]
    assert min(saved[1], saved[3]) > max(saved[0], saved[2])
    assert len(list((tmp_path / "saved").iterdir())) >= 1


def test_a_window_of_a_trainer_holds_the_phases_as_annotations(tmp_path):
    chosen = {"enabled": True, "start_step": 1, "end_step": 2, "trace_dir": str(tmp_path)}
    trainer(ChakraProfileHandler(chosen), accumulation_steps=2, epochs=2).run()
    check_pair(tmp_path, [1, 2])
    assert [step.get("flags", []) for step in steps(tmp_path)] == [["first"], ["profiled"], ["profiled"], []]
    events = json.loads((tmp_path / "0_kineto/rank-0.json").read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    found = {name: named.count(name) for name in ("input_wait", "forward", "backward", "optimizer")}
    assert found == {"input_wait": 4, "forward": 4, "backward": 4, "optimizer": 2}
    assert manifest(tmp_path)["complete"]


BUNDLE = {
    "device": "$torch.device('cpu')",
    "network": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 1},
    "imports": ["$import torch"],
    "train": {
        "handlers": [
            {
                "_target_": "chakra_capture.integrations.monai.ChakraProfileHandler",
                "settings": {"enabled": True, "start_step": 1, "end_step": 1, "trace_dir": "from_bundle"},
            }
        ],
        "trainer": {
            "_target_": "SupervisedTrainer",
            "max_epochs": 1,
            "device": "@device",
            "train_data_loader": {
                "_target_": "DataLoader",
                "dataset": [{"image": [[1.0] * 4], "label": [[1.0]]}] * 4,
                "batch_size": 1,
                "collate_fn": "$lambda b: {k: torch.tensor([r[k] for r in b]) for k in ('image', 'label')}",
            },
            "network": "@network",
            "optimizer": {"_target_": "torch.optim.SGD", "params": "$@network.parameters()", "lr": 0.01},
            "loss_function": {"_target_": "torch.nn.MSELoss"},
            "train_handlers": "@train#handlers",
        },
    },
    "run": ["$@train#trainer.run()"],
    "initialize": [],
    "finalize": [],
}


def test_a_bundle_names_the_handler_and_its_settings_and_needs_no_code(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(BUNDLE))
    (tmp_path / "metadata.json").write_text("{}")
    workflow = ConfigWorkflow("train.json", meta_file="metadata.json", workflow_type="train", logging_file=False)
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    check_pair(tmp_path / "from_bundle", [1])
    assert [step["step"] for step in steps("from_bundle")] == [0, 1, 2, 3]


RANKS = """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    from phases.monai_runs import *
    from chakra_capture.integrations.monai import TraceMLHandler, init

    init()
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    made = trainer(TraceMLHandler(), network=network, loader=sized(8 + 2 * rank), epoch_length=4, accumulation_steps=3)
    updates = count_updates(made)
    made.run()
    print(rank, len(updates), flush=True)
    torch.distributed.destroy_process_group()
"""


def test_two_ranks_record_the_same_steps_under_one_run(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    tests = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = warm.run([*command, tests], timeout=300)  # the ranks are processes of their own
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["0 2", "1 2"]
    (folder,) = Path("chakra_traces").glob("*_phases")
    found = [[json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    assert [[line["step"] for line in rank if line["kind"] == "step"] for rank in found] == [[0, 1], [0, 1]]
    assert len({rank[0]["run_id"] for rank in found}) == 1
    assert [rank[0]["rank"] for rank in found] == [0, 1]


def test_validation_every_few_iterations_is_seen_and_is_in_no_step():
    network = torch.nn.Linear(4, 1)
    validating = SupervisedEvaluator(device=CPU, val_data_loader=sized(8, 0.01), network=network)
    made = trainer(TraceMLHandler(), ValidationHandler(10, validating, epoch_level=False), loader=sized(40))
    started = time.monotonic_ns()
    made.run()
    wall = time.monotonic_ns() - started
    found = [*steps(), lines("close")[0]]
    validation = sum(line["gap"]["phases"].get("validation", [0])[0] for line in found)
    assert validation >= 2 * 8 * 10_000_000
    accounted = sum(line.get("ns", 0) + sum(ns for ns, _ in line["gap"]["phases"].values()) for line in found)
    assert accounted <= wall
    assert validation + sum(step["ns"] for step in steps()) > 0.8 * accounted


def test_updates_of_the_trainer_and_steps_are_as_many_where_iterations_are_cut(caplog):
    made = trainer(TraceMLHandler(), loader=sized(10), epochs=3, accumulation_steps=2)
    made.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda e: e.terminate_epoch())
    updates = count_updates(made)
    made.run()
    assert len(steps()) == len(updates)
    assert ms(steps()[0], "forward") > 0
