"""Runs of several ranks, made from one real recording: its texts with another rank, process and run in them."""

import gzip
import json
import shutil
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "traces" / "plain_loop"
FIRST_PID = 70_000
_INFO = '"record_shapes": 1,'


def write_rank(folder: Path, rank: int, *, world_size: int, run_id: str = "aaaa", pid: int | None = None) -> None:
    """Write host trace, device trace and manifest of one rank, as if it had been recorded so."""
    pid = FIRST_PID + rank if pid is None else pid
    manifest = json.loads((RECORDED / "0_run" / "rank-0.json").read_text())
    recorded = str(manifest["pid"])
    host = _text(RECORDED / "0_chakra" / "rank-0.json.gz").replace(f'"pid": {recorded},', f'"pid": {pid},')
    device = _text(RECORDED / "0_kineto" / "rank-0.json.gz").replace(recorded, str(pid))
    info = json.dumps({"backend": "gloo", "rank": rank, "world_size": world_size})
    assert _INFO in device
    device = device.replace(_INFO, f'{_INFO}\n      "distributedInfo": {info},', 1)
    manifest |= {"rank": rank, "world_size": world_size, "run_id": run_id, "pid": pid}
    for name, text in (("chakra", host), ("kineto", device), ("run", json.dumps(manifest, indent=1))):
        path = folder / f"0_{name}" / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_run(folder: Path, num_ranks: int) -> Path:
    """A whole run."""
    for rank in range(num_ranks):
        write_rank(folder, rank, world_size=num_ranks)
    (folder / "0_run" / "run.json").write_text('{"run_id": "aaaa"}')
    return folder


def host(folder: Path, rank: int) -> Path:
    return folder / "0_chakra" / f"rank-{rank}.json"


def device(folder: Path, rank: int) -> Path:
    return folder / "0_kineto" / f"rank-{rank}.json"


def manifest(folder: Path, rank: int) -> Path:
    return folder / "0_run" / f"rank-{rank}.json"


def copy_rank(folder: Path, source: int, target: int, *, sides: tuple[str, ...] = ("chakra", "kineto")) -> None:
    """Put the traces of one rank in the place of another's."""
    for side in sides:
        shutil.copy(folder / f"0_{side}" / f"rank-{source}.json", folder / f"0_{side}" / f"rank-{target}.json")


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()
