"""How many iterations of a MONAI trainer are a step: as many as go into an update."""

import pytest
import torch
from monai.engines import SupervisedTrainer
from recording.recorded import check_pair, entries, manifest, settings
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from chakra_capture.annotations import parse_step
from chakra_capture.integrations.monai import ChakraProfileHandler


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter([torch.zeros(4)] * self.size)


def train(folder, loader, accumulate, epochs, update=None):
    network = torch.nn.Linear(4, 1)
    trainer = SupervisedTrainer(
        device="cpu",
        max_epochs=epochs,
        train_data_loader=loader,
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss_function=torch.nn.MSELoss(),
        prepare_batch=lambda batch, *_, **__: (batch[0] if isinstance(batch, list) else batch, torch.zeros(1, 1)),
        accumulation_steps=accumulate,
        iteration_update=update,
        decollate=False,
        train_handlers=[ChakraProfileHandler(settings(folder, 0, 30))],
    )
    trainer.run()


def work_of_steps(folder, name):
    """How many events of a name lie in each step."""
    events = [e for e in entries(folder / "0_kineto/rank-0.json") if "dur" in e]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if parse_step(e["name"]) is not None]
    found = [e["ts"] for e in events if e["name"] == name]
    return [sum(first <= start <= last for start in found) for first, last in steps]


def sized(size):
    return DataLoader(TensorDataset(torch.zeros(size, 4)))


@pytest.mark.parametrize(
    ("size", "accumulate", "epochs", "expected"),
    [(10, 4, 1, [4, 4, 2]), (4, 3, 2, [3, 1, 3, 1])],
)
def test_rest_of_an_epoch_is_a_step_of_its_own(tmp_path, size, accumulate, epochs, expected):
    train(tmp_path, sized(size), accumulate, epochs)

    check_pair(tmp_path, list(range(len(expected))))
    assert work_of_steps(tmp_path, "aten::mse_loss") == expected
    assert work_of_steps(tmp_path, "Optimizer.step#SGD.step") == [1] * len(expected)


def test_rest_of_an_epoch_of_unknown_length_is_dropped_as_monai_drops_its_gradients(tmp_path):
    train(tmp_path, DataLoader(Stream(10)), 4, 2)

    said = manifest(tmp_path)["windows"][0]
    assert (said["steps"], said["aborted_steps"]) == ([0, 1, 2, 3, 4], [2])
    assert work_of_steps(tmp_path, "aten::mse_loss") == [4, 4, 2, 4, 4, 2]
    assert work_of_steps(tmp_path, "Optimizer.step#SGD.step") == [1, 1, 0, 1, 1, 1]


def test_update_of_ones_own(tmp_path):
    train(tmp_path, sized(3), 1, 2, update=lambda engine, batch: torch.nn.functional.mse_loss(batch[0], batch[0]))

    check_pair(tmp_path, [0, 1, 2, 3, 4, 5])
    assert work_of_steps(tmp_path, "aten::mse_loss") == [1] * 6
