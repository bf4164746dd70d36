"""Lightning passes the contract, from either of its packages."""

import lightning.pytorch
import pytorch_lightning

from integrations.contract import Contract
from integrations.lightning_job import LightningJob


class TestPytorchLightning(Contract):
    job = LightningJob(pytorch_lightning)
    error_of_sigterm = pytorch_lightning.utilities.exceptions.SIGTERMException


class TestLightning(Contract):
    job = LightningJob(lightning.pytorch)
    error_of_sigterm = lightning.pytorch.utilities.exceptions.SIGTERMException
