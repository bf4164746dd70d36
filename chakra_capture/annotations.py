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
# The observer's own root nodes.
PROCESS_ROOT = "[pytorch|profiler|execution_trace|process]"
THREAD_ROOT = "[pytorch|profiler|execution_trace|thread]"

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,18})")
# The observer writes names without JSON escapes, and Kineto does not escape a double quote: either
# makes the whole file unreadable (torch 2.13), so our own annotations never carry such characters.
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f]')


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
