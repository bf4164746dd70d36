"""A Hydra application that knows nothing of the group ``chakra_profile``, run as ``python app.py ...``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

APP = """
import dataclasses, json, sys
import hydra
from chakra_capture.config import settings_from

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    settings = settings_from(config.get("model", config))
    print(json.dumps(dataclasses.asdict(settings), default=lambda member: member.name))
    assert "torch" not in sys.modules

main()
"""


class App:
    """A Hydra application in a folder of its own."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self.python = python
        (folder / "app.py").write_text(APP)
        self.write("config", "")

    def write(self, name: str, text: str) -> None:
        path = self.folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("CHAKRA_", "HYDRA_", "NSYS_", "PYTHON"))
        }
        return subprocess.run(
            [self.python, "app.py", *arguments],
            cwd=self.folder,
            env={**environment, "CHAKRA_CAPTURE_NO_SUMMARY": "1", **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def all_settings(self, *arguments: str, **variables: str) -> list[dict[str, Any]]:
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def settings(self, *arguments: str, **variables: str) -> dict[str, Any]:
        (only,) = self.all_settings(*arguments, **variables)
        return only

    def error(self, *arguments: str, **variables: str) -> str:
        done = self.run(*arguments, **variables)
        assert done.returncode != 0, done.stdout
        return done.stderr
