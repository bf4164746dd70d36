"""Where the handed traces lie: ``CHAKRA_CAPTURE_DATA``, else ``../shared/data`` beside the repository."""

import gzip
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = Path(os.environ.get("CHAKRA_CAPTURE_DATA", _DEFAULT))
CASES = DATA.parent / "cases"
SAMPLES = DATA.parent / "samples_torch213"


def require(path: Path) -> Path:
    """Skip the test, with the reason, where the handed file or folder is not there."""
    if not path.exists():
        pytest.skip(f"handed data {path} is not here; set CHAKRA_CAPTURE_DATA to the folder that holds it")
    return path


def load_json(path: Path) -> Any:
    """Read a plain or gzip JSON file; numbers with a point stay exact decimals."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    return json.loads(raw.decode("utf-8-sig"), parse_float=Decimal)


def expected_breakdown() -> dict[str, Any]:
    return json.loads(require(DATA / "expected_breakdown.json").read_text())  # type: ignore[no-any-return]
