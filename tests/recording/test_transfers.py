"""Which copies are transfers to a device; the device here is one that computes nothing."""

import threading

import pytest
import torch
from phases.phase_lines import calls, steps

from chakra_capture import capture
from chakra_capture.recording.transfers import HostToDevice
from recording.recorded import settings

META = torch.device("meta")


def num_transfers(folder, work) -> int:
    """How many transfers a step has whose work runs inside the mode."""
    with capture(settings(folder, None, None)) as session, session.step(0), HostToDevice(session, "meta"):
        work(torch.ones(2))
    (step,) = steps(folder)
    return calls(step, "h2d")


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("meta"),
        lambda x: x.to("meta:0"),
        lambda x: x.to(META),
        lambda x: x.to(device=META, non_blocking=True),
        lambda x: x.to(META, torch.float64, False, True),
        lambda x: x.to("meta", copy=True),
        lambda x: x.to(torch.empty(1, device="meta")),
        lambda x: x.to(tensor=torch.empty(1, device="meta")),
        lambda x: torch.Tensor.to(x, "meta"),
        lambda x: torch.nn.Linear(1, 1, bias=False).to("meta"),
    ],
)
def test_a_copy_to_the_device_is_a_transfer(tmp_path, move):
    assert num_transfers(tmp_path, move) == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.to("cpu"),
        lambda x: x.to(x),
        lambda x: torch.empty(1, device="meta").to("meta"),
        lambda x: torch.empty(1, device="meta").to(torch.float64),
        lambda x: x + x,
    ],
)
def test_other_work_is_none(tmp_path, work):
    assert num_transfers(tmp_path, work) == 0


def test_what_other_threads_copy_is_none_of_the_loops(tmp_path):
    def work(x: torch.Tensor) -> None:
        other = threading.Thread(target=lambda: x.to("meta"))
        other.start()
        other.join()

    assert num_transfers(tmp_path, work) == 0


def test_a_copy_that_fails_fails_as_it_would_without_us(tmp_path):
    def work(x: torch.Tensor) -> None:
        with pytest.raises(RuntimeError) as ours:
            x.to("nowhere")
        said.append(str(ours.value))

    said: list[str] = []
    assert num_transfers(tmp_path, work) == 0
    with pytest.raises(RuntimeError) as bare:
        torch.ones(2).to("nowhere")
    assert said == [str(bare.value)]
