"""The group ``chakra_profile`` in real ``python app.py ...`` runs of an application that knows nothing of it."""

from pathlib import Path
from typing import Any

import pytest
from hydra_app import App
from omegaconf import OmegaConf

from chakra_capture import presets
from chakra_capture.config import settings_table

PRESETS = sorted(Path(presets.__file__).parent.glob("chakra_profile/*.yaml"))


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path)


def test_preset_and_overrides_on_the_command_line(app: App) -> None:
    settings = app.settings(
        "+chakra_profile=nemo_sample",
        "chakra_profile.trace_dir=./t",
        "chakra_profile.end_step=7",
        "chakra_profile.with_stack=on",
        "chakra_profile.trigger.signal=SIGUSR1",
        "chakra_profile.ranks=[0,2]",
        "chakra_profile.on_fault=raise",
    )
    assert settings["enabled"] is True
    assert (settings["start_step"], settings["end_step"]) == (5, 7)
    assert settings["with_stack"] is True
    assert settings["trigger"]["signal"] == "SIGUSR1"
    assert settings["ranks"] == [0, 2]
    assert settings["on_fault"] == "raise"
    assert settings["trace_dir"] == "./t"


def test_windows_on_the_command_line(app: App) -> None:
    windows = "chakra_profile.windows=[{start_step: 3, end_step: 4}, {start_step: 9, end_step: 9}]"
    settings = app.settings("+chakra_profile=one_step", "chakra_profile.trace_dir=t", windows)
    assert [(w["start_step"], w["end_step"], w["active_steps"]) for w in settings["windows"]] == [(3, 4, 1), (9, 9, 1)]


def test_preset_in_the_defaults_list(app: App) -> None:
    app.write("config", "defaults:\n  - chakra_profile: one_step\n  - _self_\nchakra_profile:\n  trace_dir: ./mine\n")
    assert app.settings()["trace_dir"] == "./mine"
    assert app.settings("chakra_profile=warm_window")["warmup_steps"] == 2
    assert app.settings("chakra_profile.enabled=no")["enabled"] is False


def test_nested_group_on_the_command_line_and_in_the_defaults_list(app: App) -> None:
    key = "model.chakra_profile"
    assert app.settings(f"+chakra_profile@{key}=one_step", f"{key}.trace_dir=t")["enabled"] is True
    app.write(
        "config", f"defaults:\n  - chakra_profile@{key}: nemo_sample\n  - _self_\nmodel: {{nsys_profile: null}}\n"
    )
    assert app.settings(f"{key}.trace_dir=t", f"{key}.end_step=12")["end_step"] == 12
    message = app.error(f"{key}.trace_dir=t", "model.nsys_profile={enabled: true}")
    assert "model.chakra_profile.enabled and model.nsys_profile.enabled are both true" in message


def test_section_written_as_nemo_documents_it_needs_no_group(app: App) -> None:
    app.write(
        "config",
        "chakra_profile:\n"
        "  {enabled: true, start_step: 5, end_step: 10, warmup_steps: 0, active_steps: 1, trace_dir: /workspace}\n"
        "nsys_profile: {enabled: false}\n",
    )
    assert app.settings()["end_step"] == 10
    assert "chakra_profile.enabled and nsys_profile.enabled are both true" in app.error("nsys_profile.enabled=true")
    message = app.error("+chakra_profile.start_stp=5")
    assert "chakra_profile.start_stp, given as 5 (int), is not a setting" in message
    assert "Did you mean chakra_profile.start_step?" in message


STRUCTURED_APP = """
from dataclasses import dataclass, field
from typing import Any
import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from chakra_capture.config import ChakraProfileConfig, settings_from

@dataclass
class AppConfig:
    defaults: list[Any] = field(default_factory=lambda: [{"chakra_profile": "one_step"}, "_self_"])
    chakra_profile: ChakraProfileConfig = MISSING

ConfigStore.instance().store(name="app", node=AppConfig)

@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(config):
    settings = settings_from(config)
    print('{"trace_dir": "%s", "end_step": %d}' % (settings.trace_dir, settings.end_step))

main()
"""


def test_structured_application_can_hold_the_dataclass_as_a_field(app: App) -> None:
    (app.folder / "app.py").write_text(STRUCTURED_APP)
    settings = app.settings("chakra_profile.trace_dir=t", "chakra_profile.end_step=3")
    assert settings == {"trace_dir": "t", "end_step": 3}


def test_preset_of_the_application_extends_the_schema(app: App) -> None:
    app.write("chakra_profile/ours", "defaults: [schema, _self_]\nenabled: true\nstart_step: 4\nend_step: 4\n")
    settings = app.settings("+chakra_profile=ours", "chakra_profile.trace_dir=t", "chakra_profile.compress=true")
    assert (settings["start_step"], settings["compress"], settings["record_shapes"]) == (4, True, True)


