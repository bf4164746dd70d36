"""One rank of a plain loop under torchrun: in the first attempt, rank 1 leaves inside the window, and rank 0 hangs."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from recording.loops import work
from recording.recorded import settings

from chakra_capture import capture


def main(trace_dir: str) -> None:
    """Train; what torchrun does about the end of a rank takes its time."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # No messages here, so no need of connections, which may fail.
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with capture(settings(Path(trace_dir), 2, 40)) as session:
        for step in range(42):
            with session.step(step):
                work()
                if is_first and step == 30:
                    if dist.get_rank() == 1:
                        store.wait(["rank 0 is here"])
                        os._exit(3)
                    store.set("rank 0 is here", "")
                    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
