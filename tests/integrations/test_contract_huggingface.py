"""The Hugging Face Trainer passes the contract."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import Trainer, TrainingArguments

from chakra_capture.integrations.huggingface import ChakraProfileCallback
from integrations.contract import (
    Batches,
    Contract,
    Items,
    Plan,
    Result,
    make_network,
    make_optimizer,
    validate,
)


class Model(torch.nn.Module):
    """Returns its loss, as the trainer wants it."""

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self.network, self.batches = make_network(), batches

    def forward(self, inputs):
        if self.training:
            return {"loss": self.batches.loss(self.network, inputs)}
        return {"loss": validate(self.network, inputs), "out": inputs}


class HuggingFaceJob:
    def adapter(self, chosen, accumulate=1):
        return ChakraProfileCallback(chosen)

    def train(self, adapter, plan: Plan) -> Result:
        with TemporaryDirectory() as folder:
            if plan.resume_at:
                self._trainer(Path(folder), [], Plan(batches=plan.batches), max_steps=plan.resume_at).train()
            trainer = self._trainer(Path(folder), [adapter] if adapter is not None else [], plan)
            trainer.train(resume_from_checkpoint=True if plan.resume_at else None)
        return Result.of(trainer.model.network, trainer.state.global_step)

    def _trainer(self, folder, callbacks, plan, max_steps=-1):
        model = Model(Batches(plan))
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            num_train_epochs=plan.epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=plan.accumulate,
            eval_strategy="steps" if plan.validates else "no",
            eval_steps=2,
            save_strategy="no" if max_steps < 0 else "steps",
            save_steps=max(max_steps, 1),
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        return Trainer(
            model=model,
            args=arguments,
            data_collator=lambda rows: {"inputs": torch.stack(rows)},
            train_dataset=Items(plan.batches),
            eval_dataset=Items(2, name=None) if plan.validates else None,
            optimizers=(make_optimizer(model), None),
            callbacks=callbacks,
        )


class TestHuggingFace(Contract):
    job = HuggingFaceJob()
