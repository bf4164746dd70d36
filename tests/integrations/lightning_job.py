"""The contract's training with Lightning, in either of its packages."""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

from chakra_capture.integrations.lightning import ChakraProfileCallback
from integrations.contract import (
    Batches,
    Plan,
    Result,
    make_network,
    make_optimizer,
    training_data,
    validate,
    validation_data,
)

warnings.filterwarnings("ignore", module="pytorch_lightning|lightning")


class LightningJob:
    """Trains with ``pytorch_lightning`` or ``lightning.pytorch``."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def adapter(self, chosen: object, accumulate: int = 1) -> Any:
        return ChakraProfileCallback(chosen)

    def train(self, adapter: Any, plan: Plan) -> Result:
        with TemporaryDirectory() as folder:
            saved = Path(folder) / "saved.ckpt"
            if plan.resume_at:
                earlier = self._trainer(plan, [], max_steps=plan.resume_at)
                earlier.fit(self._module(Plan()), training_data(plan))
                earlier.save_checkpoint(saved)
            # A training saved at its end has ended its epoch too.
            num_epochs = plan.epochs + bool(plan.resume_at)
            trainer = self._trainer(plan, [adapter] if adapter is not None else [], max_epochs=num_epochs)
            module = self._module(plan)
            held_out = validation_data() if plan.validates else None
            trainer.fit(module, training_data(plan), held_out, ckpt_path=str(saved) if plan.resume_at else None)
        return Result.of(module.network, trainer.global_step)

    def _trainer(self, plan: Plan, callbacks: list[Any], **limits: int) -> Any:
        return self.package.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            val_check_interval=2 if plan.validates else None,
            accumulate_grad_batches=plan.accumulate,
            callbacks=callbacks,
            **limits,
        )

    def _module(self, plan: Plan) -> Any:
        class Module(self.package.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.network, self.batches = make_network(), Batches(plan)

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                return self.batches.loss(self.network, batch)

            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                validate(self.network, batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return make_optimizer(self.network)

        return Module()
