"""Hugging Face Transformers: a callback that records the window of a ``Trainer`` and times the phases of its steps.

A step is one update: one batch, or ``gradient_accumulation_steps`` of them, the rest at the end of an epoch included.
It runs from the trainer's request for all batches of its group, which come before any is computed with, to
``on_step_end``; logging, evaluation, saving and other callbacks' ``on_step_end`` are in no step. (Accelerate's loader
reads one batch ahead: the request that opens a step is the one for its batches all the same.) Steps are numbered by
``state.global_step``, which a resume continues. Validation is ``Trainer.evaluate`` and ``Trainer.predict``, whoever
calls them.

Phases of a step are ``input_wait`` (that request, with the copies to the device that the loader makes), ``forward``
(what ``training_step`` calls of the model or its children), ``backward`` (Accelerate's) and ``optimizer`` (its ``step``
alone). Clipping, the scheduler and zeroing of gradients are in no phase. Between steps: ``validation``, ``checkpoint``,
and ``callbacks`` with all else from the end of a step to the next request, or to the end of the epoch.
"""

from chakra_capture.integrations.frameworks import require

require("transformers", "accelerate", framework="Transformers with Accelerate", extra="huggingface")

from chakra_capture.integrations.huggingface.callback import ChakraProfileCallback  # noqa: E402

__all__ = ["ChakraProfileCallback"]
