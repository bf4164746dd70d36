"""Settings: the values, every way to get them wrong, and the message that says so."""

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from chakra_capture.config import (
    ChakraProfileConfig,
    IfExists,
    OnFault,
    TriggerConfig,
    Validation,
    WindowConfig,
    settings_from,
    settings_table,
)
from chakra_capture.errors import SettingsError

NEMO_SAMPLE = """
chakra_profile:
  enabled: true
  start_step: 5
  end_step: 10
  warmup_steps: 0
  active_steps: 1
  trace_dir: /workspace/traces
nsys_profile:
  enabled: false
"""


def from_yaml(text: str) -> ChakraProfileConfig:
    return settings_from(OmegaConf.create(text))


def on(**values: Any) -> ChakraProfileConfig:
    return ChakraProfileConfig(**{"enabled": True, "trace_dir": "/data/traces", **values})


def nemo_line(line: str) -> Any:
    """NeMo's sample as a configuration, one line of it replaced or added."""
    lines = [kept for kept in NEMO_SAMPLE.splitlines() if kept.split(":")[0].strip() != line.split(":")[0]]
    nsys = lines.index("nsys_profile:")
    return OmegaConf.create("\n".join([*lines[:nsys], f"  {line}", "nsys_profile:", "  enabled: false"]))


def message_of(source: object) -> str:
    with pytest.raises(SettingsError) as caught:
        settings_from(source)
    return str(caught.value)


# --- the values -------------------------------------------------------------------------------------------------


def test_defaults_are_off_and_hold_one_step() -> None:
    settings = ChakraProfileConfig()
    assert settings.enabled is False
    assert settings.step_windows == (WindowConfig(start_step=2, end_step=2, warmup_steps=0, active_steps=1),)


def test_documented_sample_of_nemo_is_steps_5_to_10() -> None:
    settings = from_yaml(NEMO_SAMPLE)
    assert settings.enabled is True
    assert settings.trace_dir == "/workspace/traces"
    assert settings.step_windows == (WindowConfig(start_step=5, end_step=10),)


def test_documented_default_section_of_nemo_is_off_though_its_trace_dir_is_the_text_none() -> None:
    settings = from_yaml(
        "{enabled: False, start_step: 2, end_step: 2, warmup_steps: 0, active_steps: 1, trace_dir: None}"
    )
    assert settings == ChakraProfileConfig()


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("enabled: no", "enabled", False),
        ("enabled: off", "enabled", False),
        ('enabled: "false"', "enabled", False),
        ('enabled: "No"', "enabled", False),
        ("enabled: 0", "enabled", False),
        ('enabled: "on"', "enabled", True),
        ("end_step: 1.2e1", "end_step", 12),
        ('end_step: "12"', "end_step", 12),
        ('end_step: "1.2e1"', "end_step", 12),
        ("trace_dir: ~/traces", "trace_dir", os.path.expanduser("~/traces")),
        ("trace_dir: ./None", "trace_dir", "./None"),
        ("job_id: 4711", "job_id", "4711"),
        ("on_fault: raise", "on_fault", OnFault["raise"]),
        ("validation: exclude", "validation", Validation.exclude),
        ("if_exists: overwrite", "if_exists", IfExists.overwrite),
        ("ranks: [0, '3']", "ranks", [0, 3]),
        ("trigger: {signal: usr1, slow_factor: 3}", "trigger", TriggerConfig(signal="SIGUSR1", slow_factor=3.0)),
    ],
)
def test_value_is_read_as_its_writer_meant_it(line: str, key: str, value: object) -> None:
    assert getattr(settings_from(nemo_line(line)), key) == value


def test_1e3_is_step_1000() -> None:
    assert from_yaml("{start_step: 1e3, end_step: 1e3}").step_windows == (WindowConfig(start_step=1000, end_step=1000),)


def test_path_object_is_accepted_as_trace_dir(tmp_path: Path) -> None:
    assert on(trace_dir=tmp_path).trace_dir == str(tmp_path)


