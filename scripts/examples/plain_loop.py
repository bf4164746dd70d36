"""Train a small network in a plain loop, and set its own count of updates beside the steps recorded of it.

python scripts/examples/plain_loop.py [FOLDER]       default ./chakra_traces
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture import ChakraProfileConfig, phases

EPOCHS, ACCUMULATION = 2, 3
PHASES = ("input_wait", "forward", "backward", "optimizer")


def train(folder: str) -> tuple[int, Path]:
    """Train; returns the number of updates and the file of the phases."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(640, 32), torch.randn(640, 1)), batch_size=64)

    session = phases.init(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=folder))
    loader, forward = phases.wrap_dataloader(loader, ACCUMULATION), phases.wrap_forward(model)
    optimizer = phases.wrap_optimizer(optimizer)

    num_updates = 0
    for _ in range(EPOCHS):
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = torch.nn.functional.mse_loss(forward(inputs), targets) / ACCUMULATION
            phases.wrap_backward(loss).backward()
            if number % ACCUMULATION == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                num_updates += 1
        with session.phase("validation"), torch.no_grad():
            model(torch.randn(640, 32))
    assert session.paths is not None
    file = session.paths.phases_file(0)
    phases.close()
    return num_updates, file


def main(arguments: list[str]) -> int:
    num_updates, file = train(arguments[0] if arguments else "chakra_traces")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and "partial" not in line.get("flags", [])]
    print(f"updates made by the loop: {num_updates}\nsteps recorded: {len(steps)}\nfile: {file}")
    for name in PHASES:
        times = [line["phases"][name][0] for line in steps if name in line["phases"]]
        print(f"{name}: {sum(times) / max(1, len(times)) / 1e6:.3f} ms on average, {len(times)} steps")
    return int(num_updates != len(steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
