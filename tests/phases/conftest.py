"""Fixtures of the tests of phases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chakra_capture.recording import registry


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of one's own, where ./chakra_traces is new, and leave the process uninitialised."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    registry.release_init()
