"""Settings: where they may stand, and what else in a job or process rules them out."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from chakra_capture.config import (
    ChakraProfileConfig,
    OnFault,
    WindowConfig,
    settings_from,
)
from chakra_capture.errors import SettingsError

PROFILER_VARIABLES = (
    "NSYS_PROFILING_SESSION_ID",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "LD_PRELOAD",
    "CHAKRA_CAPTURE_DISABLED",
)

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


@pytest.fixture(autouse=True)
def _no_other_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROFILER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def from_yaml(text: str) -> ChakraProfileConfig:
    return settings_from(OmegaConf.create(text))


def on(**values: Any) -> ChakraProfileConfig:
    return ChakraProfileConfig(**{"enabled": True, "trace_dir": "/data/traces", **values})


def message_of(source: object) -> str:
    with pytest.raises(SettingsError) as caught:
        settings_from(source)
    return str(caught.value)


# --- where settings stand ---------------------------------------------------------------------------------------


def test_section_and_whole_configuration_read_alike() -> None:
    whole = OmegaConf.create(NEMO_SAMPLE)
    plain = OmegaConf.to_container(whole)
    assert isinstance(plain, dict)
    expected = on(start_step=5, end_step=10, trace_dir="/workspace/traces")
    for source in (
        whole,
        whole.chakra_profile,
        plain,
        plain["chakra_profile"],
        {"chakra_profile": whole.chakra_profile},
    ):
        assert settings_from(source) == expected


def test_dataclass_is_returned_as_it_is() -> None:
    settings = on()
    assert settings_from(settings) is settings
    assert settings_from({"chakra_profile": settings}) is settings


def test_structured_schema_and_to_object_give_the_same_settings() -> None:
    merged = OmegaConf.merge(
        OmegaConf.structured(ChakraProfileConfig),
        {"enabled": "yes", "trace_dir": "~/t", "windows": [{"end_step": 3}], "on_fault": "raise"},
    )
    expected = ChakraProfileConfig(
        enabled=True, trace_dir="~/t", windows=[WindowConfig(end_step=3)], on_fault=OnFault["raise"]
    )
    assert settings_from(merged) == OmegaConf.to_object(merged) == expected


def test_merging_alone_does_not_check_but_settings_from_does() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(ChakraProfileConfig), {"start_step": 9, "end_step": 4})
    assert "end_step is 4 but chakra_profile.start_step is 9" in message_of(merged)


@pytest.mark.parametrize("source", [None, {}, {"chakra_profile": None}, OmegaConf.create({"chakra_profile": None})])
def test_absent_or_null_section_is_off(source: object) -> None:
    assert settings_from(source) == ChakraProfileConfig()


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create, lambda whole: whole["chakra_profile"]])
def test_section_given_as_text_says_that_hydra_did_not_find_the_group(wrap: Any) -> None:
    message = message_of(wrap({"chakra_profile": "one_step"}))
    assert message.startswith("chakra_profile is the text 'one_step': Hydra did not find the group")
    assert "+chakra_profile=one_step" in message
    assert "installed" in message


@pytest.mark.parametrize("source", [True, 5, ["enabled"], OmegaConf.create(["enabled"]), {"chakra_profile": False}])
def test_section_that_is_no_section_is_an_error(source: object) -> None:
    message = message_of(source)
    assert message.startswith("chakra_profile is ")
    assert "expected a section of settings" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("chakra_profile: ???", "chakra_profile is mandatory (???)"),
        ("chakra_profile: ${profiles.fast}", "chakra_profile is '${profiles.fast}', which cannot be resolved"),
    ],
)
def test_section_that_leads_nowhere_is_an_error(text: str, part: str) -> None:
    assert part in message_of(OmegaConf.create(text))


def test_section_given_by_interpolation_is_followed() -> None:
    text = "{profiles: {fast: {start_step: 7, end_step: 7}}, chakra_profile: '${profiles.fast}'}"
    assert from_yaml(text).start_step == 7


def test_unknown_key_is_refused_through_every_door() -> None:
    suggestion = "Did you mean chakra_profile.start_step?"
    assert suggestion in message_of({"start_stp": 5})
    assert suggestion in message_of({"chakra_profile": {"start_stp": 5}})
    assert suggestion in message_of(OmegaConf.create({"start_stp": 5}))
    with pytest.raises(TypeError, match="start_stp"):
        ChakraProfileConfig(start_stp=5)  # type: ignore[call-arg]


def test_configuration_whose_section_is_deeper_says_where_it_is() -> None:
    message = message_of({"model": {"chakra_profile": {"enabled": True}}})
    assert "Give the section itself: model.chakra_profile" in message


# --- other profilers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nsys", ["", "nsys_profile:", "nsys_profile: {}", "nsys_profile: {enabled: off}"])
def test_nsys_that_is_absent_null_or_off_is_fine(nsys: str) -> None:
    whole = OmegaConf.create(f"chakra_profile: {{enabled: true, trace_dir: t}}\n{nsys}")
    OmegaConf.set_struct(whole, True)
    assert settings_from(whole).enabled
    assert settings_from(whole.chakra_profile).enabled
    assert settings_from(OmegaConf.to_container(whole)).enabled


def test_both_profilers_enabled_names_both_keys() -> None:
    whole = OmegaConf.create("{chakra_profile: {enabled: true, trace_dir: t}, nsys_profile: {enabled: 'yes'}}")
    for source in (whole, whole.chakra_profile, OmegaConf.to_container(whole)):
        message = message_of(source)
        assert message.startswith("chakra_profile.enabled and nsys_profile.enabled are both true")
        assert "nsys and chakra cannot run together" in message
        assert "Set nsys_profile.enabled=false, or chakra_profile.enabled=false." in message


@pytest.mark.parametrize("nsys_at", ["model.nsys_profile", "nsys_profile"])
def test_nested_section_finds_nsys_beside_and_above_it(nsys_at: str) -> None:
    whole = OmegaConf.create({"model": {"chakra_profile": {"enabled": True, "trace_dir": "t"}}})
    OmegaConf.update(whole, f"{nsys_at}.enabled", True, force_add=True)
    for source in (whole.model, whole.model.chakra_profile):
        assert f"model.chakra_profile.enabled and {nsys_at}.enabled are both true" in message_of(source)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NSYS_PROFILING_SESSION_ID", "77"),
        ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "1"),
        ("CUDA_INJECTION64_PATH", "/opt/nvidia/nsight-systems/target-linux-x64/libToolsInjection64.so"),
        ("CUDA_INJECTION64_PATH", "/home/me/libcupti_trace_injection.so"),
        ("NVTX_INJECTION64_PATH", "/opt/x/libToolsInjection64.so"),
        ("LD_PRELOAD", "libm.so:/opt/nsight_systems/libToolsInjectionProxy64.so"),
    ],
)
def test_process_under_nsight_is_an_error_that_names_the_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = on()
    monkeypatch.setenv(variable, value)
    for source in (settings, {"enabled": True, "trace_dir": "t"}):
        message = message_of(source)
        assert f"({variable}=" in message
        assert "chakra_profile.enabled=false" in message
    assert settings_from({"enabled": False}) == ChakraProfileConfig()


def test_injection_of_something_else_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so")
    assert settings_from(on()).enabled


# --- off is off -------------------------------------------------------------------------------------------------


def test_disabled_recording_does_not_care_what_only_a_recording_needs() -> None:
    text = """
    chakra_profile: {enabled: no, trace_dir: '${oc.env:NO_SUCH}', job_id: '???'}
    nsys_profile: {enabled: true}
    """
    assert from_yaml(text) == ChakraProfileConfig()


def test_disabled_recording_still_refuses_what_will_not_work_on_the_day_it_is_enabled() -> None:
    assert "chakra_profile.start_stp" in message_of({"enabled": False, "start_stp": 5})
    assert "chakra_profile.start_step" in message_of({"enabled": False, "start_step": "five"})
    assert "chakra_profile.end_step" in message_of({"enabled": False, "start_step": 5})


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_environment_variable_turns_everything_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", value)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "77")
    assert settings_from(on()) == ChakraProfileConfig()
    assert settings_from({"enabled": True, "no_such": 1}) == ChakraProfileConfig()


def test_environment_variable_zero_turns_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "0")
    assert settings_from(on()).enabled


@pytest.mark.parametrize("make", [dict, OmegaConf.create], ids=["mapping", "DictConfig"])
def test_whole_configuration_without_the_section_is_off(make: Any) -> None:
    config = make({"trainer": {"max_steps": 3}, "seed": 1})
    assert settings_from(config) == ChakraProfileConfig()


@pytest.mark.parametrize("make", [dict, OmegaConf.create], ids=["mapping", "DictConfig"])
def test_section_with_nothing_but_a_misspelt_key_is_not_taken_for_a_whole_configuration(make: Any) -> None:
    with pytest.raises(SettingsError, match="start_step"):
        settings_from(make({"start_stp": 5}))


def test_flat_mapping_of_unknown_keys_is_refused() -> None:
    with pytest.raises(SettingsError, match="foo"):
        settings_from({"foo": 1})


def test_section_inside_a_section_is_refused_not_taken_for_off(tmp_path) -> None:
    both = {"enabled": True, "trace_dir": str(tmp_path), "chakra_profile": {}}
    for source in (both, OmegaConf.create(both)):
        with pytest.raises(SettingsError, match="enabled stands beside chakra_profile"):
            settings_from(source)
