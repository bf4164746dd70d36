"""A chart of stacked bars with a line of text between two of them, as SVG that needs nothing to be drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Okabe's and Ito's, which everybody can tell apart.
COLOURS = ("#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#009e73", "#999999")
_LEFT, _WIDTH, _RIGHT = 90, 560, 330
_TOP, _BAR, _ROW = 72, 22, 52


@dataclass(frozen=True, slots=True)
class Bar:
    """What it is of, the length of each part by name, and what stands behind it."""

    name: str
    parts: Mapping[str, float]
    note: str


def stacked_bars(title: str, bars: Sequence[Bar], between: Sequence[str]) -> str:
    """Draw bars of the same parts to one scale, and a text between each and the next."""
    longest = max(sum(bar.parts.values()) for bar in bars)
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + _ROW * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(8, 24, title),
        *_legend(bars),
    ]
    for row, bar in enumerate(bars):
        lines += _bar(bar, _TOP + row * _ROW, _WIDTH / longest if longest else 0.0)
    for row, text in enumerate(between):
        lines.append(_text(_LEFT, _TOP + row * _ROW + _BAR + 19, f"\u2193 {text}", "#555555"))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(bars: Sequence[Bar]) -> Iterator[str]:
    colours = zip(bars[0].parts, COLOURS, strict=False)
    drawn = [(name, colour) for name, colour in colours if any(bar.parts[name] for bar in bars)]
    for at, (name, colour) in enumerate(drawn):
        x = _LEFT + 105 * at
        yield f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 17, 49, name)


def _bar(bar: Bar, y: int, scale: float) -> Iterator[str]:
    x = float(_LEFT)
    yield _text(8, y + 16, bar.name)
    for (name, value), colour in zip(bar.parts.items(), COLOURS, strict=False):
        said = f"<title>{escape(f'{bar.name}: {name} {value:.1f}')}</title>"
        yield f'<rect x="{x:.2f}" y="{y}" width="{value * scale:.2f}" height="{_BAR}" fill="{colour}">{said}</rect>'
        x += value * scale
    yield _text(x + 8, y + 16, bar.note)


def _text(x: float, y: float, text: str, colour: str = "#000000") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}">{escape(text)}</text>'
