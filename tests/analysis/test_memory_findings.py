"""What is said of memory, on both sides of each limit."""

from typing import Any

import pytest

from analysis.series import found, of_kind, plain

GIB = 1 << 30


def with_memory(values: list[int], capacity: int | None = None, peak: int | None = None) -> list[dict[str, Any]]:
    return [plain() | {"memory": (value, None, peak, capacity)} for value in values]


def growing(grown: float, num: int = 100, first: int = GIB) -> list[int]:
    """The bands at 15-25, 45-55 and 90-100 of 100 hold first, half way and first + grown."""
    return [first + round(grown * (0 if at < 0.4 * num else 0.5 if at < 0.8 * num else 1)) for at in range(num)]


@pytest.mark.parametrize(("used", "severity"), [(0.919, None), (0.92, "warn"), (0.969, "warn"), (0.97, "crit")])
def test_memory_near_the_capacity_of_the_device(used, severity):
    finding = of_kind(found(with_memory([0] * 50, 100_000, round(used * 100_000))), "HIGH_PRESSURE")
    assert (finding and finding.severity.name) == severity
    assert of_kind(found(with_memory([0] * 49, 100_000, 99_999)), "HIGH_PRESSURE") is None


@pytest.mark.parametrize(
    ("skew", "used", "severity"),
    [(0.19, 0.9, None), (0.2, 0.3, "warn"), (0.2, 0.295, None), (0.3, 0.49, "warn"), (0.29, 0.5, "warn"),
     (0.3, 0.5, "crit")],
)  # fmt: skip
def test_memory_apart_between_ranks_counts_where_it_is_short(skew, used, severity):
    peaks = [1000, 1000, round(1000 * (1 + skew))]
    capacity = round(peaks[2] / used)
    finding = of_kind(found(*[with_memory([0] * 50, capacity, peak) for peak in peaks]), "IMBALANCE")
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert finding.ranks == (2,)


@pytest.mark.parametrize(
    ("grown", "expected"), [(0, None), (2, "CREEP_EARLY"), (GIB - 2, "CREEP_EARLY"), (GIB, "CREEP_CONFIRMED")]
)
def test_device_memory_that_grows_is_a_creep_from_1_gib(grown, expected):
    kinds = [each.kind for each in found(with_memory(growing(grown))).memory]
    assert kinds == ([] if expected is None else [expected])


def test_memory_that_comes_back_or_grows_on_one_rank_alone_is_no_creep():
    up_and_down = [GIB + (3 * GIB if 40 <= at < 60 else 0) for at in range(100)]
    assert found(with_memory(up_and_down)).memory == ()
    flat = with_memory([GIB] * 100)
    assert found(flat, flat, with_memory(growing(2 * GIB))).memory == ()


@pytest.mark.parametrize(("grown", "expected"), [(0.059, None), (0.061, "CREEP_EARLY"), (1.01, "CREEP_CONFIRMED")])
def test_process_memory_is_said_from_6_percent(grown, expected):
    steps = [plain() | {"rss": value} for value in growing(grown * GIB)]
    assert [each.kind for each in found(steps).memory] == ([] if expected is None else [expected])
    if expected:
        assert found(steps[::5]).memory == ()  # 20 steps are too few
