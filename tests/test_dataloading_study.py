"""The study of data loading: its folder, its numbers, and a slow loader that it must name and see disappear.

One notebook run trains everything here; the command line goes on from what it has left.
"""

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import commands
import nbformat
import nibabel
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
EXAMPLES = SCRIPTS / "examples"
NOTEBOOK = EXAMPLES / "monai_dataloading_bottleneck.ipynb"
NAMES = ["baseline", "memory"]
NUM_STEPS = 6
# Reading a volume takes longer than the step that it is for; cutting a patch from it does not.
TRAINING = [
    "--volumes", str(NUM_STEPS), "--size", "72", "72", "40", "--batch-size", "1", "--patches", "1", "--patch", "48",
    "--width", "40", "--epochs", "1", "--read-delay", "0.2",
]  # fmt: skip
EXECUTE = """
import sys, nbclient, nbformat
path, folder, out = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
try:
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": folder}}).execute()
finally:
    nbformat.write(notebook, out)
"""


def load(path: Path) -> Iterator[ModuleType]:
    """A script as a module, which finds those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield importlib.import_module(path.stem)


@pytest.fixture(scope="module")
def spleen_folder() -> Iterator[ModuleType]:
    yield from load(EXAMPLES / "spleen_folder.py")


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    yield from load(EXAMPLES / "monai_dataloading_bottleneck.py")


@pytest.fixture(scope="module")
def driver() -> Iterator[ModuleType]:
    yield from load(SCRIPTS / "dataloading_study.py")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def executed(output: Path) -> Any:
    """The notebook as it is stored, run with the parameters of a tiny study."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (at,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    values = {"DATA_DIR": str(output / "data"), "OUTPUT": str(output), "ONLY": NAMES, "TRAINING": TRAINING}
    tiny = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(tiny))
    given, result = output / "given.ipynb", output / "executed.ipynb"
    nbformat.write(notebook, given)
    # Threads of several trainings that wait for each other on two cores would make compute slow, and loading not.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EXECUTE, str(given), str(EXAMPLES), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return nbformat.read(result, as_version=4)


@pytest.fixture(scope="module")
def found(executed: Any, output: Path) -> dict[str, Any]:
    return json.loads((output / "study.json").read_text())


def only_run(found: dict[str, Any], name: str) -> dict[str, Any]:
    (run,) = next(each["runs"] for each in found["settings"] if each["name"] == name)
    return run


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    (file,) = Path(run["folder"]).glob("*_phases/rank-0.jsonl")
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "step"]


