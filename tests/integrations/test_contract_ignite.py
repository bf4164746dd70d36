"""Ignite engines pass the contract."""

from ignite.engine import Engine, Events

from chakra_capture.integrations.ignite import ChakraProfileHandler
from integrations.contract import (
    Batches,
    Contract,
    Plan,
    Result,
    make_network,
    make_optimizer,
    training_data,
    validate,
    validation_data,
)


class IgniteJob:
    def adapter(self, chosen, accumulate=1):
        return ChakraProfileHandler(chosen, gradient_accumulation_steps=accumulate)

    def train(self, adapter, plan: Plan) -> Result:
        network, batches = make_network(), Batches(plan)
        optimizer = make_optimizer(network)

        def update(engine, batch):
            (batches.loss(network, batch) / plan.accumulate).backward()
            if engine.state.iteration % plan.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

        trainer, evaluator = Engine(update), Engine(lambda _, batch: validate(network, batch))
        if plan.validates:
            # Attached before ours, as it may be.
            for event in (Events.ITERATION_COMPLETED(every=2), Events.EPOCH_COMPLETED):
                trainer.add_event_handler(event, lambda: evaluator.run(validation_data()))
        if adapter is not None:
            adapter.attach(trainer)
            adapter.attach_validation(evaluator)
        if plan.resume_at:
            done = {"iteration": plan.resume_at, "max_epochs": plan.epochs, "epoch_length": plan.batches}
            trainer.load_state_dict(done)
        trainer.run(training_data(plan), max_epochs=plan.epochs)
        return Result.of(network, trainer.state.iteration // plan.accumulate)


class TestIgnite(Contract):
    job = IgniteJob()
