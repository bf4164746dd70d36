"""PyTorch Lightning (``pytorch_lightning`` and ``lightning.pytorch``): a callback, and a mixin for NeMo-style modules.

A step is a group of batches that ends where the loop updates: one batch, or ``accumulate_grad_batches`` of them, the
rest at the end of an epoch included. With manual optimization it ends with the batch in which an optimizer stepped.
Step g runs from the loop's request for its first batch to the end of its last batch;
validation, checkpoints and other callbacks' batch-end hooks are in no step. Steps go on from the trainer's count after
a resume.
"""

from chakra_capture.integrations.lightning.callback import ChakraProfileCallback
from chakra_capture.integrations.lightning.mixin import ChakraProfilingMixin

__all__ = ["ChakraProfileCallback", "ChakraProfilingMixin"]