def test_a_synthetic_folder_has_the_form_of_the_spleen_task(spleen_folder, tmp_path):
    folder = tmp_path / "Task09_Spleen"
    spleen_folder.make_folder(folder, 2, (24, 20, 12))
    described = json.loads((folder / "dataset.json").read_text())
    assert set(described) == {
        "name", "description", "reference", "licence", "release", "tensorImageSize", "modality", "labels",
        "numTraining", "numTest", "training", "test",
    }  # fmt: skip
    assert (described["modality"], described["labels"]) == ({"0": "CT"}, {"0": "background", "1": "spleen"})
    assert described["training"][1] == {"image": "./imagesTr/spleen_2.nii.gz", "label": "./labelsTr/spleen_2.nii.gz"}
    assert len(described["training"]) == described["numTraining"] == 2
    for pair in described["training"]:
        image, label = (nibabel.load(folder / pair[key]) for key in ("image", "label"))
        assert image.shape == label.shape == (24, 20, 12)
        assert image.header.get_zooms() == label.header.get_zooms() == (1.0, 1.0, 2.5)
        is_organ = np.asarray(label.dataobj) == 1
        assert set(np.unique(np.asarray(label.dataobj))) == {0, 1}
        assert np.asarray(image.dataobj)[is_organ].mean() == pytest.approx(120, abs=5)
        assert np.asarray(image.dataobj)[0, 0, 0] < -900  # air
    assert spleen_folder.read_folder(folder) == [
        {key: str(folder / pair[key].removeprefix("./")) for key in ("image", "label")}
        for pair in described["training"]
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no dataset.json. Give --data-dir the folder that holds Task09_Spleen"),
        ("{", "is none of the Decathlon"),
        ('{"training": [1]}', "is none of the Decathlon"),
        ('{"test": []}', "is none of the Decathlon"),
        ('{"training": []}', "lists no training volume"),
        ('{"training": [{"image": "./a.nii.gz", "label": "./b.nii.gz"}]}', "a.nii.gz, which is not there"),
    ],
)
def test_a_folder_that_is_not_the_tasks_is_refused_in_a_sentence(spleen_folder, tmp_path, text, said):
    if text is not None:
        (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(SystemExit) as refusal:
        spleen_folder.read_folder(tmp_path)
    message = refusal.value.code  # a text: Python prints it and ends with 1
    assert isinstance(message, str)
    assert said in message
    assert str(tmp_path) in message
    assert "\n" not in message


@pytest.mark.parametrize("flags", [(), ("--dataset", "persistent"), ("--dataset", "cache"), ("--loader", "thread")])
def test_every_way_to_load_gives_patches_and_a_cache_is_full_before_the_first_of_them(
    example, spleen_folder, tmp_path, flags
):
    spleen_folder.make_folder(tmp_path, 3, (24, 24, 12))
    chosen = example.options(["--data-dir", str(tmp_path), "--patch", "16", "--patches", "3", *flags])
    loader = example.make_loader(chosen, spleen_folder.read_folder(tmp_path), str(tmp_path / "cache"))
    if "--dataset" in flags:
        for path in tmp_path.glob("*Tr/*.nii.gz"):
            path.unlink()
    batches = [(batch["image"].shape, batch["label"].unique().tolist()) for batch in loader]
    assert [shape for shape, _ in batches] == [(2 * 3, 1, 16, 16, 16), (1 * 3, 1, 16, 16, 16)]
    assert batches[0][1] == [0, 1]


def test_each_of_the_six_settings_changes_one_flag_of_the_one_before(driver):
    settings = driver.six_settings(3)
    changed = [after.without(before) for before, after in itertools.pairwise(settings)]
    assert changed == ["--dataset persistent", "--dataset cache", "--num-workers 3", "--loader thread", "--amp"]


def test_the_notebook_is_stored_without_outputs_and_shows_table_chart_and_pairs(executed, output):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in stored.cells if cell.cell_type == "code")
    outputs = [out for cell in executed.cells if cell.cell_type == "code" for out in cell.outputs]
    printed = "".join(out.text for out in outputs if out.output_type == "stream" and out.name == "stdout")
    assert "baseline" in (table := (output / "study.txt").read_text())
    assert "note: one run does not show how runs differ" in table
    assert table in printed
    assert "baseline -> memory (--dataset cache): " in printed
    (chart,) = (out.data["image/svg+xml"] for out in outputs if "image/svg+xml" in out.get("data", {}))
    assert chart.strip() == (output / "study.svg").read_text().strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_of_a_run_what_its_files_say(found, name):
    run = only_run(found, name)
    steps = steps_of(run)
    assert int(run["printed"]["updates made by the trainer"]) == len(steps) == NUM_STEPS
    usual = steps[1:]  # without the first of the training
    assert run["num_steps"] == len(usual)
    assert run["step_ms"] == pytest.approx(mean(step["ns"] for step in usual) / 1e6)
    for part in ("input_wait", "forward", "backward", "optimizer"):
        assert run["parts"][f"{part}_ms"] == pytest.approx(mean(step["phases"][part][0] for step in usual) / 1e6)
    measured = [value for value in run["parts"].values() if value is not None]
    assert sum(measured) == pytest.approx(run["step_ms"])
    asked = json.loads(commands.run("summary", run["folder"], "--phases-only", "--json").out)
    assert run["verdict"] == asked["diagnosis"]["findings"][0]["kind"] == asked["diagnosis"]["verdict"]


def test_a_slow_loader_is_named_and_a_cache_in_memory_takes_it_away(found):
    slow, kept = (only_run(found, name) for name in NAMES)
    assert slow["verdict"] == "INPUT_BOUND"
    assert slow["parts"]["input_wait_ms"] > 200  # it slept so long for each volume
    assert kept["verdict"] != "INPUT_BOUND"
    assert kept["parts"]["input_wait_ms"] < 200
    assert float(kept["printed"]["prepared in s"]) > NUM_STEPS * 0.2 > float(slow["printed"]["prepared in s"])


