"""Files that verbs write beside what they print: whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from chakra_capture.layout import PART_SUFFIX


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON under a working name of its own, which then takes the place of what is there.

    Raises:
        OSError: the folder cannot be written to.
    """
    handle, part = tempfile.mkstemp(PART_SUFFIX, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.write("\n")
        # mkstemp keeps the file to its owner; the files of a run may be read by whoever may read its folder.
        Path(part).chmod(0o640)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
