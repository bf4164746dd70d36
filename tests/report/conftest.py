"""Runs and their pages, each made once for all tests of a process."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from commands import run as command
from handed import DATA, require

SAMPLES = Path(__file__).parent.parent.parent / "traces"


def make_page(path: Path, page: Path, *options: str) -> str:
    """What the command writes for a run."""
    done = command("report", path, "-o", page, *options)
    assert (done.code, done.err) == (0, ""), done
    return page.read_text()


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a sample of this project, or of a handed trace, merged."""

    @cache
    def folder(name: str) -> Path:
        out = tmp_path_factory.mktemp("run") / name.rpartition("/")[2]
        if (SAMPLES / name).is_dir():
            shutil.copytree(SAMPLES / name, out)
        elif name.startswith(("device_only", "host_only")):
            side = "--device" if name.startswith("device") else "--host"
            source = DATA / name
            done = command("merge", side, require(source.with_name(f"{source.name}.json.gz")), "-o", out)
            assert done.code == 0, done
        else:
            done = command("merge", require(DATA / name), "--force", "-o", out)
            assert done.code == 0, done
        return out

    return folder


@pytest.fixture(scope="session")
def page_of(run_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The page of such a run."""

    @cache
    def page(name: str) -> str:
        return make_page(run_of(name), tmp_path_factory.mktemp("page") / "report.html")

    return page


def write_phases(folder: Path, num_steps: int, ms: Callable[[int], float], *, rank: int = 0, size: int = 1) -> Path:
    """A run that recorded nothing but the phases of its steps: a tenth input, the rest forward and backward."""
    opened = {"kind": "open", "run_id": "r", "rank": rank, "world_size": size}
    lines: list[dict[str, object]] = [{**opened, "unix_ns": 1_760_000_000_000_000_000, "monotonic_ns": 0}]
    at = 0
    for step in range(num_steps):
        whole = round(ms(step) * 1e6)
        parts = {"input_wait": whole // 10, "forward": whole // 2, "backward": whole - whole // 10 - whole // 2}
        phases = {name: [ns, 1] for name, ns in parts.items()}
        lines.append({"kind": "step", "step": step, "begin_ns": at, "ns": whole, "phases": phases})
        at += whole
    target = folder / "0_phases"
    target.mkdir(parents=True, exist_ok=True)
    (target / f"rank-{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
