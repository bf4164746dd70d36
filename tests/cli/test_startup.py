"""Start-up stays short: heavy libraries are imported only by the verbs that need them."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from builder import TraceBuilder
from commands import process

HEAVY = {"numpy", "polars", "msgspec", "isal", "torch", "omegaconf", "google.protobuf"}
AT_EXIT = "import sys, atexit; atexit.register(lambda: sys.__stderr__.write('loaded ' + ' '.join(sys.modules)))"


def loaded(*args: object) -> set[str]:
    done = process(*args, before=AT_EXIT)
    return set(done.err.rpartition("loaded ")[2].split())


@pytest.mark.parametrize(
    "args",
    [("--help",), ("merge", "--help"), ("summary", "--help"), ("inspect", "--help"), ("query", "--help"),
     ("doctor", "--help"), ("config", "--help"), ("--version",), ("nonsense",), ("merge", "--nonsense"),
     ("validate", "--help"), ("summary",), ("query", "."), ("analyze", "--help"), ("analyze", "idle", "--help"),
     ("analyze", "idle"), ("analyze", "nonsense"), ("config", "a", "b"), ("slice", "--help"),
     ("slice", ".", "-o", "x"), ("export", "--help"), ("export", "graph", "--help"), ("export", "et", "--help"),
     ("export", "graph", "."), ("export", "nonsense"), ("export", "et"), ("export", "chakra-json", "--help"),
     ("export", "chakra-json", ".", "--ranks")],
)  # fmt: skip
def test_help_and_usage_errors_import_no_heavy_library(args: tuple[str, ...]) -> None:
    assert not loaded(*args) & HEAVY


@pytest.mark.parametrize("name", ["0_kineto/rank-0.json", "a.pt.trace.json", "b.pt.trace.json.gz"])
def test_inspect_imports_neither_numpy_nor_polars(name: str, tmp_path: Path) -> None:
    TraceBuilder(rank=0).op("a", 1, 1).write_device(tmp_path / name)
    assert not loaded("inspect", tmp_path) & {"numpy", "polars", "torch", "omegaconf"}


def test_merge_and_summary_never_import_torch(tmp_path: Path) -> None:
    TraceBuilder().op("a", 1, 1).write(tmp_path)
    modules = loaded("summary", tmp_path)
    assert "polars" in modules
    assert not modules & {"torch", "omegaconf", "hydra", "pytorch_lightning"}


def test_the_process_that_has_ranks_merged_by_others_imports_neither_numpy_nor_polars(tmp_path: Path) -> None:
    for rank in (0, 1):
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 1, 1).write(tmp_path, rank)
    assert not loaded("merge", tmp_path, "--workers", 2) & {"numpy", "polars"}
    assert (tmp_path / "0_merged" / "collectives.parquet").exists()


@pytest.mark.parametrize("name", ["chakra-capture", "merge-traces"])
def test_a_worker_that_imports_the_script_it_was_started_from_does_not_import_the_command_line(name: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"][name].partition(":")
    assert callable(getattr(import_module(module), function))
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"cyclopts", "chakra_capture.cli.main"} & set(done.stdout.split())
