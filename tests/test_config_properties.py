"""Settings: any value at all gives settings or one clear error, never another exception."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from chakra_capture.config import (
    ChakraProfileConfig,
    WindowConfig,
    settings_from,
)
from chakra_capture.errors import SettingsError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["None", "???", "010", "1e3", "off", "${x}", "~", "keep", "raise", "SIGUSR1", "9" * 5000]),
    st.binary(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([f.name for f in dataclasses.fields(ChakraProfileConfig)])
WINDOWS = st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(WindowConfig)]), VALUES)
SECTIONS = st.dictionaries(KEYS, VALUES | WINDOWS | st.lists(WINDOWS, max_size=3), max_size=6)


def settings_or_message(source: object) -> ChakraProfileConfig | str:
    try:
        return settings_from(source)
    except SettingsError as error:
        return str(error)


@settings(deadline=None)  # the machine is shared
@given(st.one_of(VALUES, SECTIONS, SECTIONS.map(lambda section: {"chakra_profile": section, "nsys_profile": None})))
def test_any_value_gives_settings_or_a_settings_error(source: object) -> None:
    found = settings_or_message(source)
    if isinstance(found, str):
        assert "chakra_profile" in found
        return
    assert dataclasses.replace(found) == found
    for window in found.step_windows:
        assert 0 <= window.start_step + window.warmup_steps <= window.end_step


@settings(deadline=None)  # the machine is shared
@given(SECTIONS)
def test_any_omegaconf_section_gives_settings_or_a_settings_error(section: dict[str, object]) -> None:
    try:
        source = OmegaConf.create(section)
    except Exception:  # noqa: BLE001 - not every value can stand in a DictConfig
        return
    found = settings_or_message(OmegaConf.create({"model": {"chakra_profile": source}}).model)
    assert isinstance(found, ChakraProfileConfig) or "chakra_profile" in found


@settings(deadline=None)  # the machine is shared
@given(start=st.integers(0, 99), end=st.integers(0, 99), warmup=st.integers(0, 9), active=st.integers(1, 9))
def test_window_is_accepted_exactly_when_it_records_a_step(start: int, end: int, warmup: int, active: int) -> None:
    values: dict[str, Any] = {"start_step": start, "end_step": end, "warmup_steps": warmup, "active_steps": active}
    if start + warmup <= end < start + 50:
        assert ChakraProfileConfig(**values).step_windows == (WindowConfig(**values),)
        assert ChakraProfileConfig(windows=[WindowConfig(**values)]).step_windows == (WindowConfig(**values),)
    else:
        with pytest.raises(SettingsError):
            ChakraProfileConfig(**values)