def test_a_pair_is_what_compare_says_of_it_and_too_few_steps_stay_inconclusive(found, output):
    (pair,) = found["pairs"]
    asked = json.loads(commands.run("compare", *(only_run(found, name)["folder"] for name in NAMES), "--json").out)
    assert {key: pair[key] for key in asked} == asked
    assert pair["verdict"] == "inconclusive"
    assert "inconclusive: 5 steps are too few (at least 24); INPUT_BOUND -> " in (output / "study.txt").read_text()


def test_the_chart_has_a_bar_for_each_setting_as_long_as_its_step(found, output):
    root = ElementTree.parse(output / "study.svg").getroot()
    bars = dict.fromkeys(NAMES, 0.0)
    for rect in root:
        title = rect.find("{*}title")
        if title is not None and title.text is not None:
            bars[title.text.partition(":")[0]] += float(rect.attrib["width"])
    times = [only_run(found, name)["step_ms"] for name in NAMES]
    assert bars["memory"] / bars["baseline"] == pytest.approx(times[1] / times[0], rel=1e-3)
    texts = " ".join(each.text or "" for each in root.findall("{*}text"))
    assert "INPUT_BOUND" in texts
    assert "inconclusive" in texts


def test_the_command_goes_on_from_what_is_there(driver, executed, output, capsys):
    command = ["-o", str(output), "--synthetic", "--only", *NAMES, "--", *TRAINING]
    before = [path.stat().st_mtime_ns for path in sorted(output.glob("*/run-1/*_phases/*"))]
    assert driver.main(command) == 0
    assert capsys.readouterr().out == (output / "study.txt").read_text()
    assert driver.main([*command[:3], "--json", *command[3:]]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((output / "study.json").read_text())
    assert [path.stat().st_mtime_ns for path in sorted(output.glob("*/run-1/*_phases/*"))] == before
    assert len(before) == len(NAMES)
    assert driver.main([*command, "--seed"]) == 1
    assert "baseline/run-1 was trained with other options" in capsys.readouterr().err
    assert driver.main(["-o", str(output), "--synthetic", "--only", "ram"]) == 1
    assert "there is no setting 'ram'. Choose of: baseline, disk, memory" in capsys.readouterr().err


def test_a_training_that_fails_ends_the_study_with_its_last_words(driver, tmp_path, monkeypatch, capsys):
    training = tmp_path / "training.py"
    training.write_text("import sys; sys.exit('no dataset.json here')")
    monkeypatch.setattr(driver, "TRAINING", training)
    assert driver.main(["-o", str(tmp_path / "study"), "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.endswith("baseline/run-1 failed (exit 1): no dataset.json here\n")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"verdict": "faster", "change": -0.314, "dominant": "input_wait"}, "faster by 31.4 %, mostly input_wait"),
        ({"verdict": "slower", "change": 0.2, "dominant": None}, "slower by 20.0 %"),
        ({"verdict": "same", "change": 0.004, "dominant": None}, "as fast as before"),
        ({"verdict": "inconclusive", "change": -0.9, "reason": "noise of 40.0%"}, "inconclusive: noise of 40.0%"),
    ],
)
def test_a_pair_is_said_as_compare_judges_it_and_of_several_runs_the_middle_one_is_shown(driver, said, expected):
    def run(step_ms: float, waits_ms: float, verdict: str) -> Any:
        parts = dict.fromkeys(driver.PARTS) | {"input_wait_ms": waits_ms}
        return driver.Run("", {}, 30, step_ms, parts, verdict, "")

    before, after = driver.six_settings(2)[:2]
    slow = [run(80.0, 8.0, "BALANCED"), run(200.0, 100.0, "INPUT_BOUND"), run(100.0, 50.0, "INPUT_BOUND")]
    first = driver.Measured(before, tuple(slow))
    second = driver.Measured(after, (run(50.0, 1.0, "BALANCED"),))
    assert first.verdict == "INPUT_BOUND (2 of 3 runs)"
    assert driver.sentence(first, second, said) == (
        f"baseline -> disk (--dataset persistent): {expected}; "
        "INPUT_BOUND (2 of 3 runs) -> BALANCED, input wait 50.0 % -> 2.0 %"
    )
