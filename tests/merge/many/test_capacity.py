"""How much memory a rank needs, and how much there is: the machine's word and the control groups', read from files."""

import gzip
import random
from pathlib import Path

import pytest

from chakra_capture.merge.many.capacity import available_bytes, needed_bytes, unpacked_size

GIB = 1 << 30
MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


def machine(root: Path, cgroup: str, groups: dict[str, dict[str, object]]) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for group, files in groups.items():
        folder = root / "sys" / "fs" / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
    return root


def test_without_control_groups_the_machine_says_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "", {})) == 20_000_000 * 1024
    assert available_bytes(tmp_path / "none") is None


def test_tightest_of_the_groups_around_the_process_counts_less_the_pages_it_can_give_up(tmp_path: Path) -> None:
    groups: dict[str, dict[str, object]] = {
        "job": {"memory.max": 8 * GIB, "memory.current": 6 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}"},
        "job/step": {"memory.max": "max", "memory.current": 5 * GIB, "memory.stat": "inactive_file 0"},
    }
    assert available_bytes(machine(tmp_path, "0::/job/step\n", groups)) == 3 * GIB


def test_container_that_sees_only_its_own_group_is_limited_by_it(tmp_path: Path) -> None:
    own: dict[str, dict[str, object]] = {"": {"memory.max": 2 * GIB, "memory.current": GIB}}
    assert available_bytes(machine(tmp_path, "0::/docker/abc\n", own)) == GIB


def test_groups_of_the_old_kind_count_too_and_their_largest_number_is_no_limit(tmp_path: Path) -> None:
    groups: dict[str, dict[str, object]] = {
        "memory/slurm/uid_1": {
            "memory.limit_in_bytes": 4 * GIB,
            "memory.usage_in_bytes": 3 * GIB,
            "memory.stat": "total_inactive_file 1024",
        },
        "memory": {"memory.limit_in_bytes": 0x7FFFFFFFFFFFF000, "memory.usage_in_bytes": 20 * GIB},
    }
    assert available_bytes(machine(tmp_path, "4:memory:/slurm/uid_1\n9:cpu:/x\n", groups)) == GIB + 1024


def test_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    own: dict[str, dict[str, object]] = {"": {"memory.max": GIB, "memory.current": 2 * GIB}}
    assert available_bytes(machine(tmp_path, "0::/\n", own)) == 0


def test_gz_counts_as_it_unpacks_where_its_end_says_so_and_else_as_traces_usually_shrink(tmp_path: Path) -> None:
    chosen = random.Random(1)
    text = b"".join(b'{"name": "op", "ts": %d, "dur": 1}' % chosen.getrandbits(20) for _ in range(20_000))
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text, 1))
    assert unpacked_size(plain) == unpacked_size(packed) == len(text)
    cut = packed.read_bytes()[:-1000]
    (tmp_path / "cut.gz").write_bytes(cut + b"\0\0\0\0")
    assert unpacked_size(tmp_path / "cut.gz") == 25 * (len(cut) + 4)
    assert unpacked_size(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("is_native", "budget", "expected"),
    [(True, None, 90e6 + 60e6), (False, None, 90e6 + 120e6), (True, 10_000_000, 90e6 + 35e6), (True, 10**9, 150e6)],
)
def test_need_is_that_of_the_imports_and_a_share_of_the_files(
    is_native: bool, budget: int | None, expected: float, tmp_path: Path
) -> None:
    for name in ("h.json", "d.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(50_000_000)
    files = [tmp_path / "h.json", tmp_path / "d.json"]
    assert needed_bytes(files, is_native=is_native, budget=budget) == expected
