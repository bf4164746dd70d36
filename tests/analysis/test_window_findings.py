"""What the rules say of the handed traces: figures of the facts' tables, silence where they are healthy or thinned."""

import json

import pytest
from commands import run
from handed import DATA, load_json, require

from analysis.test_replay import traces_of
from chakra_capture.analysis.run_findings import run_findings
from chakra_capture.analysis.stragglers import find_stragglers
from chakra_capture.trace.merged import MergedRun

TWIN = "pairs/resnet50_ddp_twin"
ALEXNET, MI250, CONTROL, H100, MI300, VLLM = (
    f"device_only/{name}"
    for name in (
        "hta_alexnet_critical_path", "hta_mi250_minitoy", "hta_trace_diff_control", "h100_qwen_0_5b_chat",
        "mi300_qwen_0_5b_chat", "vllm_decode_cuda_graph",
    )
)  # fmt: skip
SAMPLED = [f"device_only/hta_sampled_two_ranks_{rank}" for rank in (0, 1)]
US, MS = 1000, 1_000_000


def found_in(folder):
    whole = MergedRun(folder)
    stragglers = None
    if whole.collectives is not None and whole.collectives["rank"].n_unique() > 1:
        stragglers = find_stragglers(whole.collectives, {})
    return run_findings(traces_of(folder), whole, stragglers=stragglers)


def kinds(findings):
    return [finding.kind for finding in findings]


@pytest.fixture(scope="module")
def twin(merged):
    return found_in(merged(TWIN))


def test_the_twin_idles_because_its_host_cannot_launch_fast_enough(twin):
    first = twin.problems[0]
    assert (first.kind, first.severity.name) == ("HOST_BOUND", "crit")
    # The steps: 222.442, 219.727 and 224.936 ms, idle 173.003, 169.998 and 166.604 of them.
    idle, whole = 173.003 + 169.998 + 166.604, 222.442 + 219.727 + 224.936
    assert first.summary.startswith(f"The device is idle {100 * idle / whole:.1f} % of a step (169.9 ms of 222.4 ms)")
    # In an op of three steps: batch_norm 74.2, unflatten 67.5, AccumulateGrad 44.1 ms.
    assert [*first.evidence["ops"]] == [
        "aten::batch_norm", "aten::unflatten_dense_tensors", "torch::autograd::AccumulateGrad",
    ]  # fmt: skip
    assert [round(3 * ns / MS, 0) for ns in first.evidence["ops"].values()] == [74, 67, 44]
    assert "aten::unflatten_dense_tensors of DDP's buffer broadcast (22.5 ms)" in first.summary
    assert "at most 165.1 ms of 222.4 ms per step (74.2 %); less what the profiler adds" in first.prize.sentence


def test_the_twin_broadcasts_buffers_as_its_own_trace_says(twin):
    (finding,) = [each for each in twin.problems if each.kind == "DDP_BUFFER_BROADCAST"]
    (file,) = require(DATA / TWIN / "device").iterdir()
    events = load_json(file)["traceEvents"]
    names = ("c10d::broadcast_", "aten::flatten_dense_tensors", "aten::unflatten_dense_tensors")
    host = sum(event["dur"] for event in events if event.get("name") in names and event["cat"] == "cpu_op")
    assert finding.evidence["host_ns"] == pytest.approx(float(host) * US / 3, abs=1)
    assert finding.evidence["part_of"] == "HOST_BOUND"
    assert 82 <= 3 * finding.evidence["idle_ns"] / MS <= 88  # idle in 82 of 88 ms, between first and last activity


def test_exposed_communication_of_the_twin_is_its_late_host(twin):
    (note,) = twin.notes
    assert (note.kind, note.prize) == ("COMMUNICATION_HOST_LATE", None)
    assert note.evidence["exposed_ns"] == pytest.approx(39.56 * MS / 3, rel=1e-3)
    assert note.evidence["late_ns"] == pytest.approx(37.57 * MS / 3, rel=1e-3)


def test_what_is_too_little_in_the_twin_is_told_only_if_asked_for(twin):
    assert "WAITS_FOR_COMMUNICATION" not in kinds([*twin.problems, *twin.minor])
    minor = {finding.kind: finding for finding in twin.minor}
    assert {"LAYOUT_CONVERSIONS", "BUCKET_COPIES", "SHORT_KERNELS"} <= {*minor}
    assert minor["LAYOUT_CONVERSIONS"].evidence["kernel_ns"] == pytest.approx(15.12 * MS / 3, rel=1e-3)
    assert minor["BUCKET_COPIES"].evidence["idle_ns"] == pytest.approx(17.1 * MS / 3, rel=1e-2)
    assert minor["SHORT_KERNELS"].evidence["call_p50_ns"] == pytest.approx(9.7 * US, rel=0.01)
    assert all(finding.severity.name == "info" for finding in twin.minor)


