"""Times as text to int64 nanoseconds, without passing through floating point.

Traces write microseconds: whole (torch <= 2.2), with three decimals relative to ``baseTimeNanoseconds``
(torch >= 2.4), or with decimals on the Unix epoch, where a float64 would lose 128-256 ns.
"""

import re
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal

import msgspec
import numpy as np
import polars as pl

from chakra_capture.trace.columns import LARGEST, MISSING, Int64

_PLAIN = r"^(-?)(\d{1,15}|[0-8]\d{15})(?:\.(\d{1,3}))?$"
# What Kineto writes, one a line: since torch 2.4 with three decimals, which re-dumped files have without their zeros.
_LINES = re.compile(rb"(?:[0-9]{1,15}(?:\.[0-9]{1,3})?\n)*+")
_NUMBER = re.compile(r'"?\s*(-?\d{1,40}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?)\s*"?', re.ASCII)
# Exact for every text that _NUMBER accepts: nothing is rounded before the one rounding to whole nanoseconds.
_EXACT = Context(prec=1500, rounding=ROUND_HALF_EVEN, Emax=99999, Emin=-99999, traps=[])


def microseconds_to_ns(texts: Sequence[str]) -> Int64:
    """Convert decimal texts in microseconds to nanoseconds, rounding half to even below 1 ns.

    Args:
        texts: one number per row, as it stands in the file; quotes around it are accepted.

    Returns:
        int64 nanoseconds, ``MISSING`` where the text is no finite number in range.
    """
    if not len(texts):
        return np.zeros(0, dtype=np.int64)
    text = pl.Series(texts, dtype=pl.String)
    frame = pl.DataFrame({"g": text.str.extract_groups(_PLAIN)}).unnest("g")
    whole = frame["2"].cast(pl.Int64, strict=False)
    part = frame["3"].fill_null("").str.pad_end(3, "0").cast(pl.Int64, strict=False)
    sign = pl.select(pl.when(frame["1"] == "-").then(-1).otherwise(1)).to_series()
    ns = (sign * (whole * 1000 + part)).fill_null(MISSING).to_numpy().copy()
    ns[np.abs(ns) > LARGEST] = MISSING
    for row in np.flatnonzero(ns == MISSING):
        if texts[int(row)]:
            ns[row] = _one_to_ns(texts[int(row)])
    return np.asarray(ns, dtype=np.int64)


def parse_times(texts: Sequence[bytes | msgspec.Raw]) -> Int64:
    """``microseconds_to_ns`` of bytes as they stand in a file, faster where Kineto wrote them."""
    lines = b"\n".join([*texts, b""])
    if not texts or not _LINES.fullmatch(lines):
        return microseconds_to_ns([str(bytes(text), "utf-8", "replace") for text in texts])
    chars = np.frombuffer(lines, dtype=np.uint8)
    ends, points = np.flatnonzero(chars == ord("\n")), np.flatnonzero(chars == ord("."))
    decimals = np.zeros(len(ends), dtype=np.int64)
    rows = np.searchsorted(ends, points)
    decimals[rows] = ends[rows] - points - 1
    digits = np.fromstring(lines.replace(b".", b""), dtype=np.int64, sep="\n")
    return np.asarray(digits * np.array([1000, 100, 10, 1])[decimals], dtype=np.int64)


def _one_to_ns(text: str) -> int:
    match = _NUMBER.fullmatch(text)
    if not match:
        return MISSING
    value = Decimal(match[1]).scaleb(3, _EXACT)
    if abs(value) > LARGEST:
        return MISSING
    return int(value.to_integral_value(context=_EXACT))


def to_epoch(ts_ns: Int64, base_ns: int) -> Int64:
    """Add the file's base time; times that are on the Unix epoch already stay as they are.

    Kineto's base time is at most a few months before the recording, so times beyond half of it are absolute.
    One absurd time among them does not decide.
    """
    known = ts_ns != MISSING
    if not 0 < base_ns <= LARGEST or not known.any() or int(np.median(ts_ns[known])) > base_ns // 2:
        return ts_ns
    shifted = np.where(known & (ts_ns <= LARGEST - base_ns), ts_ns + base_ns, MISSING)
    return np.asarray(shifted, dtype=np.int64)
