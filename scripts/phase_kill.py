"""What is left of the phases when a training is killed: SIGKILL at a random moment, again and again.

    phase_kill.py [--times 20] [--seed 0]

Each training notes every step that has ended in a log of its own, unbuffered. Afterwards the file of phases must load,
line by line, without holes, and what the log has and the file has not must be of the last second.
Exit status: 0 it is so every time, 1 it is not.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from chakra_capture import ChakraProfileConfig, phases

BAR_NS = 1_000_000_000


def train(folder: Path) -> None:
    """Train for ever; a line of the log is the number of a step and the moment after it."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    phases.init(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=str(folder)))
    network = torch.nn.Linear(4, 1)
    forward = phases.wrap_forward(network)
    optimizer = phases.wrap_optimizer(torch.optim.SGD(network.parameters(), lr=0.01))
    for step, batch in enumerate(phases.wrap_dataloader(torch.ones(1, 4) for _ in itertools.count())):
        phases.wrap_backward(forward(batch).sum()).backward()
        optimizer.step()
        os.write(log, f"{step} {time.monotonic_ns()}\n".encode())
        time.sleep(0.001)


def kill_one(folder: Path, after_s: float) -> None:
    child = os.fork()
    if not child:
        try:
            train(folder)
        finally:
            os._exit(1)
    log = folder / "log"
    while not (log.exists() and log.stat().st_size):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            raise SystemExit("the training ended by itself")
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def judge(folder: Path) -> tuple[str, bool]:
    """Say what is left, and whether that is enough."""
    ended = [
        tuple(map(int, line.split())) for line in (folder / "log").read_text().splitlines() if line.count(" ") == 1
    ]
    (file,) = folder.glob("*_phases/*.jsonl.part")
    *lines, rest = file.read_text().split("\n")
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    numbers = [step["step"] for step in steps]
    kept_ns = steps[-1]["begin_ns"] + steps[-1]["ns"] if steps else ended[0][1]
    lost_ns = max(0, ended[-1][1] - kept_ns)
    longest_ns = max(later - earlier for (_, earlier), (_, later) in itertools.pairwise(ended))
    is_right = not rest and numbers == list(range(len(numbers))) and lost_ns <= BAR_NS + longest_ns
    said = f"{len(ended)} steps ended, {len(numbers)} are in the file, the last {lost_ns / 1e9:.3f} s are lost"
    return f"{said}{', the last line is cut' if rest else ''}", is_right


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    moments = random.Random(options.seed)
    num_wrong = 0
    for number in range(options.times):
        with tempfile.TemporaryDirectory() as name:
            kill_one(Path(name), moments.uniform(0.5, 3))
            said, is_right = judge(Path(name))
        num_wrong += not is_right
        print(f"{number + 1}: {said}{'' if is_right else ': WRONG'}", flush=True)
    print(f"{options.times - num_wrong} of {options.times} times all but the last second is there")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
