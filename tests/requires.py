"""What a test needs of the machine."""

import shutil

import pytest
import torch


def requires(what: str) -> pytest.MarkDecorator:
    """Skip, with a printed reason, where the machine does not have it; ``what`` is ``cuda`` or ``chromium``."""
    if what == "chromium":
        return pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (apt-get install chromium)")
    assert what == "cuda"
    return pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
