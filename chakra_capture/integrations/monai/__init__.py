"""MONAI: a handler for ``train_handlers`` that records the window of a trainer.

A step is one update of a ``SupervisedTrainer``: one iteration, or ``accumulation_steps`` of them, the rest at the end
of an epoch included. Where the length of an epoch is not known, MONAI drops that rest, and it is no step. Everything
else is as for any Ignite engine (``chakra_capture.integrations.ignite``); of other trainers an iteration is a step. The
evaluator of a ``ValidationHandler`` is known to validate; ``handler.attach_validation`` names others.
"""

from chakra_capture.integrations.frameworks import require

require("monai", "ignite", framework="MONAI with PyTorch-Ignite", extra="monai")

from chakra_capture.integrations.monai.handler import ChakraProfileHandler  # noqa: E402

__all__ = ["ChakraProfileHandler"]
