"""Loops with Lightning Fabric pass the contract."""

from contextlib import nullcontext
from itertools import islice

from lightning_fabric import Fabric

from chakra_capture import capture
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


class FabricJob:
    def adapter(self, chosen, accumulate=1):
        capture(chosen)  # says what is wrong
        return chosen

    def train(self, adapter, plan: Plan) -> Result:
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        bare, batches, step = make_network(), Batches(plan), plan.resume_at
        network, optimizer = fabric.setup(bare, make_optimizer(bare))
        loader, held_out = fabric.setup_dataloaders(training_data(plan), validation_data())
        with capture(adapter if adapter is not None else {"enabled": False}) as session:
            for _ in range(plan.epochs):
                reader = iter(loader)
                for _ in range(plan.batches // plan.accumulate - plan.resume_at):
                    with session.step(step) if adapter is not None else nullcontext():
                        for number, batch in enumerate(islice(reader, plan.accumulate), 1):
                            with fabric.no_backward_sync(network, enabled=number < plan.accumulate):
                                fabric.backward(batches.loss(network, batch) / plan.accumulate)
                        optimizer.step()
                        optimizer.zero_grad()
                    step += 1
                if plan.validates:
                    session.start_validation()
                    for batch in held_out:
                        validate(network, batch)
                    session.end_validation()
        return Result.of(bare, step)


class TestFabric(Contract):
    job = FabricJob()
