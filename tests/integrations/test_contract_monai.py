"""MONAI's SupervisedTrainer passes the contract."""

import torch
from ignite.engine import Events
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import ValidationHandler
from monai.inferers import Inferer

from chakra_capture.integrations.monai import ChakraProfileHandler
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


class Counting(Inferer):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __call__(self, inputs, network, *args, **kwargs):
        return self.batches.loss(network, inputs)


class Validating(Inferer):
    def __call__(self, inputs, network, *args, **kwargs):
        return validate(network, inputs)


def with_target(batch, device=None, non_blocking=False, **kwargs):
    return batch, torch.zeros(1)


class MonaiJob:
    def adapter(self, chosen, accumulate=1):
        return ChakraProfileHandler(chosen)

    def train(self, adapter, plan: Plan) -> Result:
        network, handlers = make_network(), []
        if adapter is not None:
            adapter.detach()  # from the trainer before, if there was one: a handler has one trainer at a time
        if plan.validates:
            evaluator = SupervisedEvaluator(
                device="cpu",
                val_data_loader=validation_data(),
                network=network,
                prepare_batch=with_target,
                inferer=Validating(),
                decollate=False,
            )
            # Attached before ours, as they may be.
            handlers += [ValidationHandler(2, evaluator, epoch_level=False), ValidationHandler(1, evaluator)]
        trainer = SupervisedTrainer(
            device="cpu",
            max_epochs=plan.epochs,
            train_data_loader=training_data(plan),
            network=network,
            optimizer=make_optimizer(network),
            loss_function=lambda predicted, target: predicted,
            prepare_batch=with_target,
            inferer=Counting(Batches(plan)),
            accumulation_steps=plan.accumulate,
            train_handlers=handlers + ([adapter] if adapter is not None else []),
        )
        if plan.resume_at:
            # Where a checkpoint is loaded: at STARTED, after ours.
            at = {"iteration": plan.resume_at, "max_epochs": plan.epochs, "epoch_length": plan.batches}
            trainer.add_event_handler(Events.STARTED, lambda: trainer.load_state_dict(at))
        trainer.run()
        return Result.of(network, trainer.state.iteration // plan.accumulate)


class TestMonai(Contract):
    job = MonaiJob()
