"""Times as text to int64 nanoseconds, without passing through floating point.

Traces write microseconds: whole (torch <= 2.2), with three decimals relative to ``baseTimeNanoseconds``
(torch >= 2.4), or with decimals on the Unix epoch, where a float64 would lose 128-256 ns.
"""

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

import numpy as np
import polars as pl

from chakra_capture.trace.columns import MISSING, Int64

_PLAIN = r"^(-?)(\d{1,15}|[0-8]\d{15})(?:\.(\d{1,3}))?$"
# Past the year 2100 in nanoseconds: a sum of base and time that large means the time was absolute already.
_LATEST_NS = 4_102_444_800_000_000_000


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
    for row in np.flatnonzero(ns == MISSING):
        ns[row] = _one_to_ns(texts[int(row)])
    return np.asarray(ns, dtype=np.int64)


def _one_to_ns(text: str) -> int:
    try:
        value = Decimal(text.strip().strip('"').strip()) * 1000
    except InvalidOperation:
        return MISSING
    if not value.is_finite() or abs(value) > 9_000_000_000_000_000_000:
        return MISSING
    return int(value.to_integral_value(rounding=ROUND_HALF_EVEN))


def to_epoch(ts_ns: Int64, base_ns: int) -> Int64:
    """Add the file's base time; a time that is on the Unix epoch already stays as it is."""
    known = ts_ns != MISSING
    if not base_ns or not known.any():
        return ts_ns
    if abs(base_ns) > _LATEST_NS or int(np.max(ts_ns[known])) > _LATEST_NS - base_ns:
        return ts_ns
    return np.where(known, ts_ns + base_ns, MISSING)