def test_unknown_key_on_the_command_line_is_named(app: App) -> None:
    arguments = ("+chakra_profile=one_step", "chakra_profile.trace_dir=t")
    message = app.error(*arguments, "chakra_profile.start_stp=5")
    assert "Key 'start_stp' not in 'ChakraProfileConfig'" in message
    assert "full_key: chakra_profile.start_stp" in message


def test_unknown_key_forced_in_with_a_plus_is_refused_when_the_settings_are_read(app: App) -> None:
    # Hydra itself lets + add any key, also below a schema.
    message = app.error("+chakra_profile=one_step", "chakra_profile.trace_dir=t", "+chakra_profile.start_stp=5")
    assert "chakra_profile.start_stp, given as 5 (int), is not a setting" in message
    assert "Did you mean chakra_profile.start_step?" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("chakra_profile.start_step=five", "Value 'five' of type 'str' could not be converted to Integer"),
        ("chakra_profile.start_step=2.5", "Value '2.5' of type 'float' could not be converted to Integer"),
        ("chakra_profile.start_step=true", "Value 'True' of type 'bool' could not be converted to Integer"),
        ("chakra_profile.enabled=maybe", "Value 'maybe' is not a valid bool"),
        ("chakra_profile.if_exists=keep", "expected one of [new, overwrite, error]"),
    ],
)
def test_override_of_a_wrong_type_is_named(app: App, override: str, part: str) -> None:
    message = app.error("+chakra_profile=one_step", override)
    assert part in message
    assert f"full_key: {override.split('=')[0]}" in message


def test_value_that_has_the_right_type_but_cannot_work_is_named(app: App) -> None:
    message = app.error("+chakra_profile=one_step", "chakra_profile.trace_dir=None")
    assert "chakra_profile.trace_dir is the text 'None'" in message
    assert "chakra_profile.trace_dir is null but chakra_profile.enabled is true" in app.error(
        "+chakra_profile=one_step"
    )


def test_section_given_as_text_says_that_the_group_was_not_found(app: App) -> None:
    app.write("config", "chakra_profile: one_step\n")
    message = app.error()
    assert "chakra_profile is the text 'one_step': Hydra did not find the group" in message
    assert "+chakra_profile=one_step" in message


def test_unknown_preset_lists_the_known_ones(app: App) -> None:
    message = app.error("+chakra_profile=no_such")
    assert "Could not find 'chakra_profile/no_such'" in message
    for preset in PRESETS:
        assert preset.stem in message


def test_interpolation_is_resolved_or_named(app: App) -> None:
    arguments = ("+chakra_profile=one_step", "chakra_profile.trace_dir=${oc.env:TRACES}/x")
    assert app.settings(*arguments, TRACES="/scratch")["trace_dir"] == "/scratch/x"
    message = app.error(*arguments)
    assert "chakra_profile.trace_dir is '${oc.env:TRACES}/x', which cannot be resolved" in message
    assert "TRACES" in message


def test_sweep_gives_every_job_its_own_settings(app: App) -> None:
    found = app.all_settings(
        "--multirun",
        "+chakra_profile=one_step",
        "chakra_profile.end_step=3,4",
        "chakra_profile.trace_dir=${hydra:runtime.output_dir}",
        "chakra_profile.job_id=${hydra:job.num}",
    )
    assert [(s["end_step"], s["job_id"]) for s in found] == [(3, "0"), (4, "1")]
    assert found[0]["trace_dir"] != found[1]["trace_dir"]


def test_every_preset_composes_and_is_valid(app: App) -> None:
    # A sweep over presets needs the group in the defaults list: Hydra composes once without the swept values.
    app.write("config", "defaults: [{chakra_profile: disabled}, _self_]\nchakra_profile: {trace_dir: t}\n")
    names = [preset.stem for preset in PRESETS]
    found = app.all_settings("--multirun", f"chakra_profile={','.join(names)}", "chakra_profile.compress=true")
    assert {name for name, settings in zip(names, found, strict=True) if not settings["enabled"]} == {"disabled"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_repeats_no_default_and_says_what_it_is_for(preset: Path) -> None:
    text = preset.read_text()
    assert text.startswith("# ")
    values: Any = OmegaConf.load(preset)
    assert values.pop("defaults")[0] == "schema"
    defaults: dict[Any, Any] = {row.key: OmegaConf.create(f"x: {row.default}").x for row in settings_table()}
    assert [key for key, value in values.items() if defaults[key] == value] == []


def test_help_of_an_application_lists_the_group(app: App) -> None:
    done = app.run("--help")
    assert done.returncode == 0
    assert "chakra_profile: " in done.stdout
    assert "one_step" in done.stdout
