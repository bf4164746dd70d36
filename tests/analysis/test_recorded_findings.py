"""Rules that need no device, on real trainings recorded for them: one with it wrong, and the same without."""

import json
import shutil
import sys
from functools import cache

import polars as pl
import pytest
import warm
from commands import run
from integrations.test_lightning_ddp import environment

from analysis.test_replay import traces_of
from chakra_capture.analysis.run_findings import run_findings
from chakra_capture.analysis.stragglers import find_stragglers
from chakra_capture.analysis.window_findings.recorded import Recorded
from chakra_capture.analysis.window_findings.rules import window_findings
from chakra_capture.trace.merged import MergedRun

MS = 1_000_000
NAP = 20 * MS
# By finding: where it must be a problem, and where it must not.
RULES = {
    "INPUT_BOUND": ("alone/input", "alone/python"),
    "BETWEEN_OPS": ("alone/python", "alone/healthy"),
    "OPTIMIZER_OPS": ("alone/optimizer", "alone/fused"),
    "DTYPE_CONVERSIONS": ("alone/dtypes", "alone/healthy"),
    "FORWARD_REPEATED": ("alone/repeated", "alone/kept"),
    "DDP_BUFFER_BROADCAST": ("pair/buffers", "pair/no buffers"),
    "BUCKET_COPIES": ("pair/buckets", "pair/views"),
    "WAITS_FOR_COMMUNICATION": ("pair/large", "pair/no buffers"),
    "SMALL_COLLECTIVES": ("pair/small", "pair/few"),
    "STRAGGLER": ("pair/straggler", "pair/turns"),
    "RANKS_TAKE_TURNS": ("pair/turns", "pair/straggler"),
    "WAITS_FOR_PEERS": ("pair/peers", "pair/straggler"),
    "SLOW_COLLECTIVES": ("pair/slowed", "pair/even"),
}

# On a busy machine it may be less than 3 % of a step; the twin shows that it is no problem then.
LITTLE = ("BUCKET_COPIES",)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Folder of a training's ranks, all recorded at once and each merged when it is asked for."""
    folder = tmp_path_factory.mktemp("findings")
    done = warm.run([sys.executable, "-m", "analysis.findings_job", str(folder)], timeout=240, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]

    @cache
    def merged(name):
        if name in ("pair/slowed", "pair/even"):
            return timed(merged("pair/large"), folder / name, fast=4 if name == "pair/slowed" else 1)
        assert run("merge", folder / name, "--workers", "1").code == 0
        return folder / name / "0_merged"

    return merged


