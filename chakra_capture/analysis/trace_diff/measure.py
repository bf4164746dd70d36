"""Times of two sides, told as means of a step: the difference exactly, how much of it is noise, and why it is there.

The sides may have different numbers of steps, so means of whole ns would not sum. ``exact_difference`` is the
difference of the sums over as many steps, the least common multiple of both numbers: integers, which sum to that of the
step whatever it is split by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from chakra_capture.analysis.noise import SMALLEST_CHANGE
from chakra_capture.trace.schema import Column

SLOWER, FASTER, NOISE, UNJUDGED = "slower", "faster", "within_noise", "not_judged"
CHANGES = (SLOWER, FASTER, NOISE, UNJUDGED)
# Of fewer steps the spread is not known: then nothing is called changed.
FEWEST_STEPS = 5
# A smaller part of a step is not looked at: among thousands of those some differ by chance.
_SMALLEST_PART = 0.001
_CONFIDENCE = 0.95

COLUMNS = (
    Column("difference_ns", pl.Float64, "mean of a step of B less that of A", "ns"),
    Column("share", pl.Float64, "difference as a part of the difference of the step; null where that is 0"),
    Column("change", pl.Enum(CHANGES), "slower or faster: by more than its band, 3 % (of B or A, the larger) and "
           f"0.1 % of a step; not_judged: a side has fewer than {FEWEST_STEPS} steps"),
    Column("band_ns", pl.Float64, "what the difference may be by chance, by the spread from step to step of both sides "
           "(Student's t, 95 % for all rows of the table together); null like not_judged", "ns"),
    Column("calls_ns", pl.Float64, "part of the difference because there are more calls, or fewer", "ns"),
    Column("longer_ns", pl.Float64, "the rest: calls take longer, or less long", "ns"),
    Column("first_ns", pl.Float64, "mean of a step of A", "ns"),
    Column("second_ns", pl.Float64, "mean of a step of B", "ns"),
    Column("first_count", pl.Int64, "calls in all steps of A"),
    Column("second_count", pl.Int64, "calls in all steps of B"),
    Column("first_seen", pl.Int64, "steps of A that have any"),
    Column("second_seen", pl.Int64, "steps of B that have any"),
    Column("first_total_ns", pl.Int64, "sum over the steps of A", "ns"),
    Column("second_total_ns", pl.Int64, "sum over the steps of B", "ns"),
    Column("exact_difference", pl.Int64, "difference of the sums over as many steps as both numbers of steps go into: "
           "whole ns, which sum exactly", "ns"),
)  # fmt: skip

CELLS = {"side": pl.Int64, "at": pl.Int64, "ns": pl.Int64, "count": pl.Int64}


@dataclass(frozen=True, slots=True)
class Scale:
    """What the rows of a table are measured by: the steps of both sides, and their times."""

    num_steps: tuple[int, int]
    total_ns: tuple[int, int]

    @property
    def weights(self) -> tuple[int, int]:
        """How often the sums of each side are taken."""
        common = math.lcm(*self.num_steps)
        return common // self.num_steps[0], common // self.num_steps[1]

    @property
    def exact_difference(self) -> int:
        """That of the step."""
        return self.total_ns[1] * self.weights[1] - self.total_ns[0] * self.weights[0]

    @property
    def difference_ns(self) -> float:
        """Mean step of B less that of A."""
        return self.exact_difference / math.lcm(*self.num_steps)

    @property
    def longest_ns(self) -> float:
        """The longer mean step."""
        return max(total / num for total, num in zip(self.total_ns, self.num_steps, strict=True))

    @property
    def is_judged(self) -> bool:
        """Whether the spread of both sides is known."""
        return min(self.num_steps) >= FEWEST_STEPS


def measured(cells: pl.DataFrame, keys: Sequence[str], scale: Scale) -> pl.DataFrame:
    """Compare cells of two sides.

    Args:
        cells: ``keys``, ``side`` (0 or 1), ``at`` (number of the step), ``ns`` and ``count``.

    Returns:
        ``keys`` and ``COLUMNS``, largest difference first.
    """
    sums = [_sums(cells.filter(side=side), keys, scale.num_steps[side]) for side in (0, 1)]
    table = sums[0].join(
        sums[1], on=keys, how="full", nulls_equal=True, coalesce=True, validate="1:1", suffix="_of_second"
    )
    names = {"first": "", "second": "_of_second"}
    filled = [
        pl.col(f"{name}{suffix}").fill_null(0).alias(f"{side}_{name}")
        for side, suffix in names.items()
        for name in ("count", "seen", "total_ns", "error")
    ]
    table = table.with_columns(filled)
    return _told(table, keys, scale)


def _sums(cells: pl.DataFrame, keys: Sequence[str], num_steps: int) -> pl.DataFrame:
    """Sums over the steps of one side, and the squared standard error of the mean; a step without a row has 0."""
    mean = pl.col("total_ns") / num_steps
    # In one order: the sum of squares is of floats.
    steps = cells.group_by(*keys, "at").agg(pl.col("ns").sum(), pl.col("count").sum()).sort(*keys, "at")
    sums = steps.group_by(keys).agg(pl.col("count").sum(), seen=pl.len().cast(pl.Int64), total_ns=pl.col("ns").sum())
    spread = (
        steps.join(
            sums.select(*keys, "total_ns", "seen"), on=keys, nulls_equal=True, validate="m:1", maintain_order="left"
        )
        .group_by(keys, maintain_order=True)
        .agg(((pl.col("ns") - mean) ** 2).sum() + (num_steps - pl.col("seen").first()) * mean.first() ** 2)
        .rename({"ns": "error"})
    )
    error = pl.col("error") / max(num_steps - 1, 1) / num_steps
    return sums.join(spread, on=keys, nulls_equal=True, validate="1:1").with_columns(error)


def _told(table: pl.DataFrame, keys: Sequence[str], scale: Scale) -> pl.DataFrame:
    (first_steps, second_steps), (first_weight, second_weight) = scale.num_steps, scale.weights
    whole, common = scale.exact_difference, math.lcm(*scale.num_steps)
    table = table.with_columns(
        first_ns=pl.col("first_total_ns") / first_steps,
        second_ns=pl.col("second_total_ns") / second_steps,
        exact_difference=pl.col("second_total_ns") * second_weight - pl.col("first_total_ns") * first_weight,
    ).with_columns(
        difference_ns=pl.col("exact_difference") / common,
        share=pl.col("exact_difference") / whole if whole else pl.lit(None, pl.Float64),
        larger=pl.max_horizontal("first_ns", "second_ns"),
    )
    is_looked_at = pl.col("larger") >= _SMALLEST_PART * scale.longest_ns
    num = int(table.select(is_looked_at.sum()).item())
    table = table.with_columns(is_looked_at=is_looked_at, band_ns=_band(scale, num), calls_ns=_of_calls(scale))
    is_real = (
        pl.col("is_looked_at")
        & (pl.col("difference_ns").abs() > pl.col("band_ns"))
        & (pl.col("difference_ns").abs() >= SMALLEST_CHANGE * pl.col("larger"))
    )
    change = (
        pl.when(pl.lit(not scale.is_judged))
        .then(pl.lit(UNJUDGED))
        .when(~is_real)
        .then(pl.lit(NOISE))
        .when(pl.col("difference_ns") > 0)
        .then(pl.lit(SLOWER))
        .otherwise(pl.lit(FASTER))
    )
    table = table.with_columns(change=change, longer_ns=pl.col("difference_ns") - pl.col("calls_ns"))
    return (
        table.with_columns(size=pl.col("exact_difference").abs())
        .sort("size", "first_total_ns", "second_total_ns", *keys, descending=[True, True, True, *[False] * len(keys)])
        .select(*keys, *(pl.col(column.name).cast(column.dtype) for column in COLUMNS))
    )


def _band(scale: Scale, num_tests: int) -> pl.Expr:
    if not scale.is_judged:
        return pl.lit(None, pl.Float64)
    quantile = t_quantile(min(scale.num_steps) - 1, (1 - _CONFIDENCE) / max(num_tests, 1))
    return (pl.col("first_error") + pl.col("second_error")).sqrt() * quantile


def _of_calls(scale: Scale) -> pl.Expr:
    """What more calls cost, each as long as on average on both sides; the same whichever side is the first."""
    calls = [pl.col(f"{side}_count") / num for side, num in zip(("first", "second"), scale.num_steps, strict=True)]
    each = [pl.col(f"{side}_total_ns") / pl.col(f"{side}_count") for side in ("first", "second")]
    is_none = [(pl.col(f"{side}_count") == 0) & (pl.col(f"{side}_total_ns") == 0) for side in ("first", "second")]
    is_uncounted = pl.min_horizontal("first_count", "second_count") == 0
    return (
        pl.when(is_none[0] | is_none[1])
        .then(pl.col("difference_ns"))
        .when(is_uncounted)
        .then(0.0)
        .otherwise((calls[1] - calls[0]) * (each[0] + each[1]) / 2)
    )


def t_quantile(degrees: int, tail: float) -> float:
    """What Student's t exceeds, in either direction, with this probability."""
    low, high = 0.0, 1.0
    while _t_tail(high, degrees) > tail and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, degrees) > tail else (low, middle)
    return high


def _t_tail(value: float, degrees: int) -> float:
    """Probability that |t| exceeds a value, for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(value, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 1.0 - inside
