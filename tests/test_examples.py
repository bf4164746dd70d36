"""The examples run, and what they print of steps agrees with what the training itself has counted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from commands import taken_over

EXAMPLES = Path(__file__).resolve().parents[1] / "scripts" / "examples"


# What an example imports, and has imported when it begins here.
FRAMEWORKS = {"monai_minimal.py": warm.MONAI, "lightning_minimal.py": warm.LIGHTNING, "plain_loop.py": warm.TRAINING}


def printed(example: str, folder: Path, *options: str) -> dict[str, str]:
    command = [sys.executable, EXAMPLES / example, *options]
    done = warm.run(command, cwd=folder, modules=FRAMEWORKS[example], timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: value.strip() for name, _, value in (line.partition(":") for line in done.stdout.splitlines())}


# What records in each example, and what stands there in a script that knows nothing of us; the last part reads files.
PARTS = {
    "monai_minimal.py": [
        ("from chakra_capture.integrations.monai import TraceMLHandler, init\n", ""),
        ("    init()\n", ""),
        ("        train_handlers=[TraceMLHandler()],\n", ""),
        ('    (path,) = Path("chakra_traces")', "    return\n    (path,) = ("),
    ],
    "lightning_minimal.py": [
        ("from chakra_capture.integrations.lightning import ChakraProfileCallback\n", ""),
        ("        callbacks=[ChakraProfileCallback(PHASES_ONLY)],\n", ""),
        ('    (path,) = Path("chakra_traces")', "    return\n    (path,) = ("),
    ],
    "plain_loop.py": [
        ("from chakra_capture import ChakraProfileConfig, phases\n", ""),
        ("    session = phases.init(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=folder))\n", ""),
        (
            "loader, forward = phases.wrap_dataloader(loader, ACCUMULATION), phases.wrap_forward(model)",
            "forward = model",
        ),
        ("    optimizer = phases.wrap_optimizer(optimizer)\n", ""),
        ("phases.wrap_backward(loss).backward()", "loss.backward()"),
        ('with session.phase("validation"), torch.no_grad()', "with torch.no_grad()"),
        ("    assert session.paths is not None\n", "    sys.exit()\n"),
    ],
}


def calls_of(folder: Path) -> list[dict[str, Any]]:
    """Number, flags and calls of each phase of every step, and the phases of the time before it."""
    (file,) = folder.glob("chakra_traces/*_phases/rank-0.jsonl")
    found = []
    for step in (json.loads(line) for line in file.read_text().splitlines() if '"kind":"step"' in line):
        calls = {name: calls for name, (_, calls) in step["phases"].items()}
        found.append({"step": step["step"], "flags": step.get("flags"), "calls": calls})
    return found


def recorded_without_a_change(example: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The steps of the example without a word of ours in it, under ``chakra-capture run``."""
    text = (EXAMPLES / example).read_text()
    for ours, theirs in PARTS[example]:
        assert text.count(ours) == 1, ours
        text = text.replace(ours, theirs)
    folder.mkdir()
    script = folder / example
    script.write_text(text.replace("return\n    (path,) = (", "return\n    (path,) = Path()"))
    command = taken_over(folder, "run", script.name, "--", *options)
    assert isinstance(command, list), command
    done = warm.run(command, cwd=folder, modules=FRAMEWORKS[example], timeout=300)
    assert done.returncode == 0, done.stderr
    return calls_of(folder)


@pytest.mark.parametrize(("options", "expected"), [((), 4), (("--accumulation-steps", "3"), 2)])
def test_monai_minimal(tmp_path, options, expected):
    said = printed("monai_minimal.py", tmp_path, "--volumes", "4", "--size", "8", *options)
    assert (said["updates made by the trainer"], said["steps recorded"]) == (str(expected), str(expected))
    if options:
        small = ("--volumes", "4", "--size", "8", *options)
        assert recorded_without_a_change("monai_minimal.py", tmp_path / "without", *small) == calls_of(tmp_path)


def test_plain_loop(tmp_path):
    # 10 batches an epoch, 3 to an update and the rest of the epoch: 4 updates, twice.
    said = printed("plain_loop.py", tmp_path)
    assert (said["updates made by the loop"], said["steps recorded"]) == ("8", "8")
    for name in ("input_wait", "forward", "backward", "optimizer"):
        assert said[name].endswith(" ms on average, 8 steps")
    first, *rest = recorded_without_a_change("plain_loop.py", tmp_path / "without")
    explicit_first, *explicit_rest = calls_of(tmp_path)
    assert rest == explicit_rest
    # Of a loop of one's own the model is known from its first update on, and that it was hooked up is said.
    assert first["calls"] | explicit_first["calls"] == first["calls"] | {"forward": 3}
    assert first["calls"].keys() ^ explicit_first["calls"].keys() == {"forward", "recording"}


@pytest.mark.parametrize(("options", "expected"), [((), 20), (("--accumulation-steps", "3"), 8)])
def test_lightning_minimal(tmp_path, options, expected):
    said = printed("lightning_minimal.py", tmp_path, *options)
    assert (said["updates made by the trainer"], said["steps recorded"]) == (str(expected), str(expected))
    if options:
        assert recorded_without_a_change("lightning_minimal.py", tmp_path / "without", *options) == calls_of(tmp_path)
