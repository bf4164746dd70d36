"""The steps that all ranks have in common, as matrices of ranks and steps on one clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.step_series import PARTS, STEP, WALL, StepSeries
from chakra_capture.annotations import PHASE_NAMES

Float = npt.NDArray[np.float64]

CPU, GPU = "cpu", "gpu"
# A rank with fewer steps than this part of the most would leave hardly any in common.
_FEWEST = 0.5


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Common steps of the ranks.

    Attributes:
        ranks: those that are looked at; ``num_ranks`` have a file.
        clock: whose times these are: the device's where it has every part of every step, the CPU's of all otherwise.
        keys: ``fit`` and ``step`` of each step, in order.
        times: by part, ns by rank and step; nan is not measured.
        cpu: the same on the CPU's clock; ``device`` on the device's.
        wall: of each step and the time before it, on the CPU's clock.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    clock: str
    keys: pl.DataFrame
    cpu: dict[str, Float]
    device: dict[str, Float]
    wall: Float

    @property
    def times(self) -> dict[str, Float]:
        return self.device if self.clock == GPU else self.cpu

    @property
    def num_steps(self) -> int:
        return self.keys.height

    def mean(self, part: str) -> Float:
        """Mean of a part for each rank over the steps in which it was measured; nan without any."""
        return row_means(self.times[part])

    def share(self, part: str) -> Float:
        """Share of a part in the time of the steps in which it was measured, for each rank."""
        values, steps = self.times[part], self.times[STEP]
        known = np.isfinite(values) & np.isfinite(steps)
        total = np.where(known, steps, 0).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(total > 0, np.where(known, values, 0).sum(axis=1) / total, np.nan)

    def num_measured(self, part: str) -> int:
        """Steps in which a part was measured, on the rank where it was in most."""
        return int(np.isfinite(self.times[part]).sum(axis=1).max(initial=0))


def row_means(values: Float) -> Float:
    """Mean of each row without its nans; nan of a row of nans."""
    num = np.isfinite(values).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(num > 0, np.nansum(values, axis=1) / num, np.nan)


def step_window(series: Sequence[StepSeries]) -> StepWindow:
    """Put the ranks beside each other; one with less than half as many steps as others have is left out."""
    most = max((each.cpu.height for each in series), default=0)
    used = [each for each in series if each.cpu.height and each.cpu.height >= _FEWEST * most]
    keys = pl.DataFrame(schema={"fit": pl.Int32, "step": pl.Int64})
    for number, each in enumerate(used):
        mine = each.cpu.select("fit", "step")
        keys = mine if number == 0 else keys.join(mine, on=["fit", "step"], how="semi", maintain_order="left")
    on_cpu = [each.cpu for each in used]
    cpu, device = (_matrices(tables, keys, PARTS) for tables in (on_cpu, [each.device for each in used]))
    return StepWindow(
        ranks=tuple(each.rank for each in used),
        num_ranks=len(series),
        clock=GPU if keys.height and _is_all_known(cpu, device) else CPU,
        keys=keys,
        cpu=cpu,
        device=device,
        wall=_matrices(on_cpu, keys, (WALL,))[WALL],
    )


def _matrices(tables: list[pl.DataFrame], keys: pl.DataFrame, parts: Sequence[str]) -> dict[str, Float]:
    found = {part: np.full((len(tables), keys.height), np.nan) for part in parts}
    for at, table in enumerate(tables):
        mine = keys.join(table, on=["fit", "step"], how="left", validate="1:1", maintain_order="left")
        for part in parts:
            found[part][at] = mine[part].fill_null(float("nan")).to_numpy()
    return found


def _is_all_known(cpu: dict[str, Float], device: dict[str, Float]) -> bool:
    """Whether the device's clock has all that the CPU's has: the two are never mixed."""
    return all(bool((np.isfinite(device[part]) | ~np.isfinite(cpu[part])).all()) for part in (STEP, *PHASE_NAMES))
