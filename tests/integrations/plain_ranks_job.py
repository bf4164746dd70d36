"""One rank of a plain loop with gloo: rank 1 is late to the window, and dies inside it."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recording.loops import work
from recording.recorded import settings

from chakra_capture import capture


def main(trace_dir: str) -> None:
    """Train in step with the other rank."""
    dist.init_process_group("gloo")
    with capture(settings(Path(trace_dir), 2, 8)) as session:
        for step in range(12):
            with session.step(step):
                if dist.get_rank() == 1 and step == 2:
                    time.sleep(0.5)
                if dist.get_rank() == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                work()
                dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main(sys.argv[1])
