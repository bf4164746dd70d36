"""Put the mixin on the real ModelPT of nemo-toolkit, with NeMo's own config section, in a throw-away environment.

Usage: try_modelpt.py [ENVIRONMENT]; it installs nemo-toolkit from PyPI, which takes minutes and some GB of disk. An
environment that is named is made if it is not there, and kept.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEMO = ("torch==2.13.0", "nemo-toolkit[core]==3.0.0")
START, END = 2, 4

JOB = f'''
import sys
import lightning.pytorch as pl
import torch
from nemo.core import ModelPT
from omegaconf import OmegaConf
from chakra_capture.integrations.lightning import ChakraProfilingMixin

IS_CUDA_SHOWN = sys.argv[2] == "cuda"


class Tiny(ChakraProfilingMixin, ModelPT):
    """One layer; its hooks may be made to think that they are on CUDA, where alone NeMo records."""

    def __init__(self, cfg, trainer=None):
        super().__init__(cfg, trainer)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def setup_training_data(self, config):
        rows = torch.utils.data.TensorDataset(torch.zeros(8, 4))
        self._train_dl = torch.utils.data.DataLoader(rows)

    def setup_validation_data(self, config):
        pass

    @classmethod
    def list_available_models(cls):
        return []

    @property
    def device(self):
        is_hook = sys._getframe(1).f_code.co_name.startswith("on_train_batch_")
        return torch.device("cuda") if IS_CUDA_SHOWN and is_hook else super().device


section = {{"enabled": True, "start_step": {START}, "end_step": {END}, "warmup_steps": 0, "active_steps": 1}}
cfg = OmegaConf.create({{"chakra_profile": {{**section, "trace_dir": sys.argv[1]}}, "train_ds": {{"batch_size": 1}}}})
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Tiny(cfg, trainer))
assert trainer.global_step == 8, trainer.global_step
'''


def main() -> int:
    """Install, train twice, look at the traces."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "venv"
        python = environment / "bin" / "python"
        if not python.exists():
            venv.create(environment, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *NEMO], check=True)
        (folder / "job.py").write_text(JOB)
        for device in ("cpu", "cuda"):
            traces = folder / device
            traces.mkdir()
            # The project needs nothing that NeMo has not brought.
            variables = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([python, folder / "job.py", traces, device], check=True, env=variables)
            said = json.loads((traces / "0_run/rank-0.json").read_text())
            recorded = said["windows"][0]["steps"]
            print(f"hooks on {device}: {said['reason']}, steps {recorded}, {len(said['windows'])} file pair(s)")
            if recorded != list(range(START, END + 1)) or not said["complete"]:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
