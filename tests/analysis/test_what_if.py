"""What-ifs: no change is the measurement, more time never makes less, handed figures, and small cases by hand."""

import json

import numpy as np
import pytest
from builder import TraceBuilder
from commands import refused
from commands import run as command

from analysis.test_critical_path import DLRM, two_ranks
from analysis.test_replay import COMPLETE, THINNED, TWIN, traces_of
from chakra_capture.analysis.replay.calibrated import calibrate
from chakra_capture.analysis.replay.replay import replay
from chakra_capture.analysis.what_if.changes import SCALABLE, ChangeError, Changes, parse_changes, parse_scale
from chakra_capture.analysis.what_if.predict import WindowModel, models
from chakra_capture.analysis.what_if.prizes import PRESETS, prizes
from chakra_capture.merge.window import read_rows
from chakra_capture.trace.merged import MergedRun

US = 1000
NS, H100, MI300, CONTROL = (
    f"device_only/{name}"
    for name in ("hta_ns_resolution", "h100_qwen_0_5b_chat", "mi300_qwen_0_5b_chat", "hta_trace_diff_control")
)
# Matrix products and convolutions of cuBLAS, cuDNN, CUTLASS and Tensile.
GEMM = "kernel~gemm|wgrad|dgrad|winograd|cutlass|xmma|cijk"


def model(merged, name, rank=None):
    folder = merged(name)
    traces = [one for one in traces_of(folder) if rank in (None, one.rank)]
    (found,) = models(MergedRun(folder), traces)
    return found


def scaled(*scales, remove=(), overlap_comm=False):
    return parse_changes(scales, remove, overlap_comm=overlap_comm)


def window(found, changes, rank=None):
    """Fastest and slowest outcome of a rank's window, as parts of what was measured."""
    one = next(one for one in found.predict(changes) if one.span.step is None and rank in (None, one.span.rank))
    return one.fastest_ns / one.span.measured_ns, one.slowest_ns / one.span.measured_ns


# The handed ratios of the window: GEMM x 0.5, all device x 0.5, all device x 2, CPU x 0.5, no collectives.
# They are those of a prototype that knew nothing of the wait for other ranks: the outcome if none is in the transfers.
HANDED = {
    (TWIN, None): (1.000, 1.000, 1.000, 0.502, 1.000),
    (NS, None): (0.796, 0.512, 1.977, 0.994, None),
    (H100, None): (0.906, 0.818, 1.910, 0.981, None),
    (MI300, None): (0.858, 0.772, 1.890, 0.946, None),
    (CONTROL, None): (0.992, 0.887, 1.602, 0.814, 0.929),
    (DLRM, 0): (1.000, 0.890, 1.308, 0.667, 0.866),
    (DLRM, 1): (1.000, 0.782, 1.498, 0.757, 0.628),
}


@pytest.mark.parametrize(("name", "rank"), HANDED)
def test_the_handed_ratios(merged, name, rank):
    found = model(merged, name, rank)
    texts = (f"{GEMM}=0.5", "device=0.5", "device=2", "cpu=0.5", "comm=0")
    for text, handed in zip(texts, HANDED[name, rank], strict=True):
        if handed is None:
            with pytest.raises(ChangeError, match="Nothing in the trace is comm"):
                found.predict(scaled(text))
            continue
        if name != CONTROL and text.startswith("kernel") and handed == 1:
            try:
                found.predict(scaled(text))
            except ChangeError:  # DLRM's matrix products have other names; there is nothing to gain
                continue
        fastest, slowest = window(found, scaled(text))
        # Of trace_diff_control the replay's own class mode says 1.53 and 0.79, too: this engine's rules differ from the
        # prototype's on what starts which kernel of another stream there.
        tolerance = 0.07 if name == CONTROL and text in ("device=2", "cpu=0.5") else 0.005
        assert (slowest if text.endswith("=2") else fastest) == pytest.approx(handed, abs=tolerance)


def test_ranks_together_know_what_one_alone_cannot(merged):
    """The handed figures, in ms: transfers half as long, and none at all."""
    found = model(merged, DLRM)
    for text, handed in (("comm=0.5", {1: 19.63}), ("comm=0", {0: 13.93, 1: 19.37, 2: 12.66, 3: 18.79})):
        for one in found.predict(scaled(text)):
            assert one.fastest_ns == one.slowest_ns  # so it is a number
            if one.span.step is not None and one.span.rank in handed:
                assert one.fastest_ns / 1e6 == pytest.approx(handed[one.span.rank], abs=0.02)
    # Alone, rank 1's answer is between what it would be without any wait in its collectives, and nothing at all.
    fastest, slowest = window(model(merged, DLRM, 1), scaled("comm=0.5"))
    assert (round(19.95 * fastest, 1), slowest) == (15.6, 1)


@pytest.mark.parametrize("name", [TWIN, DLRM, *COMPLETE, *THINNED])
def test_a_change_by_nothing_is_the_measurement(merged, name):
    found = model(merged, name)
    for one in found.predict(scaled("cpu=1", "device=1")):
        assert one.fastest_ns == one.span.measured_ns == one.slowest_ns


