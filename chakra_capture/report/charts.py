"""Drawings as static SVG: widths in percent and no viewBox, so that text keeps its size on a narrow page.

A label that does not fit falls back to its number, then to nothing: what it says stands beside the drawing, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from chakra_capture.report.escape import shown

_LETTER, _MARGIN = 7.3, 18.0
# The room that a drawing has at least on a laptop, and on a narrow page or on paper.
_WIDE, _NARROW = 1040.0, 640.0
MOST_BUCKETS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar."""

    name: str
    value: float | int
    tone: str
    text: str


def element(tag: str, *children: Markup | str, **attributes: str | float | None) -> Markup:
    """An SVG element; texts and attributes are escaped."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child if isinstance(child, Markup) else shown(child)) for child in children)
    return Markup(f"<{tag}{said}>{inner}</{tag}>")


def _text(value: str | float) -> str:
    if isinstance(value, Markup):  # the long list of numbers of a path
        return value
    return shown(value) if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")


def _percent(part: float) -> str:
    return f"{_text(100 * part)}%"


def bar(part: float, tone: str) -> Markup:
    """A bar in a table: a part of the longest."""
    inner = element("rect", width="100%", height="8", rx="2", class_="track")
    if part > 0:
        inner += element("rect", width=_percent(min(part, 1.0)), height="8", rx="2", class_=f"t-{tone}")
    return element("svg", inner, class_="bar", height="8", aria_hidden="true")


def stack(segments: Sequence[Segment], label: str, *, of: float | None = None, height: int = 28) -> Markup:
    """Parts of a whole in one bar; ``of``: what its full width stands for, where that is more than their sum."""
    total = float(of if of is not None else sum(segment.value for segment in segments)) or 1.0
    drawn, at = [], 0.0
    for segment in segments:
        part = float(segment.value) / total
        if part > 0:
            drawn.append(_segment(segment, at, part, height))
        at += part
    return element("svg", *drawn, class_="stack", height=height, role="img", aria_label=label)


def _segment(segment: Segment, at: float, part: float, height: int) -> Markup:
    inner = element("title", f"{segment.name} {segment.text}")
    inner += element("rect", width="100%", height="100%", class_=f"t-{segment.tone}")
    for room, kind in ((_WIDE, "wide"), (_NARROW, "narrow")) if height >= 20 else ():
        text = _fitting(segment, part * room)
        if text:
            inner += element("text", text, x=9, y=height / 2 + 4.5, class_=f"ink-{segment.tone} {kind}")
    return element("svg", inner, x=_percent(at), width=_percent(part), height=height)


def _fitting(segment: Segment, room: float) -> str:
    for text in (f"{segment.name} {segment.text}", segment.text, segment.text.split(" ")[0]):
        if _MARGIN + _LETTER * len(text) <= room:
            return text
    return ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some steps that follow each other: the middle of their times, of 8 in 10 the range, and the longest."""

    first_step: int
    last_step: int
    low_ns: float
    median_ns: float
    high_ns: float
    most_ns: float
    num_profiled: int


def step_line(buckets: Sequence[Bucket], label: str, ticks: tuple[str, str, str, str]) -> Markup:
    """Times of many steps: a line of medians in a band, a dot for the longest of each bucket.

    Args:
        ticks: longest time, half of it, first and last step, as they are printed.
    """
    top = max(bucket.most_ns for bucket in buckets) or 1.0
    width = max(len(buckets) - 1, 1)

    def points(name: str) -> list[str]:
        return [f"{1000 * n / width:.1f} {200 - 190 * getattr(b, name) / top:.1f}" for n, b in enumerate(buckets)]

    band = f"M{'L'.join([*points('high_ns'), *reversed(points('low_ns'))])}Z"
    dots = "".join(
        f"M{at}h0" for at, bucket in zip(points("most_ns"), buckets, strict=True) if bucket.most_ns > bucket.high_ns
    )
    marks = "".join(f"M{1000 * n / width:.1f} 200v-8" for n, b in enumerate(buckets) if b.num_profiled)
    inner = element("path", d="M0 10H1000M0 105H1000M0 200H1000", class_="grid")
    for d, kind in ((band, "band"), (f"M{'L'.join(points('median_ns'))}", "line"), (dots, "dots"), (marks, "marks")):
        if d:
            inner += element("path", d=Markup(d), class_=kind)
    plot = element("svg", inner, viewBox="0 0 1000 205", preserveAspectRatio="none", height="205", y="4", width="100%")
    texts = [
        element("text", ticks[0], x=4, y=28, class_="tick"), element("text", ticks[1], x=4, y=122, class_="tick"),
        element("text", ticks[2], x=0, y=226, class_="tick"),
        element("text", ticks[3], x="100%", y=226, class_="tick end"),
    ]  # fmt: skip
    return element("svg", plot, *texts, class_="series", height="232", role="img", aria_label=label)