def timed(source, folder, *, fast):
    """The same, one of four operations ``fast`` times as fast as all others: no machine's network does so on demand."""
    shutil.copytree(source, folder)
    path = folder / "collectives.parquet"
    table = pl.read_parquet(path)
    usual = int(table["transfer_ns"].median())
    times = pl.when(pl.col("collective_id") % 4 != 0).then(pl.lit(usual)).otherwise(pl.lit(usual // fast))
    times = pl.when(pl.col("transfer_ns").is_not_null()).then(times)
    table.with_columns(transfer_ns=times).write_parquet(path)
    return folder


def found_in(folder):
    whole = MergedRun(folder)
    stragglers = None
    if whole.collectives is not None and whole.collectives["rank"].n_unique() > 1:
        doubt = {rank: clock.spread_ns or 0 for rank, clock in whole.clocks.items()}
        stragglers = find_stragglers(whole.collectives, doubt)
    return run_findings(traces_of(folder), whole, stragglers=stragglers)


def problems(folder):
    return {finding.kind: finding for finding in found_in(folder).problems}


@pytest.mark.parametrize("kind", RULES)
def test_each_rule_speaks_where_it_must_and_not_where_it_must_not(recorded, kind):
    speaks, is_silent = (problems(recorded(name)) for name in RULES[kind])
    if kind in LITTLE:
        speaks, is_silent = (
            {each.kind: each for each in (*found.problems, *found.minor)}
            for found in (found_in(recorded(name)) for name in RULES[kind])
        )
    assert kind in speaks
    assert kind not in is_silent
    finding = speaks[kind]
    assert [text[-1] for text in (finding.summary, finding.action, finding.prize.sentence)] == [".", ".", "."]
    assert (0 if kind in LITTLE else 0.03) <= finding.prize.share <= 1


def test_a_healthy_training_is_silent(recorded):
    found = found_in(recorded("alone/healthy"))
    assert (found.problems, found.notes, found.is_told) == ((), (), True)
    # A step that a busy machine holds up is none that counts.
    shown = run("analyze", "findings", recorded("alone/healthy").parent)
    assert shown.out.strip() == f"No bottleneck above 3 % found (from {found.num_steps} recorded steps)"


def test_naps_are_found_as_long_as_they_are(recorded):
    finding = problems(recorded("alone/input"))["INPUT_BOUND"]
    assert finding.evidence["input_ns"] >= NAP
    assert finding.prize.is_predicted
    assert finding.prize.most_ns == pytest.approx(finding.evidence["input_ns"], rel=0.1)
    finding = problems(recorded("alone/python"))["BETWEEN_OPS"]
    assert finding.evidence["place"] == "after aten::linear, before aten::linear"
    assert finding.evidence["between_ns"] >= NAP


def test_a_slow_rank_is_named_once_with_the_place_it_is_slow_at(recorded):
    found = problems(recorded("pair/straggler"))
    finding = found["STRAGGLER"]
    assert finding.ranks == (1,)
    assert finding.evidence["delay_ns"] >= 3 * NAP
    assert "in Python between operators, the longest after aten::stack, before aten::ones" in finding.summary
    assert "BETWEEN_OPS" not in found
    assert found.keys().isdisjoint({"WAITS_FOR_PEERS", "RANKS_TAKE_TURNS"})


def test_waiting_for_peers_is_not_told_as_waiting_for_the_network(recorded):
    assert "WAITS_FOR_COMMUNICATION" not in problems(recorded("pair/peers"))
    assert "WAITS_FOR_COMMUNICATION" not in problems(recorded("pair/straggler"))


def test_few_steps_do_not_tell_that_no_rank_is_the_slow_one(recorded):
    assert "RANKS_TAKE_TURNS" not in problems(recorded("pair/peers"))
    folder = recorded("pair/turns")
    found = run_findings(traces_of(folder), MergedRun(folder), steps=range(3, 8))
    assert "RANKS_TAKE_TURNS" not in {finding.kind for finding in found.problems}


def test_two_steps_are_said_to_be_two_and_make_nothing_critical(recorded):
    folder = recorded("alone/optimizer")
    found = window_findings(Recorded(traces_of(folder), MergedRun(folder), steps=[4, 5]))
    (finding,) = [each for each in found if each.kind == "OPTIMIZER_OPS"]
    assert finding.summary.endswith("(seen in 2 steps).")
    assert (finding.severity.name, finding.prize.share > 0.2) == ("warn", True)
    assert "BETWEEN_OPS" not in {each.kind for each in found}


def test_operators_of_the_optimizer_are_counted_as_the_trace_has_them(recorded):
    folder = recorded("alone/optimizer")
    (trace,) = traces_of(folder)
    nodes = trace.nodes.filter(pl.col("step").is_not_null())
    found = found_in(folder)
    (finding,) = [each for each in found.problems if each.kind == "OPTIMIZER_OPS"]
    # Right under Optimizer.step, that is; Adam has 9 for each of 120 parameters.
    steps = nodes.filter(pl.col("name").str.starts_with("Optimizer.step#"))["node_id"]
    count = nodes.filter(pl.col("parent_id").is_in(steps.implode()) & (pl.col("kind") == "host_op")).height
    assert finding.evidence["num_ops"] == count / 10  # all steps have as many


def test_copies_to_another_dtype_are_those_of_the_trace(recorded):
    folder = recorded("alone/dtypes")
    finding = problems(folder)["DTYPE_CONVERSIONS"]
    # Four times there and back, twice, for each of four layers.
    assert finding.evidence["num_copies"] == 4 * 4 * 2
    (file,) = (folder.parent / "0_kineto").glob("rank-0.json*")
    events = json.loads(file.read_text())["traceEvents"]
    types = [event["args"].get("Input type", [])[:2] for event in events if event["name"] == "aten::copy_"]
    assert sum({*pair} == {"float", "double"} for pair in types) >= 10 * 16


def test_of_many_ranks_some_are_looked_at_and_those_that_are_slow(recorded, tmp_path):
    for rank in range(20):
        shutil.copytree(recorded("alone/healthy") / "rank=0", tmp_path / f"rank={rank:02}")
    found = run_findings(traces_of(tmp_path), MergedRun(tmp_path))
    assert found.ranks == (0, 2, 5, 7, 10, 12, 15, 17)
