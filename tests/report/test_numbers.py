"""Numbers on the page are those of the analyses, and what should sum to a whole does."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from handed import expected_breakdown

from chakra_capture.trace.merged import MergedTrace
from report.conftest import make_page
from report.pages import Page, read

RESNET = "pairs/resnet50_ddp_twin"
PageOf = Callable[[str], str]
RunOf = Callable[[str], Path]


def steps_of(run: Path) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted(run.rglob("steps.parquet"))])


def anatomy(page: Page, name: str) -> dict[str, float]:
    return dict(page.legends[name])


@pytest.mark.parametrize("name", [RESNET, "digits_ddp2_gloo", "digits_two_cycles", "plain_loop"])
def test_phases_on_the_cpu_sum_to_the_mean_step(name: str, run_of: RunOf, page_of: PageOf) -> None:
    page = read(page_of(name))
    mean = steps_of(run_of(name))["dur_ns"].mean()
    assert sum(anatomy(page, "d-anatomy-cpu").values()) == pytest.approx(mean, abs=1)
    assert sum(page.column("t-phases", "ms")) == pytest.approx(mean, abs=1)
    assert page.total("t-phases", "ms") == pytest.approx(mean, abs=1)


def test_the_gpu_s_bar_sums_to_the_step_and_has_its_busy_and_idle_time(run_of: RunOf, page_of: PageOf) -> None:
    page, steps = read(page_of(RESNET)), steps_of(run_of(RESNET))
    parts = anatomy(page, "d-anatomy-gpu")
    idle = sum(ns for name, ns in parts.items() if name.startswith("GPU idle"))
    assert sum(parts.values()) == pytest.approx(steps["dur_ns"].mean(), abs=1)
    assert idle == pytest.approx(steps["device_idle_ns"].mean(), abs=1)
    assert page.total("t-phases", "GPU busy") == pytest.approx(steps["device_busy_ns"].mean(), abs=1)


def test_causes_of_idle_time_sum_to_it(run_of: RunOf, page_of: PageOf) -> None:
    page, steps = read(page_of(RESNET)), steps_of(run_of(RESNET))
    known = [ns for ns in page.column("t-idle", "ms") if ns is not None]
    assert len(known) >= 5
    assert sum(known) == pytest.approx(steps["device_idle_ns"].mean(), abs=1)
    assert page.total("t-idle", "ms") == pytest.approx(steps["device_idle_ns"].mean(), abs=1)


@pytest.mark.parametrize("name", [RESNET, "digits_ddp2_gloo", "plain_loop"])
def test_rows_of_the_critical_path_sum_to_a_step_to_the_nanosecond(name: str, run_of: RunOf, page_of: PageOf) -> None:
    page = read(page_of(name))
    rows = sum(value for value in page.column("t-path-names", "ms") if value is not None)
    assert rows in steps_of(run_of(name))["dur_ns"].to_list()
    assert sum(ns for _, ns in page.legends["d-path"]) == rows == page.total("t-path-names", "ms")
    assert f"It is {rows / 1e6:,.3f} ms long, equal to the step." in page.sections["path"]


def test_step_times_are_those_of_the_table(run_of: RunOf, page_of: PageOf) -> None:
    page = read(page_of("digits_ddp2_gloo"))
    assert sorted(page.column("t-profiled-steps", "ms")) == sorted(steps_of(run_of("digits_ddp2_gloo"))["dur_ns"])


def test_operators_are_those_of_the_nodes(run_of: RunOf, page_of: PageOf) -> None:
    page = read(page_of("plain_loop"))
    [nodes] = [pl.read_parquet(path) for path in run_of("plain_loop").rglob("nodes.parquet")]
    mine = nodes.filter((pl.col("name") == "aten::as_strided") & pl.col("step").is_not_null())["self_dur_ns"]
    at = [row.texts[0] for row in page.tables["t-operators"]].index("aten::as_strided")
    assert page.column("t-operators", "ms")[at] == mine.sum()
    assert page.column("t-operators", "count")[at] == len(mine)
    assert page.column("t-operators", "longest")[at] == mine.max()


def test_kernels_are_those_of_the_nodes(run_of: RunOf, page_of: PageOf) -> None:
    page = read(page_of(RESNET))
    [nodes] = [pl.read_parquet(path) for path in run_of(RESNET).rglob("nodes.parquet")]
    activities = nodes.filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    sums = activities.group_by("name").agg(pl.col("self_dur_ns").sum()).sort("self_dur_ns", descending=True)
    assert page.column("t-kernels", "ms") == sums["self_dur_ns"].head(12).to_list()
    assert page.column("t-kernels-all", "count") == pytest.approx(
        [activities.filter(pl.col("name") == name).height for name in sums["name"].head(200)], abs=0
    )


@pytest.mark.parametrize("name", ["hta_alexnet_critical_path", "vllm_decode_cuda_graph", "mi210_gpu_only"])
def test_a_window_without_steps_is_broken_down_as_independent_arithmetic_says(name: str, page_of: PageOf) -> None:
    page = read(page_of(f"device_only/{name}"))
    expected = next(value for key, value in _breakdown().items() if name in key)
    parts = anatomy(page, "d-anatomy-gpu")
    idle = sum(ns for part, ns in parts.items() if part.startswith("GPU idle"))
    assert (parts["compute"], idle) == (expected["compute_ns"], expected["idle_ns"])
    assert sum(parts.values()) == expected["span_ns"]
    assert "profiled, no step marked in it" in page.text
    assert "One step takes" not in page.text


def _breakdown() -> dict[str, dict[str, int]]:
    found = expected_breakdown()
    return found.get("files", found)  # type: ignore[no-any-return]


def test_the_step_that_a_study_measured_by_hand_is_on_the_page(page_of: PageOf) -> None:
    # Step 4 of ResNet50: 222.442 ms, of it 49.4 busy; steps 4 to 6 between 219.7 and 224.9 ms.
    page = read(page_of(RESNET))
    assert "It is 222.442 ms long" in page.sections["path"]
    assert page.column("t-profiled-steps-gpu", "GPU busy")[0] == pytest.approx(49.44e6, abs=5e3)
    assert "step, median of 3; 219.7–224.9" in page.text
    assert "14,388 of 14,388" in page.sections["quality"]
    assert "3,774 of 3,774" in page.sections["quality"]
    assert "2024-05-23 00:15 UTC" in page.text


def test_only_the_ranks_asked_for_are_shown(run_of: RunOf, tmp_path: Path) -> None:
    page = read(make_page(run_of("digits_ddp2_gloo"), tmp_path / "r.html", "--ranks", "1", "--no-replay"))
    mine = MergedTrace(1, next(run_of("digits_ddp2_gloo").rglob("rank=1"))).steps
    assert page.column("t-profiled-steps", "ms") == mine["dur_ns"].to_list()
    assert "It was left out, with --no-replay." in page.sections["path"]
    assert "It was left out, with --no-replay." in page.sections["what-if"]
