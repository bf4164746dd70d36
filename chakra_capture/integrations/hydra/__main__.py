"""The process behind ``chakra-capture config``: says as JSON lines what each section resolves to, or what is wrong."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from chakra_capture.config import DISABLED_VARIABLE, SECTION, is_switched_off, settings_table
from chakra_capture.errors import ChakraCaptureError, MissingDependencyError


def sections(path: Path | None, overrides: list[str], *, is_off: bool) -> list[dict[str, object]]:
    """Return what the configuration holds of ours.

    Raises:
        SettingsError: it cannot be composed or read, or a setting cannot work.
        MissingDependencyError: what composes it is not installed.
    """
    if importlib.util.find_spec("omegaconf") is None:
        raise MissingDependencyError(
            'config needs OmegaConf, which is not installed. Run: pip install "chakra-capture[hydra]"'
        )
    from chakra_capture.integrations.hydra.layers import from_file, plain, sections_in
    from chakra_capture.integrations.hydra.resolved import defaults, resolved

    if _is_for_hydra(path):
        from chakra_capture.integrations.hydra.composition import composed

        composition = composed(path, overrides)
    else:
        assert path is not None
        composition = from_file(path, overrides)
    places = list(sections_in(plain(composition.config)))
    is_section = any(row.key in composition.config for row in settings_table())
    if not places and is_section:
        places = [()]
    found = [resolved(composition, at) for at in places] or [defaults()]
    if not places:
        found[0].notes.append(f"There is no {SECTION}, so recording is off. Add one with +{SECTION}=one_step.")
    if is_off:
        for section in found:
            section.notes.append(f"{DISABLED_VARIABLE} is set: nothing is recorded, whatever stands here.")
    return [section.as_json() for section in found]


def _is_for_hydra(path: Path | None) -> bool:
    if path is not None and path.suffix != ".yaml":
        return False
    if importlib.util.find_spec("hydra") is not None:
        return True
    if path is None:
        raise MissingDependencyError(
            'Presets need Hydra, which is not installed. Run: pip install "chakra-capture[hydra]"'
        )
    return False


if __name__ == "__main__":
    # The switch turns settings into those of a recording that is off; here they are asked for as they stand.
    is_off = is_switched_off(os.environ)
    os.environ.pop(DISABLED_VARIABLE, None)
    given = Path(sys.argv[1]) if sys.argv[1] else None
    try:
        for found in sections(given, sys.argv[2:], is_off=is_off):
            sys.stdout.write(json.dumps({"section": found}) + "\n")
    except ChakraCaptureError as fault:
        sys.stdout.write(json.dumps({"error": str(fault)}) + "\n")
