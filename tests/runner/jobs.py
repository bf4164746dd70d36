"""Trainings that know nothing of a recording; each prints, as JSON, which batches each of its updates was made of.

python jobs.py KIND
"""

import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS: list[list[int]] = []
BATCHES = 6


def numbered(count: int = BATCHES) -> TensorDataset:
    """Rows whose first column says which batch they are of."""
    number = torch.arange(count).repeat_interleave(2)
    return TensorDataset(number, torch.randn(2 * count, 4), torch.randn(2 * count, 1))


def batches(count: int = BATCHES) -> DataLoader:
    return DataLoader(numbered(count), batch_size=2)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def plain() -> None:
    """SGD in a function, two epochs, a validation after each."""
    model, held_out = network(), batches(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for number, inputs, targets in batches():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            STEPS.append([int(number[0])])
        for _, inputs, _ in held_out:  # fetched with gradients on, as in most scripts
            with torch.no_grad():
                model(inputs)


def scaler() -> None:
    """GradScaler with accumulation; the second update is skipped, for its gradients are infinite."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    scale = torch.amp.GradScaler("cpu", init_scale=4.0)
    group: list[int] = []
    for number, inputs, targets in batches():
        loss = torch.nn.functional.mse_loss(model(inputs), targets) / 2
        if number[0] == 2:
            loss = loss * torch.inf
        scale.scale(loss).backward()
        group.append(int(number[0]))
        if len(group) == 2:
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
            STEPS.append(group)
            group = []


def gan() -> None:
    """Two optimizers that both update with each batch."""
    generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator))
    for number, real, _ in batches():
        fake = generator(torch.randn(2, 4))
        first.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        first.step()
        second.zero_grad()
        (-critic(fake).mean()).backward()
        second.step()
        STEPS.append([int(number[0])])


def in_backward() -> None:
    """Each parameter has an optimizer of its own, which steps inside backward."""
    model = network()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for number, inputs, targets in batches():
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        STEPS.append([int(number[0])])


def closure() -> None:
    """LBFGS runs forward and backward inside its step."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for number, inputs, targets in batches():

        def again(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(again)
        STEPS.append([int(number[0])])


def two_loaders() -> None:
    """Each update takes a batch of two loaders; one more is validated from, a single batch at a time."""
    model, held_out = network(), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for (number, inputs, targets), (_, more, _) in zip(batches(), batches(), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs) + model(more), targets).backward()
            optimizer.step()
            STEPS.append([int(number[0]), int(number[0])])
            with torch.no_grad():
                model(next(iter(held_out))[1])


def left() -> None:
    """The loop is left by break, and something else takes time afterwards."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, inputs, targets in batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        STEPS.append([int(number[0])])
        if number[0] == 3:
            break
    model(torch.randn(2, 4))


def no_loader() -> None:
    """No loader at all: a step ends with the backward after its update."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).mean().backward()
        optimizer.step()
        STEPS.append([])


def lightning() -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            number, inputs, targets = batch
            if not STEPS or len(STEPS[-1]) == 2:
                STEPS.append([])
            STEPS[-1].append(int(number[0]))
            return torch.nn.functional.mse_loss(self.network(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    pl.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), batches())  # fmt: skip


def huggingface() -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, number: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            STEPS.append([int(number[0])])
            return {"loss": torch.nn.functional.mse_loss(self.network(inputs), labels)}

    rows = [dict(zip(("number", "inputs", "labels"), row, strict=True)) for row in numbered()]
    arguments = TrainingArguments(
        output_dir="out", max_steps=BATCHES, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=rows).train()


def monai() -> None:
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer

    model = network()
    rows = [{"image": inputs, "label": targets, "number": number} for number, inputs, targets in numbered()]
    trainer = SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=1, train_data_loader=DataLoader(rows, batch_size=2), network=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss_function=torch.nn.MSELoss(),
    )  # fmt: skip
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda engine: STEPS.append([int(engine.state.batch["number"][0])])
    )
    trainer.run()


def ignite() -> None:
    from ignite.engine import Engine, Events, create_supervised_evaluator

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(engine: Engine, batch: list[torch.Tensor]) -> None:
        number, inputs, targets = batch
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        STEPS.append([int(number[0])])

    trainer = Engine(update)
    evaluator = create_supervised_evaluator(model)
    held_out = [(torch.randn(2, 4), torch.randn(2, 1))]
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(held_out))
    trainer.run(batches(), max_epochs=2)
    evaluator.run(held_out)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    print(json.dumps(STEPS))
