"""A C part that was built from other code is not called."""

import subprocess
from pathlib import Path

import pytest

from chakra_capture.merge import join, nest
from chakra_capture.trace import native
from chakra_capture.trace.compiled import load


@pytest.mark.parametrize("module", [nest, join])
def test_library_of_another_interface_counts_as_not_built(module: "type[nest] | type[join]") -> None:
    assert load(module._LIBRARY, module._INTERFACE) is not None
    assert load(module._LIBRARY, module._INTERFACE + 1) is None


@pytest.mark.parametrize("code", ["int cc_interface(void) { return -7; }", "int other(void) { return 1; }"])
def test_scanner_left_over_from_older_code_is_not_used(code: str, tmp_path: Path) -> None:
    source, stem = tmp_path / "old.c", tmp_path / "_scan"
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", stem.with_suffix(".so"), source], check=True)
    assert native.load(stem) is None
