"""Windows on demand on two ranks with gloo, asked for at random moments: do both record the same steps?

Half of the tries train in step (DistributedDataParallel); in the other half the ranks wait for each other only now and
then, so that one may be past the steps when it hears of them. Each try asks through ``chakra-capture trigger`` and then
looks at what the ranks have written: the same steps on both, or nothing on both and a reason from both. Exit code 1 if
any try ends otherwise.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_S = 0.004
LIMIT_S = 60


def train(folder: Path, is_in_step: bool) -> None:
    """One rank: trains until the folder holds a file ``stop``."""
    import logging

    import torch
    import torch.distributed as dist

    from chakra_capture import capture

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, network = dist.get_rank(), torch.nn.Linear(8, 8)
    model = torch.nn.parallel.DistributedDataParallel(network) if is_in_step else network
    chosen = {"enabled": True, "start_step": None, "trace_dir": str(folder / "traces"), "trigger": {"max": 1000}}
    with capture(chosen) as session:
        (folder / f"ready-{rank}").touch()
        step, is_over = 0, torch.zeros(1)
        while not is_over:
            with session.step(step):
                model(torch.ones(4, 8)).sum().backward()
                # Out of step, rank 1 is the faster one.
                time.sleep(STEP_S if is_in_step or rank == 0 else STEP_S / 8)
            step += 1
            if step % (20 if is_in_step else 4000) == 0:
                is_over[0] = float((folder / "stop").exists())
                dist.all_reduce(is_over)
    dist.barrier()


def start(folder: Path, is_in_step: bool) -> list["subprocess.Popen[str]"]:
    """Start two ranks and wait until both train."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--rank-in", str(folder), *(["--in-step"] if is_in_step else [])]
        environ = os.environ | {name: str(value) for name, value in place.items()}
        with (folder / f"said-{rank}").open("w") as said:
            ranks.append(subprocess.Popen(command, env=environ, stderr=said, text=True))
    end = time.monotonic() + LIMIT_S
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        if time.monotonic() > end or any(rank.poll() is not None for rank in ranks):
            raise SystemExit(f"the ranks do not train: {(folder / 'said-0').read_text()}")
        time.sleep(0.05)
    return ranks


def ask(folder: Path) -> str:
    """Ask for a window of one to three steps; returns what the command says."""
    steps = str(random.randint(1, 3))
    command = [sys.executable, "-m", "chakra_capture", "trigger", str(folder / "traces"), "--steps", steps, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout.replace("\n", "") if done.returncode == 0 else done.stderr.strip()


def recorded(folder: Path, rank: int) -> list[list[int]]:
    """The steps of each window of a rank that training has left whole."""
    content = json.loads((folder / "traces" / "0_run" / f"rank-{rank}.json").read_text())
    return [window["steps"] for window in content["windows"]]


def reasons(folder: Path, rank: int) -> int:
    """How often a rank has said that it does not record announced steps."""
    return (folder / f"said-{rank}").read_text().count("are not recorded on rank")


def tries(num_tries: int, is_in_step: bool) -> int:
    """Ask ``num_tries`` times; returns how many ended as they must not."""
    num_wrong = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ranks = start(folder, is_in_step)
        said = []
        for number in range(num_tries):
            time.sleep(random.uniform(0, 1.5))
            said.append(ask(folder))
            print(f"{'in step' if is_in_step else 'apart'} {number + 1}: {said[-1]}", flush=True)
        time.sleep(1)
        (folder / "stop").touch()
        for rank in ranks:
            if rank.wait(LIMIT_S):
                print("a rank failed", (folder / "said-0").read_text(), (folder / "said-1").read_text(), flush=True)
                return num_tries
        steps = [recorded(folder, rank) for rank in range(2)]
        num_opened = sum('"recording"' in line for line in said)
        num_refused = [reasons(folder, rank) for rank in range(2)]
        print(f"recorded on rank 0: {steps[0]}, on rank 1: {steps[1]}; said why not: {num_refused}", flush=True)
        announced = [json.loads(line) for line in said if '"recording"' in line]
        wanted = [list(range(a["first_step"], a["last_step"] + 1)) for a in announced]
        num_wrong += steps[0] != wanted or steps[1] != wanted
        num_wrong += num_refused != [num_tries - num_opened] * 2
    return num_wrong


def main() -> None:
    """Run the tries, or one rank of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="how often a window is asked for, in step and apart")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--in-step", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_in is not None:
        train(chosen.rank_in, chosen.in_step)
        return
    half = (chosen.tries + 1) // 2
    groups = ((half, True), (chosen.tries - half, False))
    num_wrong = sum(tries(num_tries, is_in_step) for num_tries, is_in_step in groups if num_tries)
    print("all as it must be" if not num_wrong else f"{num_wrong} groups of tries are wrong")
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
