"""A job of several processes for the tests: trains, records, optionally with a rank that cannot write."""

import sys
from pathlib import Path

import pytorch_lightning as pl
from recording.recorded import settings

from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations.models import Model, loader, trainer


class InTheWay(pl.Callback):
    """Puts a file where one rank is going to write."""

    def __init__(self, trace_dir: Path, rank: int) -> None:
        self.part = trace_dir / f"0_chakra/rank-{rank}.json.part"
        self.rank = rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_rank == self.rank and batch_idx == 0:
            self.part.parent.mkdir(exist_ok=True)
            self.part.write_text("")


def main(trace_dir: str, start: str, end: str, break_rank: int = -1, strategy: str = "ddp", **changes: object) -> None:
    """Fit once; ``trainer`` settings as name=value."""
    callback = ChakraProfileCallback(settings(Path(trace_dir), int(start), int(end)))
    fitted = trainer(callback, InTheWay(Path(trace_dir), break_rank), strategy=strategy, **changes)
    fitted.fit(Model(), loader(32))


if __name__ == "__main__":
    pairs = (pair.split("=") for pair in sys.argv[4:])
    options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    main(*sys.argv[1:4], **options)
