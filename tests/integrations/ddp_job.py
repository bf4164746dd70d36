"""A job of several processes for the tests: trains, and records."""

import sys
from pathlib import Path

from recording.recorded import settings

from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations.models import Model, loader, trainer


def main(trace_dir: str, start: str, end: str, strategy: str = "ddp", **changes: object) -> None:
    """Fit once; ``trainer`` settings as name=value."""
    callback = ChakraProfileCallback(settings(Path(trace_dir), int(start), int(end)))
    fitted = trainer(callback, strategy=strategy, **changes)
    fitted.fit(Model(), loader(32))


if __name__ == "__main__":
    pairs = (pair.split("=") for pair in sys.argv[4:])
    options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    main(*sys.argv[1:4], **options)