@pytest.mark.parametrize("name", [TWIN, DLRM, NS, CONTROL, "device_only/vllm_decode_cuda_graph"])
def test_more_time_never_makes_less_and_no_stream_is_outrun(merged, name):
    found = model(merged, name)
    for what in ("device", "kernel", "cpu"):
        before = None
        for factor in (0, 0.25, 0.5, 0.9, 1, 1.5, 2, 8):
            # Of one step alone that does not hold: where it begins moves, too.
            outcomes = [one for one in found.predict(scaled(f"{what}={factor}")) if one.span.step is None]
            now = [time for one in outcomes for time in (one.fastest_ns, one.slowest_ns)]
            assert all(one.fastest_ns <= one.slowest_ns for one in outcomes)
            assert before is None or all(less <= more for less, more in zip(before, now, strict=True))
            before = now
    for factor in (0.25, 1, 2):
        lengths = {
            one.span.rank: one.slowest_ns for one in found.predict(scaled(f"device={factor}")) if not one.span.step
        }
        for rank, one in found.model.replay.ranks.items():
            rows = one.rows
            met = {part.row for part in found.model.replay.met if part.rank == rank}
            for stream in np.split(one.activities.rows, one.activities.firsts[1:-1]):
                busy = sum(rows.end[row] - rows.start[row] for row in stream if row not in met)
                assert lengths[rank] >= round(busy * factor) - len(stream)


def one_rank(builder, folder):
    ranks = {0: read_rows(builder.merged(folder), 0)}
    base, full = replay(ranks), replay(ranks, inputs=True)
    return WindowModel(0, base, calibrate(full))


def steps(found, changes):
    """Fastest and slowest outcome of each step, in us."""
    return [(one.fastest_ns / US, one.slowest_ns / US) for one in found.predict(changes) if one.span.step is not None]


def by_hand(tmp_path):
    """A step of 100: ops launch two kernels of 30 and 35 us, a call waits for them; then 11 us of Python."""
    builder = TraceBuilder()
    builder.step(5, 0, 100).op("aten::one", 5, 20).op("aten::two", 30, 10)
    builder.runtime("cudaLaunchKernel", 10, 5, 1).runtime("cudaLaunchKernel", 32, 5, 2)
    builder.runtime("cudaStreamSynchronize", 50, 39, 3)
    builder.kernel("first", 17, 30, 1).kernel("second", 48, 35, 2)
    return one_rank(builder, tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("kernel~second=2", 135),
        # The second starts 2 us after its launch (39), is done at 74, and the call returns 6 us later.
        ("kernel~FIRST=0", 91),
        # Both are done at once; then the call costs the 6 us that such a call takes at least.
        ("kernel=0", 67),
        # A shorter launch call alone moves both kernels by the 5 us of the first, and all that waits for them.
        ("self~cudaLaunchKernel=0", 95),
        # aten::two begins at 10 instead of 30, so its launch call returns at 17, its kernel starts at 19 and is done at
        # 54, the call returns at 60, and 11 us of Python follow.
        ("op~aten::one=0", 71),
    ],
)
def test_a_small_step_by_hand(tmp_path, change, expected):
    ((fastest, slowest),) = steps(by_hand(tmp_path), scaled(change))
    assert fastest == slowest == expected


def test_a_straggler_can_be_sped_up_or_left_out(tmp_path):
    """Rank 1 computes 40 us longer, then both wait for a transfer of 12 us; 37 us of Python follow."""
    ranks, meetings = two_ranks(tmp_path)
    base = replay(ranks, meetings)
    found = WindowModel(0, base, calibrate(replay(ranks, meetings, inputs=True)))

    assert steps(found, scaled()) == [(100, 100), (100, 100)]
    # Rank 0's kernel starts at 8, the transfer takes 12, and the call returns 3 later.
    assert steps(found, scaled("op~compute@1=0")) == [(60, 60), (60, 60)]
    # Without rank 1, rank 0's call returns when its own transfer is over.
    assert steps(found, scaled(remove=["rank1"])) == [(60, 60)]
    (own_0, _), (own_1, _) = steps(found, scaled(remove=["waiting"]))
    assert (own_0, own_1) == (60, 100)
    assert steps(found, Changes(balanced=True)) == [(80, 80), (80, 80)]
    # The network is no help: the wait for the other stays.
    # (Rank 1's call begins at 46 and takes the 6 us that such a call takes.)
    assert steps(found, scaled("comm=0")) == [(88, 88), (89, 89)]


def loader(tmp_path, kind, *fetches):
    """Steps of 100 us of compute after a fetch of so many us each."""
    builder, at = TraceBuilder(), 0
    for number, fetch in enumerate(fetches):
        builder.step(number, at, fetch + 100)
        builder.annotation(f"enumerate(DataLoader)#_{kind}DataLoaderIter.__next__", at, fetch)
        builder.op("aten::compute", at + fetch, 100)
        at += fetch + 100
    return one_rank(builder, tmp_path)


