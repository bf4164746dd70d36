"""MONAI: handlers for ``train_handlers`` that time the phases of a trainer's steps and record its window.

    init()
    trainer = SupervisedTrainer(..., train_handlers=[TraceMLHandler()])            # phases of all steps
    trainer = SupervisedTrainer(..., train_handlers=[ChakraProfileHandler(cfg)])   # and the window of cfg

A step is one update of a ``SupervisedTrainer``: one iteration, or ``accumulation_steps`` of them, the rest at the end
of an epoch included. Where the length of an epoch is not known, MONAI drops the gradients of that rest, and it is no
step: a warning and the phase file say which iterations. Phases of a step are

    input_wait  from the request for a batch until it is there, on the training thread
    h2d         the copies that prepare_batch makes to the device; on the CPU there is nothing to measure
    forward     the inferer's call
    backward    from the loss until its gradients are there
    optimizer   optimizer.step() alone; a step whose scaler skips it is flagged update_skipped

zero_grad, the loss, decollation and postprocessing are in the step and in no phase; ``summary`` tells them apart in
recorded steps, and handlers that run inside a step by their names. Handlers of ``ITERATION_COMPLETED``
and later, step schedulers among them, come between the steps: as validation (the evaluator of a
``ValidationHandler`` is known, ``handler.attach_validation`` names others), checkpoint, or callbacks.

Of a trainer that computes in its own way (GanTrainer, AdversarialTrainer, ``iteration_update``, an ``_iteration`` of
its own, evaluators) an iteration is a step, and ``input_wait`` and ``iteration`` are all that is measured;
``TraceMLHandler`` leaves such engines alone. Otherwise as for any Ignite engine.
"""

from chakra_capture.integrations.frameworks import require

require("monai", "ignite", framework="MONAI with PyTorch-Ignite", extra="monai")

from chakra_capture.integrations.monai.handler import ChakraProfileHandler, TraceMLHandler, init  # noqa: E402

__all__ = ["ChakraProfileHandler", "TraceMLHandler", "init"]
