"""Copies from the host to a device, timed as the phase h2d while a loop moves its batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from chakra_capture.annotations import H2D
from chakra_capture.recording.session import Session


class HostToDevice(TorchFunctionMode):
    """``with HostToDevice(session, "cuda"): ...`` times what moves tensors of this thread from the CPU to the device.

    Args:
        session: what is told.
        device_type: of the device, as ``torch.device.type`` has it.
    """

    def __init__(self, session: Session, device_type: str) -> None:
        super().__init__()
        self._session = session
        self._device_type = device_type

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not self._is_transfer(func, args, named):
            return func(*args, **named)
        with self._session.phase(H2D):
            return func(*args, **named)

    def _is_transfer(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        if func is torch.Tensor.to:
            return args[0].device.type == "cpu" and self._is_device(_wanted(args, named))
        return func is torch.Tensor.cuda and args[0].device.type == "cpu"

    def _is_device(self, wanted: object) -> bool:
        if isinstance(wanted, torch.Tensor):
            wanted = wanted.device
        if isinstance(wanted, torch.device):
            return wanted.type == self._device_type
        if isinstance(wanted, str):
            return wanted.partition(":")[0] == self._device_type
        # The number of a device; anything else is a dtype, and the tensor stays where it is.
        return isinstance(wanted, int)


def _wanted(args: tuple[Any, ...], named: dict[str, Any]) -> object:
    """What ``Tensor.to`` is asked for: a device, a dtype, or a tensor to be like."""
    return args[1] if len(args) > 1 else named.get("device", named.get("tensor"))
