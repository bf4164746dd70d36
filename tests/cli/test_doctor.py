"""``doctor``: what it prints and how it ends, by the process of the training half that a user's command starts."""

import json
import os
import signal
from pathlib import Path

import pytest
from commands import Outcome, process, run
from disks import READ_ONLY

from chakra_capture.cli.training_half import NoAnswerError, ask


@pytest.fixture(autouse=True)
def no_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other jobs of this machine have left is none of these tests' business."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dump_"))


@pytest.fixture
def in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the child finds before those that are installed."""
    folder = tmp_path / "in_front"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    return folder


def lines(outcome: Outcome) -> list[str]:
    assert outcome.err == ""
    assert max(map(len, outcome.out.splitlines())) <= 80
    return outcome.out.rstrip().splitlines()


def test_all_is_well_without_a_line_of_a_problem(tmp_path: Path) -> None:
    found = run("doctor", tmp_path / "to" / "traces")
    shown = lines(found)
    assert found.code == 0, found
    assert shown[-1] == "All is well: recording works here."
    assert [line for line in shown if line.startswith(("warning", "cannot record"))] == []
    for subject in ("environment", "trace_dir", "frameworks", "torch", "trial recording", "reading traces"):
        assert any(line.startswith(f"ok  {subject} ") for line in shown), subject
    assert list(tmp_path.iterdir()) == []


def test_problems_are_named_with_what_to_do_and_end_in_status_1(
    tmp_path: Path, in_front: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_front / "torch.py").write_text("raise OSError('libcudart.so.12: no such file')\n")
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE", "1")
    Path(tmp_path / "dump_0").write_text("no pickle\n")
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which a process inherits
    try:
        done = run("doctor", READ_ONLY, "--json")
    finally:
        signal.signal(signal.SIGUSR2, before)
    found = json.loads(done.out)
    named = {check["subject"]: check for check in found["checks"] if check["level"] != "ok"}
    assert (done.code, done.err) == (1, "")
    assert (found["schema_version"], found["can_record"], found["num_problems"]) == (1, False, 3)
    assert sorted(named) == ["NCCL dumps", "environment", "signals", "torch", "trace_dir"]
    assert "ENABLE_PYTORCH_EXECUTION_TRACE" in named["environment"]["what"]
    assert str(READ_ONLY) in named["trace_dir"]["what"]
    assert "SIGUSR2 is taken: it is ignored" in named["signals"]["what"]
    assert str(tmp_path / "dump_0") in named["NCCL dumps"]["what"]
    assert all(check["todo"] for check in named.values())
    assert "torch cannot be imported: libcudart.so.12" in named["torch"]["what"]
    assert set(found["versions"]) == {"python", "chakra_capture", "torch", "cuda"}


def test_torch_that_ends_the_process_is_a_finding_after_all_that_was_found_before(
    tmp_path: Path, in_front: Path
) -> None:
    (in_front / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = run("doctor", tmp_path)
    text = " ".join(" ".join(lines(done)).split())
    assert done.code == 1
    assert "cannot record torch" in text
    assert "signal SIGSEGV ended it" in text
    assert "ok trace_dir" in text
    assert text.endswith("Recording cannot work here: 1 problem.")


def test_torch_that_hangs_is_given_up(tmp_path: Path, in_front: Path) -> None:
    (in_front / "torch.py").write_text("import time\ntime.sleep(600)\n")
    done = run("doctor", tmp_path, "--timeout", 4)
    assert done.code == 1
    assert "it did not end within 4 seconds" in " ".join(done.out.split())


def test_framework_that_the_job_uses_and_that_is_not_found_is_a_problem(tmp_path: Path, in_front: Path) -> None:
    (in_front / "sitecustomize.py").write_text(
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'monai'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        'print(\'{"looks_at": "not ours"\')\n'
    )
    done = run("doctor", tmp_path, "--framework", "monai", "--json")
    found = [check["what"] for check in json.loads(done.out)["checks"] if check["level"] == "cannot record"]
    assert done.code == 1
    assert [what.split()[0] for what in found] == ["torch", "monai", "torch"]
    assert run("doctor", "--framework", "keras").code == 2
    assert run("doctor", "--timeout", "nan").code == 2


def test_c_part_that_is_not_built_is_a_warning(tmp_path: Path, in_front: Path) -> None:
    (in_front / "torch.py").write_text("raise ImportError('not today')\n")
    before = "from pathlib import Path\nfrom chakra_capture.merge import nest\nnest._LIBRARY = Path('/none')"
    done = process("doctor", tmp_path, before=before)
    text = " ".join(done.out.split())
    assert "warning reading traces Not built for this machine: nesting in C; the C scanner is in use." in text
    assert text.endswith("Recording cannot work here: 1 problem and 1 warning.")


def test_process_that_fails_tells_its_last_words(in_front: Path) -> None:
    (in_front / "speaks.py").write_text("print('{\"a\": 1}\\n[]', flush=True)\nraise SystemExit('no such luck')\n")
    answers = ask("speaks", limit_s=60)
    assert next(answers) == {"a": 1}
    with pytest.raises(NoAnswerError, match=r"status 1 \(its last line: no such luck\)"):
        next(answers)
