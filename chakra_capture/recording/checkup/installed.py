"""Which frameworks are installed, in which versions, and whether that is what their adapters need."""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from chakra_capture.recording.checkup.check import Check, blocking, fine, warning

SUBJECT = "frameworks"
_OWN = "chakra-capture"


@dataclass(frozen=True, slots=True)
class Part:
    """A package that an extra brings: the module that shows that it is there, and what it is installed as."""

    module: str
    distribution: str


@dataclass(frozen=True, slots=True)
class Extra:
    """What an adapter needs: one of ``choices``, and all of ``others``."""

    choices: tuple[Part, ...]
    others: tuple[Part, ...] = ()


TORCH = Part("torch", "torch")
_IGNITE = Part("ignite", "pytorch-ignite")
EXTRAS = {
    "torch": Extra((TORCH,)),
    "lightning": Extra((Part("pytorch_lightning", "pytorch-lightning"), Part("lightning", "lightning"))),
    "ignite": Extra((_IGNITE,)),
    "monai": Extra((Part("monai", "monai"),), (_IGNITE,)),
    "huggingface": Extra((Part("transformers", "transformers"),), (Part("accelerate", "accelerate"),)),
    "hydra": Extra((Part("hydra", "hydra-core"),), (Part("omegaconf", "omegaconf"),)),
}


def installed(wanted: str | None) -> Iterator[Check]:
    """Look at what the adapters need; only what is half there, too old, or ``wanted``, can be a problem.

    Args:
        wanted: the extra of the framework that the job uses, if that is known.
    """
    bounds = _lower_bounds()
    problems, present, absent = [], [], []
    for name, extra in EXTRAS.items():
        there = [part for part in extra.choices if _is_there(part)]
        lacking = [part for part in extra.others if not _is_there(part)]
        broken = [part for part in extra.choices if part not in there and _version(part) is not None]
        present += [f"{part.distribution} {_version(part) or 'of unknown version'}" for part in there]
        if broken:
            problems.append(_not_importable(broken[0], name, is_wanted=name in ("torch", wanted) and not there))
        elif not there and name in ("torch", wanted):
            problems.append(_missing(extra.choices[0], name))
        elif not there:
            absent.append(name)
        elif lacking:
            problems.append(_incomplete(there[0], lacking[0], name, is_wanted=name == wanted))
        problems += [_too_old(part, bounds[part.distribution], name) for part in there if _is_too_old(part, bounds)]
    yield from problems
    yield fine(SUBJECT, ", ".join(present) + (f"; not installed: {', '.join(absent)}" if absent else ""))


def _is_there(part: Part) -> bool:
    try:
        return importlib.util.find_spec(part.module) is not None
    except (ImportError, ValueError):
        return False


def _version(part: Part) -> str | None:
    try:
        return version(part.distribution)
    except PackageNotFoundError:
        return None


def _install(name: str) -> str:
    return f'Run: pip install "{_OWN}[{name}]"'


def _missing(part: Part, name: str) -> Check:
    return blocking(
        SUBJECT, f"{part.distribution} is not installed.", "Nothing can be recorded without it.", _install(name)
    )


def _not_importable(part: Part, name: str, *, is_wanted: bool) -> Check:
    make = blocking if is_wanted else warning
    return make(
        SUBJECT,
        f"{part.distribution} {_version(part)} is installed, but its module {part.module} is not found.",
        "A job that uses it ends when it imports it.",
        f"Install it anew in the environment of the job. {_install(name)}",
    )


def _incomplete(part: Part, lacking: Part, name: str, *, is_wanted: bool) -> Check:
    make = blocking if is_wanted else warning
    return make(
        SUBJECT,
        f"{part.distribution} is installed, but {lacking.distribution} is not.",
        f"chakra_capture.integrations.{name} needs both."
        if name != "hydra"
        else "The group chakra_profile needs both.",
        _install(name),
    )


def _too_old(part: Part, bound: str, name: str) -> Check:
    return warning(
        SUBJECT,
        f"{part.distribution} {_version(part)} is older than {bound}.",
        "chakra-capture was never run with it, and a recording may fail or lack phases.",
        _install(name),
    )


def _is_too_old(part: Part, bounds: dict[str, str]) -> bool:
    found, bound = _version(part), bounds.get(part.distribution)
    return found is not None and bound is not None and _numbers(found) < _numbers(bound)


def _lower_bounds() -> dict[str, str]:
    """What this installation asks of each package; nothing where it does not say."""
    try:
        stated = requires(_OWN) or []
    except PackageNotFoundError:
        return {}
    matches = (re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", line) for line in stated)
    return {match[1]: match[2] for match in matches if match}


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
