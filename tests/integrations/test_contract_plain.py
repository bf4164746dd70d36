"""Plain loops pass the contract."""

from contextlib import nullcontext
from itertools import islice

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


class PlainJob:
    def adapter(self, chosen, accumulate=1):
        capture(chosen)  # says what is wrong
        return chosen

    def train(self, adapter, plan: Plan) -> Result:
        network, batches, step = make_network(), Batches(plan), plan.resume_at
        optimizer, loader = make_optimizer(network), training_data(plan)
        with capture(adapter if adapter is not None else {"enabled": False}) as session:
            for _ in range(plan.epochs):
                reader = iter(loader)
                for _ in range(plan.batches // plan.accumulate - plan.resume_at):
                    with session.step(step) if adapter is not None else nullcontext():
                        for batch in islice(reader, plan.accumulate):
                            (batches.loss(network, batch) / plan.accumulate).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    step += 1
                if plan.validates:
                    session.start_validation()
                    for batch in validation_data():
                        validate(network, batch)
                    session.end_validation()
        return Result.of(network, step)


class TestPlainLoop(Contract):
    job = PlainJob()
