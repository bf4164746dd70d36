"""PyTorch Lightning (``pytorch_lightning`` and ``lightning.pytorch``): a callback, and a mixin for NeMo-style modules.

A step is a group of batches that ends where the loop updates: one batch, or ``accumulate_grad_batches`` of them, the
rest at the end of an epoch included. With manual optimization it ends with the batch that raised
``trainer.global_step``; a loop that steps bare torch optimizers (``use_pl_optimizer=False``) raises it never, so such
a loop has no steps here. Step g runs from the loop's request for its first batch to the end of its last one;
validation, checkpoints and other callbacks' batch-end hooks are in no step. Steps are counted from the trainer's
count at start, so they go on after a resume.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from chakra_capture.config import ChakraProfileConfig, settings_from
from chakra_capture.errors import MissingDependencyError
from chakra_capture.layout import RunPaths
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.run import planned_paths
from chakra_capture.recording.session import Session

if TYPE_CHECKING:
    from pathlib import Path