def test_an_input_made_by_the_loop_itself_is_removed_whole(tmp_path):
    assert steps(loader(tmp_path, "SingleProcess", 40, 50), scaled(remove=["input_wait"])) == [(100, 100), (100, 100)]


def test_a_batch_that_was_waited_for_is_not_ready_earlier_for_a_faster_loop(tmp_path):
    """The fetch costs 10 us, and 2000 when the batch is late; a slower loop hides that wait, a faster adds to it."""
    found = loader(tmp_path, "MultiProcessing", 10, 2000, 2000)
    slower = steps(found, scaled("cpu~compute=6"))
    assert slower[0] == (610, 610)
    assert slower[1][0] == 2000 + 100 - 500 + 500
    assert steps(found, scaled("cpu~compute=0.5"))[1] == (2100, 2100)
    # Without the wait a fetch that costs nothing is the best that can be had; one that costs 10 us is what was seen.
    assert steps(found, scaled(remove=["input_wait"])) == [(100, 110)] * 3


def test_whether_a_loader_that_never_kept_the_loop_waiting_would_keep_up_is_a_range(tmp_path):
    found = loader(tmp_path, "MultiProcessing", 10, 10, 12)
    assert steps(found, scaled("cpu~compute=0.1"))[1:] == [(20, 110), (22, 112)]
    assert steps(found, scaled("cpu~compute=2")) == [(210, 210), (210, 210), (212, 212)]


def test_what_would_help_most(merged):
    twin = prizes([model(merged, TWIN)])
    assert twin["name"][0] == "cpu_2x"
    assert twin["saved_ns"].is_sorted(descending=True)
    assert "device_2x" not in twin["name"]  # the device waits most of the time
    control = {row["name"]: row for row in prizes([model(merged, CONTROL)]).iter_rows(named=True)}
    assert control["infinite_network"]["at_most"]  # one rank does not know
    assert "perfect_balance" not in control
    together = {row["name"]: row for row in prizes([model(merged, DLRM)]).iter_rows(named=True)}
    assert not together["infinite_network"]["at_most"]
    assert together["perfect_balance"]["share"] > 0.15
    # What it calls a change can be asked for.
    asked = next(name for name in twin["name"] if name.startswith("self~"))
    assert parse_scale(asked).factor == 0.5


def test_the_command_predicts_every_step(merged):
    done = command("what-if", merged(DLRM), "--scale", "comm=0.5", "--json")
    said = json.loads(done.out)
    assert (done.code, said["schema_version"], said["name"], said["is_replayable"]) == (0, 1, "what-if", True)
    assert [column["name"] for column in said["columns"]] == [*said["rows"][0]]
    rank_1 = next(row for row in said["rows"] if row["rank"] == 1 and row["step"] == 10)
    assert rank_1["fastest_ns"] / 1e6 == pytest.approx(19.63, abs=0.02)
    assert abs(rank_1["replay_error"]) < 0.005
    text = command("what-if", merged(DLRM), "--rank", 1, "--scale", "comm=0.5")
    assert "a range, for the trace cannot tell how much of a collective is a wait" in " ".join(text.out.split())
    text = command("what-if", merged(TWIN))
    assert "What would help most" in text.out
    assert "cpu_2x" in text.out


@pytest.mark.parametrize("name", THINNED)
def test_nothing_is_predicted_from_a_trace_that_is_not_replayable(merged, name):
    for more in ([], ["--scale", "kernel=0.5"]):
        done = command("what-if", merged(name), *more, "--json")
        said = json.loads(done.out)
        assert (done.code, said["rows"], said["is_replayable"]) == (3, [], False)
        assert "is not replayable" in said["notes"][0]


def test_wrong_changes_are_one_sentence(merged, tmp_path):
    folder = merged("device_only/h100_bert_small")
    refused(command("what-if", folder, "--scale", "kernel~no_such=0.5"), "Nothing in the trace is kernel~no_such")
    refused(command("what-if", folder, "--scale", "kernel@7=0.5"), "no rank 7")
    refused(command("what-if", folder, "--remove", "input_wait"), "Nothing in the trace waits for input")
    for wrong in ("kernel", "kernel=-1", "kernel=x", "kernel=nan", "teapot=2", "op=0.5", "kernel~(=0.5"):
        done = command("what-if", folder, "--scale", wrong)
        assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
    assert command("what-if", folder, "--remove", "teapot").code == 2
    assert command("what-if", folder, "--preset", "cpu_2x", "--scale", "cpu=1").code == 2
    refused(command("what-if", tmp_path, "--scale", "cpu=1"), "holds no traces")


def test_all_that_can_be_scaled_can_be_read():
    for what in SCALABLE:
        assert parse_scale(f"{what}~a=b@3=0.25").rank == 3
    assert PRESETS.keys() >= {"no_input_wait", "no_exposed_comm", "infinite_network", "perfect_balance"}
