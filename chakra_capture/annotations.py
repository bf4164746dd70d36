"""The labels written into traces, and how to read them back."""

import re

STEP_PREFIX = "ProfilerStep#"
VALIDATION = "## chakra_capture:validation ##"
PROCESS_GROUP_INIT = "## process_group:init ##"
# The parts of a step, and what may come between two steps (or between the batches of one that accumulates).
INPUT_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER = "input_wait", "h2d", "forward", "backward", "optimizer"
VALIDATION_PHASE, CHECKPOINT, CALLBACKS = "validation", "checkpoint", "callbacks"
BETWEEN_STEPS = (VALIDATION_PHASE, CHECKPOINT, CALLBACKS)
PHASE_NAMES = (INPUT_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER)
# What recording itself takes between two steps: the start and the end of a window.
RECORDING = "recording"
# What may be said of a step, and what the whole of it is called on the device's time line.
PROFILED, FIRST, PARTIAL, UPDATE_SKIPPED = "profiled", "first", "partial", "update_skipped"
WHOLE_STEP = "(step)"
# Of a training whose forward, backward and optimizer nobody tells apart.
ITERATION = "iteration"
# What a framework calls inside a step: somebody's handler or callback by its name, and what MONAI does as handlers.
HANDLER_PREFIX = "handler:"
DECOLLATE, POSTPROCESSING = "decollate", "postprocessing"
_LONGEST_HANDLER = 80
# The observer's own root nodes.
PROCESS_ROOT = "[pytorch|profiler|execution_trace|process]"
THREAD_ROOT = "[pytorch|profiler|execution_trace|thread]"

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,18})")
# The observer writes names without JSON escapes, and Kineto does not escape a double quote: either
# makes the whole file unreadable (torch 2.13), so our own annotations never carry such characters.
# A lone surrogate cannot be written at all.
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')


def step_name(step: int) -> str:
    """Name the annotation that covers global step ``step``."""
    return f"{STEP_PREFIX}{step}"


def parse_step(name: str) -> int | None:
    """Return the step number of a ``ProfilerStep#<n>`` annotation, None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def safe_name(name: str) -> str:
    """Replace the characters that make a trace file invalid JSON by ``_``."""
    return _UNSAFE.sub("_", name)


def handler_label(name: str) -> str:
    """Label the time that a handler or callback of this name takes inside a step."""
    return HANDLER_PREFIX + safe_name(name)[:_LONGEST_HANDLER]


def is_handler(label: str) -> bool:
    """Say whether a label is that of something which a framework calls inside a step."""
    return label.startswith(HANDLER_PREFIX) or label in (DECOLLATE, POSTPROCESSING)
