"""How traceml-ai 0.5.0 runs a script: its launcher, of an environment of its own."""

from pathlib import Path


def traceml_command(python: Path, logs: str, name: str, *options: str) -> list[str]:
    """The command up to the script; results lie under ``<logs>/<name>``."""
    launcher = str(python.with_name("traceml"))
    return [launcher, "run", "--mode", "summary", "--logs-dir", logs, "--run-name", name, *options]
