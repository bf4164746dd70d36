"""Files that verbs write beside what they print: whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from chakra_capture.layout import PART_SUFFIX


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_bytes(path, f"{json.dumps(content, indent=2, allow_nan=False)}\n".encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a working name of its own, which then takes the place of what is there.

    Raises:
        OSError: the folder cannot be written to.
    """
    handle, part = tempfile.mkstemp(PART_SUFFIX, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp keeps the file to its owner; the files of a run may be read by whoever may read its folder.
        Path(part).chmod(0o640)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