@pytest.mark.parametrize("name", SAMPLED)
def test_thinned_traces_get_a_line_on_their_quality_and_no_finding(merged, name):
    found = found_in(merged(name))
    assert (found.problems, kinds(found.notes)) == ((), ["CAPTURE_QUALITY"])
    # Unexplained: 391.05 of 675.2 ms on rank 0, 328.69 of 651.1 on rank 1, between first and last activity.
    shares = {SAMPLED[0]: 391.05 / 675.2, SAMPLED[1]: 328.69 / 651.1}
    assert found.notes[0].evidence["unexplained"] == pytest.approx(shares[name], abs=0.01)
    assert not found.is_told


@pytest.mark.parametrize("name", [H100, MI300])
def test_windows_that_opened_after_the_launches_are_said_to_and_nothing_else(merged, name):
    found = found_in(merged(name))
    assert (found.problems, found.minor, kinds(found.notes)) == ((), (), ["CAPTURE_QUALITY"])
    launched = {H100: 1198 / 1707, MI300: 1054 / 1517}[name]
    assert found.notes[0].evidence["linked"] == pytest.approx(launched)


@pytest.mark.parametrize(
    "name", [VLLM, ALEXNET, "device_only/mi210_gpu_only", "device_only/hta_event_sync_multi_stream"]
)
def test_nothing_is_said_of_steps_where_none_is_marked(merged, name):
    found = found_in(merged(name))
    assert (found.problems, found.minor, found.num_steps) == ((), (), 0)
    assert [note.summary for note in found.notes] == [
        "No whole step is marked in what was recorded, so nothing is said of what a step loses."
    ]


@pytest.mark.parametrize("name", [MI250, "device_only/h100_bert_small", "device_only/hta_event_sync"])
def test_start_up_of_one_or_two_steps_is_no_finding(merged, name):
    found = found_in(merged(name))
    assert (found.problems, kinds(found.notes)) == ((), ["CAPTURE_QUALITY"])
    assert "to say why takes 3 recorded steps" in found.notes[0].summary


def test_a_healthy_run_is_silent(merged):
    found = found_in(merged("device_only/hta_ns_resolution"))
    assert (found.problems, found.notes, found.minor, found.num_steps) == ((), (), (), 5)


def test_control_waits_for_its_all_to_all_and_its_drain_is_too_little(merged):
    found = found_in(merged(CONTROL))
    (finding,) = found.problems
    # Waited for 70.49 ms in six steps, 39.26 of them by forward's All2All_Pooled_Wait.
    assert finding.kind == "WAITS_FOR_COMMUNICATION"
    assert finding.evidence["waited_ns"] == pytest.approx(70.49 * MS / 6, rel=1e-3)
    assert (finding.evidence["waiting_op"], finding.phase) == ("All2All_Pooled_Wait", "forward")
    # One rank alone: how much of it is a wait for others nobody knows.
    assert finding.prize.is_predicted
    assert finding.prize.least_ns < finding.prize.most_ns < finding.evidence["waited_ns"]
    (drain,) = found.minor
    assert (drain.kind, drain.evidence["call"]) == ("QUEUE_DRAINED", "aten::to (cudaStreamSynchronize)")
    assert drain.evidence["idle_ns"] <= 6.8 * MS / 6  # all drains: 6.5 ms, more at the ends


def test_gloo_of_one_rank_is_waited_for_and_nobody_knows_for_whom(merged):
    found = found_in(merged("device_only/hta_cpu_only"))
    (finding,) = found.problems
    assert finding.kind == "WAITS_FOR_COMMUNICATION"
    assert finding.evidence["waited_ns"] == pytest.approx(0.851 * finding.prize.step_ns, rel=1e-3)
    assert (finding.severity.name, "(seen in 1 step)" in finding.summary) == ("warn", True)
    assert finding.prize.doubt == "how much of it is a wait for other ranks is not known"


def test_ranks_with_a_tenth_unlinked_are_gated_together(merged):
    found = found_in(merged("pairs/dlrm_8gpu_by_order"))
    assert (found.problems, kinds(found.notes), found.ranks) == ((), ["CAPTURE_QUALITY"], (0, 1, 2, 3))


def test_summary_and_analyze_print_the_same_list(merged):
    folder = merged(TWIN)
    of_summary = json.loads(run("summary", folder, "--json").out)["findings"]
    done = run("analyze", "findings", folder, "--json", "--all")
    rows = json.loads(done.out)["rows"]
    lists = [*of_summary["problems"], *of_summary["notes"], *of_summary["minor"]]
    assert [row["summary"] for row in rows] == [each["summary"] for each in lists]
    assert [row["place"] for row in rows if row["place"]] == [1, 2]
    shown, whole = (run("analyze", "findings", folder, *more).out for more in ((), ("--all",)))
    assert run("summary", folder).out.endswith(shown)
    assert "Layout conversions" in whole
    assert "Layout conversions" not in shown
    assert "It is part of 1." in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
