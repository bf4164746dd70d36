"""What ``chakra-capture run`` hands to the process that runs the script."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run and how to record it."""

    target: str
    is_module: bool = False
    merge: bool = False
    is_path_safe: bool = False  # Python is not to put the folder of the script on the path
    settings: dict[str, Any] = field(default_factory=dict)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command of a process that does so, with the options of this interpreter."""
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # -P: the folder that a job is started in holds its files, which are not to be taken for modules of ours.
        safe = [] if "-P" in flags else ["-P"]
        return [sys.executable, *flags, *safe, "-m", "chakra_capture.runner", json.dumps(asdict(self)), *arguments]