def test_interpolated_trace_dir_is_resolved_once_at_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_DIR", "/scratch/t")
    settings = settings_from(nemo_line("trace_dir: ${oc.env:TRACE_DIR}/x"))
    monkeypatch.delenv("TRACE_DIR")
    assert settings.trace_dir == "/scratch/t/x"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("trace_dir: None", ["chakra_profile.trace_dir is the text 'None'", "Write null"]),
        ("trace_dir:", ["chakra_profile.trace_dir is null", "enabled is true", "trace_dir=./traces"]),
        ('trace_dir: ""', ["chakra_profile.trace_dir is the text ''"]),
        ("trace_dir: 5", ["chakra_profile.trace_dir is 5 (int)", "path of a folder"]),
        ("trace_dir: ???", ["chakra_profile.trace_dir is mandatory (???)", "chakra_profile.trace_dir=..."]),
        ("trace_dir: ~nobody-of-that-name/x", ["chakra_profile.trace_dir is the text '~nobody"]),
        ("enabled: ???", ["chakra_profile.enabled is mandatory"]),
        ("enabled: maybe", ["chakra_profile.enabled is the text 'maybe'", "true or false"]),
        ("enabled: 2", ["chakra_profile.enabled is 2 (int)", "true or false"]),
        ("enabled: null", ["chakra_profile.enabled is null", "true or false"]),
        ("start_step: true", ["chakra_profile.start_step is True (bool)", "a step number of at least 0"]),
        ("start_step: -1", ["chakra_profile.start_step is -1 (int)", "a step number of at least 0"]),
        ("start_step: 2.5", ["chakra_profile.start_step is 2.5 (float)", "a step number"]),
        ("start_step: .inf", ["chakra_profile.start_step is inf (float)"]),
        ("start_step: 1e300", ["chakra_profile.start_step is 1e+300 (float)"]),
        ('start_step: "010"', ["chakra_profile.start_step is the text '010'", "without leading zeros"]),
        ("start_step: five", ["chakra_profile.start_step is the text 'five'"]),
        ("start_step: [5]", ["chakra_profile.start_step is [5] (list)"]),
        ("start_step: ???", ["chakra_profile.start_step is mandatory"]),
        ("end_step: 4", ["chakra_profile.end_step is 4 but chakra_profile.start_step is 5", "end_step=5"]),
        ("end_step: null", ["chakra_profile.end_step is null but chakra_profile.start_step is 5", "end_step=5"]),
        ("active_steps: 0", ["chakra_profile.active_steps is 0 (int)", "at least 1"]),
        ("active_steps: null", ["chakra_profile.active_steps is null", "at least 1"]),
        ("warmup_steps: -1", ["chakra_profile.warmup_steps is -1 (int)", "at least 0"]),
        (
            "start_stp: 5",
            ["chakra_profile.start_stp, given as 5 (int), is not a setting", "chakra_profile.start_step?"],
        ),
        ("zzz: 5", ["chakra_profile.zzz", "is not a setting", "enabled, start_step"]),
        ("trace_dir: ${work.dir}/t", ["chakra_profile.trace_dir is '${work.dir}/t'", "'work.dir' not found"]),
        ("trace_dir: ${oc.env:NO_SUCH}", ["chakra_profile.trace_dir", "NO_SUCH", "chakra_profile.trace_dir=..."]),
        ("enabled: ${oc.env:NO_SUCH}", ["chakra_profile.enabled", "NO_SUCH"]),
        ("trigger: {max: '${no.key}'}", ["chakra_profile.trigger", "no.key"]),
        ("trigger: {max: '???'}", ["chakra_profile.trigger.max is mandatory"]),
        ("trigger: {mxa: 3}", ["chakra_profile.trigger.mxa", "chakra_profile.trigger.max?"]),
        ("trigger: true", ["chakra_profile.trigger is True (bool)", "a section of settings", "trigger.file=..."]),
        ("trigger: {signal: SIGKILL}", ["chakra_profile.trigger.signal is the text 'SIGKILL'", "nothing else uses"]),
        ("trigger: {signal: SIGSEGV}", ["chakra_profile.trigger.signal is the text 'SIGSEGV'", "SIGUSR1 or SIGUSR2"]),
        ("trace_dir: 'a\\\\b'", ["chakra_profile.trace_dir is the text", "without backslashes"]),
        ('trace_dir: "a\\nb"', ["chakra_profile.trace_dir is the text", "line breaks"]),
        ("trigger: {signal: 10}", ["chakra_profile.trigger.signal is 10 (int)"]),
        ("trigger: {slow_factor: 1}", ["chakra_profile.trigger.slow_factor is 1 (int)", "greater than 1"]),
        ("trigger: {slow_factor: .nan}", ["chakra_profile.trigger.slow_factor is nan"]),
        ("ranks: 0", ["chakra_profile.ranks is 0 (int)", "a list", "[0]"]),
        ("ranks: []", ["chakra_profile.ranks is []", "null to record all"]),
        ("ranks: [0, 0]", ["chakra_profile.ranks is [0, 0]", "different"]),
        ("ranks: [0, -1]", ["chakra_profile.ranks[1] is -1 (int)"]),
        ("job_id: a/b", ["chakra_profile.job_id is the text 'a/b'", "no / or"]),
        ("job_id: ..", ["chakra_profile.job_id is the text '..'"]),
        ("job_id: None", ["chakra_profile.job_id is the text 'None'"]),
        ("job_id: true", ["chakra_profile.job_id is True (bool)"]),
        ("on_fault: ignore", ["chakra_profile.on_fault is the text 'ignore'", "one of warn, raise"]),
        ("max_window_steps: 5", ["a window of 6 steps", "max_window_steps=5", "end_step=9"]),
        ("max_recorded_steps: 0", ["chakra_profile.max_recorded_steps is 0 (int)", "at least 1"]),
        ("windows: []", ["chakra_profile.windows is []", "at least one item"]),
        ("windows: 5", ["chakra_profile.windows is 5 (int)", "a list"]),
        ("windows: [5]", ["chakra_profile.windows[0] is 5 (int)", "a section"]),
        ("windows: [{start: 5}]", ["chakra_profile.windows[0].start, given as 5 (int)", "windows[0].start_step?"]),
        ("windows: [{start_step: 9}]", ["windows[0].end_step is 2 but chakra_profile.windows[0].start_step is 9"]),
        ("windows: [{end_step: 999}]", ["chakra_profile.windows[0].start_step 2", "a window of 998 steps"]),
        (
            "windows: [{start_step: 9, end_step: 12}, {start_step: 2, end_step: 9}]",
            ["2..9 and 9..12", "overlap", "at 10"],
        ),
    ],
)
def test_wrong_line_is_an_error_that_names_key_value_and_fix(line: str, parts: list[str]) -> None:
    message = message_of(nemo_line(line))
    for part in parts:
        assert part in message
    assert "expected" in message or "must be" in message


