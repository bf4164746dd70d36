"""Making exports in tests through the product's commands, and looking at them through the independent walk."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import run
from handed import CASES, DATA, require
from integrations.test_lightning_ddp import environment

from export.feeder_walk import FeederWalk, Rank, Walked, read_rank

PROFILES = ("astra", "full")


def merged(target: Path, *, host: Path | None = None, device: Path | None = None) -> Path:
    """Merge one pair; of files of different processes, too."""
    sides = [item for name, path in (("--host", host), ("--device", device)) if path for item in (name, path)]
    done = run("merge", "--force", *sides, "-o", target)
    assert done.code == 0, done.err
    return target


def merged_device(target: Path, name: str) -> Path:
    return merged(target, device=require(DATA / "device_only" / f"{name}.json.gz"))


def merged_pair(target: Path, name: str, rank: int = 0) -> Path:
    folder = require(DATA / "pairs" / name)
    return merged(
        target, host=folder / "host" / f"rank-{rank}.json.gz", device=folder / "device" / f"rank-{rank}.json.gz"
    )


def merged_case(target: Path, name: str, host: str = "et.json") -> Path:
    folder = require(CASES / name)
    device = folder / "kineto.json"
    return merged(target, host=folder / host, device=device if device.exists() else None)


def exported(source: Path, target: Path, profile: str = "astra", *options: Any) -> dict[str, Any]:
    """What the command says as JSON; ``target`` gets the files."""
    done = run("export", "et", source, "-o", target, "--profile", profile, "--json", *options)
    assert done.code == 0, done.err
    return json.loads(done.out)  # type: ignore[no-any-return]


def findings(folder: Path, profile: str = "astra") -> dict[str, dict[str, Any]]:
    """What ``validate`` says, by check."""
    done = run("validate", folder, "--profile", profile, "--json")
    assert done.err == ""
    said = json.loads(done.out)
    assert done.code == (0 if said["is_valid"] else 1)
    return {one["check"]: one for one in said["findings"]}


def errors(folder: Path, profile: str = "astra") -> set[str]:
    return {name for name, one in findings(folder, profile).items() if one["level"] == "error"}


def ranks_of(folder: Path) -> dict[int, Rank]:
    return {int(path.name.split(".")[1]): read_rank(path) for path in sorted(folder.glob("chakra.*.et"))}


def groups_of(folder: Path) -> dict[int, list[int]]:
    return {int(key): ranks for key, ranks in json.loads((folder / "comm_group.json").read_text()).items()}


def walked(folder: Path, *, full: bool = False, **options: Any) -> Walked:
    """Run all ranks; where one was recorded of several, the others do the same as it."""
    ranks, groups = ranks_of(folder), groups_of(folder)
    members = {one for group in groups.values() for one in group} | ranks.keys()
    first = next(iter(ranks.values()))
    return FeederWalk({n: ranks.get(n, first) for n in sorted(members)}, groups, full=full, **options).run()


def recorded_parallel(folder: Path) -> Path:
    command = [sys.executable, "-m", "export.parallel_job", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    for name in ("two", "four", "other-step"):
        merging = run("merge", folder / name / "t", "--workers", "1")
        assert merging.code == 0, merging.err
    return folder
