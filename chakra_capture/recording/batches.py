"""How many samples a batch holds, as far as its shape says."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

_MOST_PARTS = 32


def batch_size(batch: object) -> int | None:
    """Return the samples in a batch: the first dimension that its tensors have in common; None where they differ.

    Looked at are the tensors or arrays that a batch is, or holds itself in a mapping or sequence; a sequence of
    mappings is one of samples. Tensors deeper inside may be single samples, so they say nothing.
    """
    sizes = set(_sizes(batch, is_inner=False))
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(batch: Any, *, is_inner: bool) -> Iterator[int]:
    if (shape := _shape(batch)) is not None:
        yield from shape[:1]
    elif isinstance(batch, Mapping):
        for part in islice(batch.values(), _MOST_PARTS):
            yield from (_shape(part) or ())[:1]
    elif isinstance(batch, list | tuple) and not is_inner:
        parts = batch[:_MOST_PARTS]
        if parts and all(isinstance(part, Mapping) for part in parts):
            yield len(batch)
            return
        for part in parts:
            yield from _sizes(part, is_inner=True)


def _shape(thing: Any) -> tuple[int, ...] | None:
    shape = getattr(thing, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) else None
