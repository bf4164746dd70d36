"""Whether the framework that an adapter serves is installed."""

import importlib.util

from chakra_capture.errors import MissingDependencyError


def require(*modules: str, framework: str, extra: str) -> None:
    """Check that the modules of a framework are installed, without importing them.

    Raises:
        MissingDependencyError: one is not; the message names the extra that brings it.
    """
    if all(importlib.util.find_spec(module) for module in modules):
        return
    raise MissingDependencyError(
        f"chakra_capture.integrations.{extra} needs {framework}, which is not installed. "
        f'Run: pip install "chakra-capture[{extra}]"'
    )
