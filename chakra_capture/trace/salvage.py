"""What happened while one damaged file was read: every repair and loss, by cause, with the place of the first."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Cause:
    """How often something happened; ``first_byte`` is where in the (decompressed) file it happened first."""

    count: int
    first_byte: int | None


@dataclass(slots=True)
class Salvage:
    """What happened while reading one file; false when nothing was repaired or lost.

    Attributes:
        causes: what was repaired or lost, in words, in order of first sight.
        elements_repaired: events or nodes kept after a repair of their text.
        elements_lost: events or nodes skipped.
        tail_lost: the file ends, or could be read no further, before its last event or node.
    """

    causes: dict[str, Cause] = field(default_factory=dict)
    elements_repaired: int = 0
    elements_lost: int = 0
    tail_lost: bool = False

    def note(self, text: str, at: int | None = None, count: int = 1) -> None:
        """Count a repair or loss; ``at`` is the byte where it happened."""
        known = self.causes.setdefault(text, Cause(0, at))
        known.count += count

    @property
    def notes(self) -> list[str]:
        return [_sentence(text, cause) for text, cause in self.causes.items()]

    def __bool__(self) -> bool:
        return bool(self.causes)


def _sentence(text: str, cause: Cause) -> str:
    times = "" if cause.count == 1 else f"{cause.count} times"
    place = "" if cause.first_byte is None else f"byte {cause.first_byte}"
    if times and place:
        return f"{text} ({times}, first at {place})"
    return f"{text} ({times or 'at ' + place})" if times or place else text
