"""Capture, merge and explain PyTorch training traces (Chakra host trace + Kineto device trace)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chakra_capture.config import ChakraProfileConfig
    from chakra_capture.recording.session import capture

__all__ = ["ChakraProfileConfig", "capture"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line must start without torch, and a disabled job must not import the profiler.
    if name == "ChakraProfileConfig":
        from chakra_capture.config import ChakraProfileConfig

        return ChakraProfileConfig
    if name == "capture":
        from chakra_capture.recording.session import capture

        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