def test_value_that_plain_yaml_left_uninterpolated_is_an_error() -> None:
    message = message_of({"enabled": True, "trace_dir": "${oc.env:TRACE_DIR}"})
    assert "chakra_profile.trace_dir is the text '${oc.env:TRACE_DIR}'" in message
    assert "OmegaConf" in message


# --- the plan ---------------------------------------------------------------------------------------------------


def test_warmup_that_eats_the_window_names_both_keys_and_the_fix() -> None:
    message = message_of({"start_step": 2, "end_step": 2, "warmup_steps": 1})
    assert message == (
        "chakra_profile.warmup_steps is 1 but the window 2..2 has 1 step; warm-up happens inside the window, so "
        "nothing would be recorded. Set chakra_profile.end_step=3 or later, or chakra_profile.warmup_steps=0 or less."
    )


def test_warmup_inside_the_window_is_accepted() -> None:
    settings = ChakraProfileConfig(start_step=2, end_step=4, warmup_steps=1, active_steps=2)
    assert settings.step_windows == (WindowConfig(start_step=2, end_step=4, warmup_steps=1, active_steps=2),)


def test_start_step_null_is_phases_only_whatever_end_step_is() -> None:
    assert on(start_step=None).step_windows == ()
    assert on(start_step=None, end_step=None, warmup_steps=9).step_windows == ()


def test_windows_come_in_order_of_time_and_replace_the_four_keys() -> None:
    settings = from_yaml("{start_step: 7, end_step: null, windows: [{start_step: 9, end_step: 9}, {warmup_steps: 0}]}")
    assert settings.step_windows == (WindowConfig(), WindowConfig(start_step=9, end_step=9))


def test_recording_that_would_write_nothing_is_an_error() -> None:
    message = message_of(
        {"enabled": True, "trace_dir": "t", "start_step": None, "phases": False, "trigger": {"file": False}}
    )
    assert "nothing would be recorded" in message
    assert "chakra_profile.phases=true" in message


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"active_steps": 1, "start_step": 5, "end_step": 10}, None),
        ({"active_steps": 6, "start_step": 5, "end_step": 10}, None),
        ({"active_steps": 2, "start_step": 5, "end_step": 10, "warmup_steps": 1}, None),
        ({"active_steps": 2, "start_step": 5, "end_step": 10}, "active_steps=2 has no effect with warmup_steps=0"),
        ({"windows": [{}], "start_step": 5}, "chakra_profile.start_step has no effect: chakra_profile.windows"),
    ],
)
def test_setting_changed_in_vain_is_said_once(
    values: dict[str, object], warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_from({"enabled": True, "trace_dir": "t", **values})
    assert settings_from(settings) is settings
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(found) == (0 if warning is None else 1)
    assert warning is None or warning in found[0]


def test_disabled_recording_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ChakraProfileConfig(active_steps=2, end_step=9)
    assert caplog.records == []


# --- rules about the module -------------------------------------------------------------------------------------


def test_every_setting_has_one_line_of_meaning_and_every_default_passes_its_own_check() -> None:
    rows = settings_table()
    assert [row.key for row in rows[:3]] == ["enabled", "start_step", "end_step"]
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.meaning and "\n" not in row.meaning and "|" not in row.meaning for row in rows)
    defaults = {row.key: row.default for row in rows}
    assert defaults["trigger.file"] == "true"
    assert defaults["if_exists"] == "new"
    assert OmegaConf.create("\n".join(f"{k}: {v}" for k, v in defaults.items() if "." not in k)) == {
        f.name: value.name if isinstance(value := f.default, Enum) else value
        for f in dataclasses.fields(ChakraProfileConfig)
        if f.name != "trigger"
    }


def test_settings_survive_pickling_for_spawned_ranks() -> None:
    settings = on(windows=[WindowConfig()], ranks=[0])
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChakraProfileConfig().end_step = 1  # type: ignore[misc]


def test_module_imports_neither_omegaconf_nor_anything_heavy() -> None:
    code = (
        "import sys; from chakra_capture.config import settings_from; settings_from({'start_step': 2}); "
        "print([m for m in ('omegaconf', 'yaml', 'hydra', 'torch', 'numpy', 'polars') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
