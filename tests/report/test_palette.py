"""Colours can be told from each other and from the card, in both themes, also by those who see fewer of them."""

import itertools
import math
import re
from pathlib import Path

import pytest

STYLE = (Path(__file__).parent.parent.parent / "chakra_capture" / "report" / "style.css").read_text()
PHASES = ("input-wait", "h2d", "forward", "backward", "optimizer", "other")
KINDS = ("kernel", "communication", "copy", "sync", "op")
# Machado, Oliveira, Fernandes 2009, severity 1.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
RGB = tuple[float, float, float]


def colour(name: str, theme: str) -> RGB:
    match = re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", STYLE)
    assert match is not None, name
    text = match[1 if theme == "light" else 2].lstrip("#")
    text = "".join(c * 2 for c in text) if len(text) == 3 else text
    values = [int(text[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return red, green, blue


def times(matrix: tuple[tuple[float, ...], ...], vector: RGB) -> RGB:
    a, b, c = (sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def oklab(rgb: RGB) -> RGB:
    cones = times(
        ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
         (0.0883024619, 0.2817188376, 0.6299787005)), rgb,
    )  # fmt: skip
    root = tuple(math.copysign(abs(value) ** (1 / 3), value) for value in cones)
    return times(
        ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
         (0.0259040371, 0.7827717662, -0.8086757660)), (root[0], root[1], root[2]),
    )  # fmt: skip


def contrast(first: RGB, second: RGB) -> float:
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (first, second))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("family", [PHASES, KINDS])
def test_colours_of_a_family_differ_for_every_eye(family: tuple[str, ...], theme: str) -> None:
    for matrix in VISION.values():
        seen = {name: oklab(times(matrix, colour(name, theme))) for name in family}
        for first, second in itertools.combinations(family, 2):
            assert 100 * math.dist(seen[first], seen[second]) >= 11, (theme, first, second)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_card(theme: str) -> None:
    card = colour("card", theme)
    for name in (*PHASES, *KINDS, "call", "prize"):
        assert contrast(colour(name, theme), card) >= 2.98, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(theme: str) -> None:
    for text in ("text", "grey", "link", "good", "crit", "warn"):
        for ground in ("card", "ground", "soft"):
            assert contrast(colour(text, theme), colour(ground, theme)) >= 4.5, (text, ground)
    for name in (*PHASES, *KINDS, "call"):
        assert contrast(colour(f"{name}-ink", theme), colour(name, theme)) >= 4.5, name
