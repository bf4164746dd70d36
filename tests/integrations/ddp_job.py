"""A job of several processes for the tests: trains, and records."""

import sys
from pathlib import Path

from recording.recorded import settings

from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations.models import Model, loader, trainer


def main(trace_dir: str, start: str, end: str, strategy: str = "ddp", **changes: object) -> None:
    """Fit with each of some strategies; ``trainer`` settings as name=value."""
    strategies = strategy.split(",")
    for name in strategies:
        folder = Path(trace_dir) / name if len(strategies) > 1 else Path(trace_dir)
        callback = ChakraProfileCallback(settings(folder, int(start), int(end)))
        trainer(callback, strategy=name, **changes).fit(Model(), loader(32))


if __name__ == "__main__":
    pairs = (pair.split("=") for pair in sys.argv[4:])
    options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    main(*sys.argv[1:4], **options)
