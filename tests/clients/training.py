"""One script for two tools: MONAI trains, and the handler of the module named on the command line times it."""

import importlib
import sys

import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer

tool = importlib.import_module(sys.argv[1])
tool.init()
network = torch.nn.Linear(4, 1)
SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=3,
    train_data_loader=DataLoader(Dataset([{"image": torch.ones(4), "label": torch.ones(1)}] * 20), batch_size=2),
    network=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
    loss_function=torch.nn.MSELoss(),
    train_handlers=[tool.TraceMLHandler()],
).run()
