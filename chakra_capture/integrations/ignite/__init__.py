"""PyTorch-Ignite: a handler that records the window of any engine, and times the phases of all its steps.

A step is one iteration, or ``gradient_accumulation_steps`` of them, as Ignite's own trainers count (a group that is
unfinished at the end of an epoch goes on in the next one). It runs from the engine's request for the first batch to
the return of the process function for the last; handlers of ``ITERATION_COMPLETED`` and later events, validation among
them, are in no step. Steps go on from ``engine.state.iteration`` after a resume.

Phases of a step are ``input_wait`` (the engine's request for a batch until it is there) and ``iteration`` (the process
function: what it does inside, only it knows). Between steps, and between the batches of one step, ``validation``,
``checkpoint`` (Ignite's ``Checkpoint``) and ``callbacks`` (all other handlers, with the engine's own few microseconds).

An engine does not say that a handler of its validates, so validation, and ``validation: exclude``, need
``handler.attach_validation(evaluator)`` for every engine that does.
"""

from chakra_capture.integrations.frameworks import require

require("ignite", framework="PyTorch-Ignite", extra="ignite")

from chakra_capture.integrations.ignite.handler import ChakraProfileHandler, handlers_of  # noqa: E402

__all__ = ["ChakraProfileHandler", "handlers_of"]
