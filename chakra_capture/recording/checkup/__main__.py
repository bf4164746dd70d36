"""The process behind ``chakra-capture doctor``: says as JSON lines what it looks at and what it finds.

Each line is written before what might end the process, or hang it, begins; so whoever reads them knows where it was.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.recording.checkup import Level, planned
from chakra_capture.recording.checkup.machine import FOLDER
from chakra_capture.recording.checkup.trial import SUBJECT as TRIAL
from chakra_capture.recording.checkup.trial import trial
from chakra_capture.recording.run import trace_folder
from chakra_capture.recording.surroundings import versions_in_use


def main(channel: TextIO, trace_dir: str, framework: str | None) -> None:
    """Write what is found to ``channel``."""

    def tell(**line: Any) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    blocked = set()
    for subject, look in planned(trace_dir, framework):
        tell(looks_at=subject)
        for check in look():
            tell(check=check.as_json())
            if check.level is Level.cannot_record:
                blocked.add(subject)
    tell(versions=versions_in_use())
    if not blocked - {FOLDER}:
        tell(looks_at=TRIAL)
        folder = None if blocked else trace_folder(ChakraProfileConfig(trace_dir=trace_dir))
        for check in trial(Path(folder) if folder is not None else None):
            tell(check=check.as_json())
    tell(is_done=True)


if __name__ == "__main__":
    # What torch and Kineto print must not come between the lines.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(descriptor, "w") as file:
        main(file, sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
