"""``config``: what a configuration resolves to, who has given each setting, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refused, run

from chakra_capture.config import settings_table

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "SCRATCH"):
        monkeypatch.delenv(name, raising=False)


def only_section(*arguments: object) -> dict[str, Any]:
    done = run("config", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["schema_version"] == 1
    (section,) = found["sections"]
    assert [setting["key"] for setting in section["settings"]] == [row.key for row in settings_table()]
    return section  # type: ignore[no-any-return]


def given(section: dict[str, Any]) -> dict[str, tuple[object, str]]:
    """The settings that are no default, with their source."""
    return {s["key"]: (s["value"], s["origin"]) for s in section["settings"] if s["origin"] != "default"}


def test_preset_file_and_command_line_each_are_named_for_what_they_have_the_last_word_on() -> None:
    section = only_section(
        CONFIGS / "slurm.yaml",
        "chakra_profile.end_step=12",
        "chakra_profile.trigger.signal=SIGUSR1",
    )
    assert given(section) == {
        "enabled": (True, "preset warm_window"),
        "start_step": (10, "preset warm_window"),
        "end_step": (12, "command line"),
        "warmup_steps": (2, "preset warm_window"),
        "active_steps": (3, "preset warm_window"),
        "trace_dir": ("./traces", "slurm.yaml"),
        "ranks": ([0, 1], "slurm.yaml"),
        "compress": (True, "slurm.yaml"),
        "trigger.signal": ("SIGUSR1", "command line"),
    }
    assert section["notes"][0] == "Steps recorded: 12."


def test_nested_section_and_value_that_the_job_alone_knows() -> None:
    section = only_section(CONFIGS / "nemo_app.yaml", "chakra_profile@model.chakra_profile=phases_only")
    assert section["key"] == "model.chakra_profile"
    assert given(section)["start_step"] == (None, "preset phases_only")
    assert given(section)["trace_dir"] == ("${hydra:runtime.output_dir}/traces", "nemo_app.yaml")
    assert [s["key"] for s in section["settings"] if not s["is_resolved"]] == ["trace_dir"]
    assert section["notes"] == ["Steps recorded: none."]


def test_preset_of_an_application_and_windows_for_people(tmp_path: Path) -> None:
    (tmp_path / "chakra_profile").mkdir()
    (tmp_path / "chakra_profile" / "ours.yaml").write_text("defaults: [schema, _self_]\nenabled: on\nphases: off\n")
    (tmp_path / "app.yaml").write_text(
        "defaults: [{chakra_profile: ours}, _self_]\nchakra_profile: {job_id: a\u202eb}\n"
    )
    done = run("config", tmp_path / "app.yaml", f"chakra_profile.trace_dir={tmp_path}/t")
    shown = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert max(map(len, shown)) <= 80
    found = {line.split()[0]: line.split()[1:] for line in shown if line.strip()}
    assert found["phases"][:4] == ["false", "preset", "ours", "of"]
    assert found["job_id"] == ["a\ufffdb", "app.yaml"]
    assert found["end_step"] == ["2", "default"]


def test_mapping_in_json_and_section_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"enabled": "yes", "windows": [{"start_step": 9, "end_step": 9}, {}], "trace_dir": "t"}))
    section = only_section(path, "compress=true")
    assert section["key"] == "chakra_profile"
    assert [(w["start_step"], w["end_step"]) for w in given(section)["windows"][0]] == [(2, 2), (9, 9)]  # type: ignore[attr-defined]
    assert given(section)["compress"] == (True, "command line")
    assert given(section)["trace_dir"] == ("t", "settings.json")
    path.with_suffix(".yml").write_text("train: {chakra_profile: {enabled: false}, lr: 1}\n")
    assert only_section(path.with_suffix(".yml"))["key"] == "train.chakra_profile"
    path.with_suffix(".yaml").write_text("chakra_profile: {compress: true, job_id: seven}\n")
    left = only_section(path.with_suffix(".yaml"), "~chakra_profile.compress")
    assert given(left) == {"job_id": ("seven", "settings.yaml")}


def test_without_a_file_presets_and_without_a_section_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
    section = only_section("+chakra_profile=periodic_windows", "chakra_profile.trace_dir=t")
    assert set(given(section)) == {"enabled", "windows", "trace_dir"}
    assert section["notes"][0] == "Steps recorded: 101-102, 201-202, 301-302, 401-402, 501-502."
    assert "CHAKRA_CAPTURE_DISABLED is set" in section["notes"][-1]
    monkeypatch.delenv("CHAKRA_CAPTURE_DISABLED")
    many = [{"start_step": 10 * number, "end_step": 10 * number} for number in range(1, 30)]
    long = f"+chakra_profile={{enabled: true, trace_dir: t, windows: {many}}}".replace("'", "")
    assert only_section(long)["notes"][0] == "Steps recorded: 10, 20, 30, 40, 50, 60 and 23 more times."
    nothing = only_section()
    assert given(nothing) == {}
    assert nothing["notes"] == [
        "There is no chakra_profile, so recording is off. Add one with +chakra_profile=one_step."
    ]


def test_what_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("a: [\n")
    (tmp_path / "list.yml").write_text("[1]\n")
    app = CONFIGS / "nemo_app.yaml"
    refused(run("config", app, "model.nsys_profile.enabled=true"), "nsys_profile.enabled are both true")
    misspelt = run("config", app, "+model.chakra_profile.start_stp=5")
    assert (misspelt.code, misspelt.err.endswith("Did you mean chakra_profile.start_step?\n")) == (1, True)
    refused(run("config", "+chakra_profile=no_such"), "Could not find 'chakra_profile/no_such'", "one_step")
    refused(run("config", "+chakra_profile=one_step"), "chakra_profile.trace_dir is null")
    refused(run("config", tmp_path / "torn.yaml"), "no YAML", "torn.yaml")
    refused(run("config", tmp_path / "list.yml"), "holds no mapping")
    refused(run("config", tmp_path / "none.yaml"), "does not exist")
    assert run("config", app, "nonsense").code == 2
