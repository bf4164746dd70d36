"""What cannot be shown says why, and how to get it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from builder import TraceBuilder
from commands import run as command

from report.conftest import make_page, write_phases
from report.pages import Page, read

PageOf = Callable[[str], str]
RESNET = "pairs/resnet50_ddp_twin"


def built(trace: TraceBuilder, folder: Path) -> Page:
    trace.write_device(folder / "d.json")
    assert command("merge", "--device", folder / "d.json", "-o", folder / "out").code == 0
    return read(make_page(folder / "out", folder / "report.html"))


def said(page: Page, section: str) -> str:
    return " ".join(page.sections[section].split())


def test_of_profiled_steps_alone_the_page_says_how_to_get_all(page_of: PageOf) -> None:
    text = said(read(page_of(RESNET)), "steps")
    assert (
        "Only the 3 profiled steps are known. With chakra_profile.phases=true this section covers every step and "
        "profiler overhead can be stated."
    ) in text


def test_of_one_rank_of_two_it_says_how_to_record_all(page_of: PageOf) -> None:
    page = read(page_of(RESNET))
    assert "Only rank 0 of 2 was recorded." in said(page, "ranks")
    assert "chakra_profile.ranks=null" in said(page, "ranks")
    assert "Ranks that were not recorded may have been waited for" in said(page, "communication")


def test_input_wait_that_nobody_marked_is_not_recorded(page_of: PageOf) -> None:
    page = read(page_of(RESNET))
    assert "input wait (phases were off)not recorded" in page.text
    row = next(row for row in page.tables["t-idle"] if row.texts[0] == "input wait")
    assert (row.texts[2], row.values[2]) == ("not recorded", None)


def test_a_run_on_the_cpu_misses_nothing(page_of: PageOf) -> None:
    page = read(page_of("plain_loop"))
    assert "This run recorded no GPU activity (torch without CUDA). Nothing is missing" in said(page, "gpu")
    assert "GPU activity recordednone" in page.text
    assert "This run recorded no communication. It ran as one process." in said(page, "communication")
    assert "The run has one rank." in said(page, "ranks")
    for section in ("step", "steps", "names", "path", "what-if"):
        assert any(name in page.sections[section] for name in ("ms", "µs")), section


def test_too_few_steps_name_no_straggler(page_of: PageOf) -> None:
    assert "No rank is named. One step is too few." in said(read(page_of("digits_ddp2_gloo")), "ranks")


def test_without_any_time_the_verdict_is_withheld(page_of: PageOf) -> None:
    page = read(page_of("host_only/pt2_schema_1.1.1"))
    assert "Not enough of the run was recorded for a verdict." in page.text
    assert "capture quality poor" in page.text
    assert "Nothing that was recorded has a time. A host trace holds the operators but no times." in said(page, "step")
    assert "There is no device trace." in said(page, "gpu")
    assert "No operator has a time." in said(page, "names")
    assert "There is no critical path." in said(page, "path")
    assert "0.0 ms" not in page.text


def test_a_merge_by_force_limits_the_page(page_of: PageOf) -> None:
    page = read(page_of(RESNET))
    assert "capture quality limited" in page.text
    assert "Limited: host and device trace, of different runs, merged by force" in said(page, "names")


def test_idle_time_that_nothing_explains_leads_to_no_cause(page_of: PageOf) -> None:
    page = read(page_of("device_only/hta_sampled_two_ranks_0"))
    assert "draw no conclusion from its causes" in said(page, "gpu")
    assert "because the CPU cannot issue work fast enough" not in page.text


def test_phases_alone_make_a_page(tmp_path: Path) -> None:
    page = read(make_page(write_phases(tmp_path / "run", 60, lambda _: 10.0), tmp_path / "r.html"))
    assert dict(page.legends["d-anatomy-cpu"]) == pytest.approx({"input wait": 1e6, "forward": 5e6, "backward": 4e6})
    assert "60 steps of the training" in said(page, "steps")
    assert "No window was recorded." in said(page, "gpu")
    no_window = "No window was recorded; chakra_profile.start_step and end_step choose one."
    assert no_window in said(page, "path")
    assert no_window in said(page, "what-if")
    assert "60 of 60 count" in said(page, "quality")
    assert "Training waits for its input" in said(page, "findings")
    assert "Every step waits 1.0 ms (10 %) for the next batch." in page.text


def test_a_long_run_is_drawn_in_600_buckets_at_most(tmp_path: Path) -> None:
    text = make_page(write_phases(tmp_path / "run", 5000, lambda n: 10.0 if n % 1000 else 90.0), tmp_path / "r.html")
    page = read(text)
    line = next(attrs["d"] for tag, attrs in page.tags if tag == "path" and attrs.get("class") == "line")
    assert line is not None
    assert line.count("L") + 1 == 556  # 9 steps each
    assert "Line: median of 9 steps each. Band: 8 of 10 of them. Dots: the longest." in said(page, "steps")
    assert len(text) < 120_000


def test_64_ranks_are_summed_up_in_one_line_and_one_table(tmp_path: Path) -> None:
    for rank in range(64):
        write_phases(tmp_path / "run", 50, lambda n, rank=rank: 10.0 + rank, rank=rank, size=64)
    text = make_page(tmp_path / "run", tmp_path / "r.html")
    page = read(text)
    assert len(text) < 150_000
    assert "ranks 0–63 of 64 recorded" in " ".join(page.text.split())
    assert "Line: median of 1 step of 64 ranks each." in said(page, "steps")
    assert page.column("t-all-phases", "least of ranks")[0] == pytest.approx(1e6)
    assert page.column("t-all-phases", "most of ranks")[0] == pytest.approx(7.3e6)
    assert page.column("t-ranks-phases", "step ms") == [(10 + rank) * 1e6 for rank in range(64)]
    assert page.column("t-ranks-phases", "forward")[63] == 36.5e6
    assert "No window was recorded." in said(page, "ranks")


def test_few_steps_are_rows(tmp_path: Path) -> None:
    page = read(make_page(write_phases(tmp_path / "run", 30, lambda n: 10.0 + n), tmp_path / "r.html"))
    assert page.column("t-step-rows", "ms") == [(10 + n) * 1e6 for n in range(30)]
    assert "Only" not in said(page, "findings")


def test_few_steps_make_no_statement_on_steadiness(tmp_path: Path) -> None:
    page = read(make_page(write_phases(tmp_path / "run", 12, lambda _: 10.0), tmp_path / "r.html"))
    assert "Only 12 steps: no statement on steadiness." in said(page, "findings")


def test_steps_that_differ_are_unsteady(tmp_path: Path) -> None:
    # A tenth is input in all of them, so the verdict has to come from elsewhere.
    run = write_phases(tmp_path / "run", 40, lambda n: 10.0 if n % 2 else 30.0)
    lines = (run / "0_phases" / "rank-0.jsonl").read_text().replace("input_wait", "loading")
    (run / "0_phases" / "rank-0.jsonl").write_text(lines)
    assert (
        "Steps are unsteady: 8 of 10 take 10 to 30 ms for the same work."
        in read(make_page(run, tmp_path / "r.html")).text
    )


def test_a_gpu_that_computes_all_the_time_is_compute_bound(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 1000)
    trace.launched("gemm", 0, 960, 1, at=0).launched("relu", 960, 30, 2, at=5)
    page = built(trace, tmp_path)
    assert "The GPU computes 99 % of the step; 1 kernel takes half of it." in page.text


def test_communication_that_nothing_hides_is_said(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 1000)
    trace.launched("gemm", 1, 599, 1, at=0).launched("ncclDevKernel_AllReduce_Sum", 600, 300, 2, at=5)
    assert "30 % of the step is communication that nothing hides." in built(trace, tmp_path).text


def test_a_busy_gpu_stands_out_in_nothing(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 1000)
    trace.launched("gemm", 1, 870, 1, at=0)
    assert "Nothing stands out: the GPU is busy 87 % of the step." in built(trace, tmp_path).text


def test_a_gpu_that_waits_for_the_cpu_is_said_to(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 1000).op("aten::slow", 10, 800)
    trace.launched("gemm", 2, 50, 1, at=0).launched("gemm", 710, 50, 2, at=700)
    page = built(trace, tmp_path)
    assert "because the CPU cannot issue work fast enough." in page.text


def test_a_rank_of_several_devices_has_its_idle_time_whole(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 1000)
    trace.launched("gemm", 100, 300, 1, at=0).launched("gemm", 300, 300, 2, at=5, device=1)
    page = built(trace, tmp_path)
    assert dict(page.legends["d-anatomy-gpu"]) == {"compute": 500_000, "GPU idle": 500_000}
    assert "The idle time is not split by cause. A rank has several devices" in said(page, "gpu")
