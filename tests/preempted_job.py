"""A Hydra application of the example configurations that a scheduler may preempt.

The job whose network is ``hidden=32`` wide comes, the first time, into step 3 and no further: it says so in a file
``waiting`` and works on until a signal ends it. Each job says who handled the signals before, in and after a recording.
"""

import os
import signal
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from chakra_capture import capture

CONFIGS = Path(__file__).parents[1] / "configs"
PREEMPTED, AT_STEP = 32, 3


def handlers() -> list[str]:
    """Who handles the signals by which schedulers announce the end."""
    found = (signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2))
    return [getattr(handler, "__qualname__", str(handler)) for handler in found]


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="plain_loop")
def main(config: DictConfig) -> None:
    model = torch.nn.Linear(32, config.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mark = Path(config.chakra_profile.trace_dir, "..", "waiting").resolve()
    seen = [handlers()]
    with capture(config.chakra_profile) as session:
        for step in range(config.steps):
            with session.step(step):
                if (config.hidden, step) == (PREEMPTED, AT_STEP) and not mark.exists():
                    mark.with_suffix(".part").write_text(str(os.getpid()))
                    mark.with_suffix(".part").rename(mark)
                    while True:
                        model(torch.randn(4, 32)).sum().backward()
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                seen.append(handlers())
    seen.append(handlers())
    mark.with_name("handlers").write_text("\n".join(sorted({" ".join(each) for each in seen})))


if __name__ == "__main__":
    main()
