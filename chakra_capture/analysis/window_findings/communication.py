"""Rules on communication: what waits for it, for whom, and how fast it is."""

from dataclasses import replace

import polars as pl

from chakra_capture.analysis import idle_host
from chakra_capture.analysis.communication import bus_bytes
from chakra_capture.analysis.exposed import LATE, WAITED, exposed_of_kernels
from chakra_capture.analysis.findings import Finding, Prize, written, written_ms
from chakra_capture.analysis.what_if.changes import Changes, Scale
from chakra_capture.analysis.window_findings.recorded import Recorded
from chakra_capture.analysis.window_findings.speaking import speak
from chakra_capture.merge import intervals

_EXPOSED, _OF_EXPOSED = 0.05, 0.70
_PEERS = 0.50
_TURNS, _TURN_STEPS, _OFTEN = 0.10, 10, 0.75
_LARGE_BYTES, _FEW_CALLS, _SLOW = 1_000_000, 5, 0.5
_BEST = 0.9
_SMALL_BYTES, _MANY = 256_000, 20
# A replay that explains less of a wait does not know what it is for.
_TOLD = 0.5
_NO_TRANSFER = Changes((Scale("comm", 0.0),))
_HIDE = "Overlap it with compute: smaller or earlier buckets, prefetch, fewer synchronising calls."


def waits_for_communication(recorded: Recorded) -> Finding | None:
    """Work that was launched cannot begin, for it waits for a collective."""
    if recorded.is_cpu_only:
        return _loop_waits(recorded)
    rows = recorded.waiting.filter(pl.col("cause") == WAITED)
    total = int(rows["total_ns"].sum())
    if not total or recorded.share(total) < _EXPOSED or _peers_share(recorded) >= _PEERS:
        return None
    keys = ["collective", "phase", "waiting_op", "waiting_phase"]
    top = rows.group_by(keys).agg(pl.col("total_ns").sum()).sort("total_ns", *keys, descending=[True, *[False] * 4])
    collective, phase, op, waiting_phase, most = top.row(0)
    where = f" in {waiting_phase}" if waiting_phase else ""
    of = f" of {phase}" if phase else ""
    return speak(
        recorded,
        "WAITS_FOR_COMMUNICATION",
        f"The device waits {written_ms(recorded.per_step(total))} per step ({written(recorded.share(total))}) for "
        f"communication; most of it {op or 'work'}{where} for {collective}{of} "
        f"({written_ms(recorded.per_step(most))}).",
        _HIDE,
        recorded.prize(_NO_TRANSFER, total),
        phase=waiting_phase,
        waited_ns=recorded.per_step(total),
        waiting_op=op,
        collective=collective,
    )


def _loop_waits(recorded: Recorded) -> Finding | None:
    """Without a device: the loop's thread has nothing open while gloo works; but waiting for peers is no transfer."""
    rows = recorded.loop.filter(pl.col("cause") == idle_host.COMMUNICATION)
    total = int(rows["dur_ns"].sum())
    if not total or recorded.share(total) < _EXPOSED or _peers_share(recorded) >= _PEERS:
        return None
    phases = rows.group_by("phase").agg(pl.col("dur_ns").sum()).sort("dur_ns", "phase", descending=[True, False])
    phase = phases["phase"][0]
    where = f", most of it in {phase}" if phase else ""
    return speak(
        recorded,
        "WAITS_FOR_COMMUNICATION",
        f"The loop waits {written_ms(recorded.per_step(total))} per step ({written(recorded.share(total))}) for "
        f"communication{where}.",
        _HIDE,
        _loop_prize(recorded, total),
        phase=phase,
        waited_ns=recorded.per_step(total),
    )


def _loop_prize(recorded: Recorded, total: int) -> Prize:
    """By a replay, where it shows that the loop waits: old traces do not say what for."""
    measured, replayed = recorded.at_most(total), recorded.prize(_NO_TRANSFER, total)
    if replayed.most_ns >= _TOLD * measured.most_ns:
        return replayed
    return replace(measured, doubt="how much of it is a wait for other ranks is not known")


def host_late(recorded: Recorded) -> Finding | None:
    """Communication shows only because nothing was queued beside it: a faster network gives next to nothing."""
    exposed = int(recorded.waiting["total_ns"].sum())
    late = int(recorded.waiting.filter(pl.col("cause") == LATE)["total_ns"].sum())
    if not exposed or recorded.share(exposed) < _EXPOSED or late < _OF_EXPOSED * exposed:
        return None
    waited = recorded.per_step(exposed - late)
    return speak(
        recorded,
        "COMMUNICATION_HOST_LATE",
        f"Communication that nothing hides ({written_ms(recorded.per_step(exposed))} per step) is "
        f"{100 * late / exposed:.0f} % the host that is late: a faster network gives {written_ms(waited)} at most.",
        "Have the host launch faster first; then look at communication again.",
        None,
        exposed_ns=recorded.per_step(exposed),
        late_ns=recorded.per_step(late),
    )


def waits_for_peers(recorded: Recorded) -> Finding | None:
    """Most of the time in collectives is waiting for the other ranks; where none is named, and it is not turn about."""
    if (recorded.stragglers is not None and recorded.stragglers.ranks) or takes_turns(recorded) is not None:
        return None
    share, waited = _peers_share(recorded), _peers_ns(recorded)
    if share < _PEERS:
        return None
    return speak(
        recorded,
        "WAITS_FOR_PEERS",
        f"{written(share)} of the time in collectives is waiting for other ranks, not transfer "
        f"({written_ms(recorded.per_step(waited))} per step).",
        "Have the ranks arrive together: the same work for each; chakra-capture analyze stragglers says who is late.",
        recorded.at_most(waited),
        waiting_ns=recorded.per_step(waited),
        of_collectives=share,
    )


def takes_turns(recorded: Recorded) -> Finding | None:
    """Ranks wait for each other, and none is the slow one."""
    found = recorded.stragglers
    if found is None or found.ranks or not found.has_steps or found.num_steps < _TURN_STEPS or not found.step_ns:
        return None
    # One that is late so often may be slow, though chance would explain it, too.
    if (found.table["num_latest"] >= _OFTEN * found.table["num_steps"]).any():
        return None
    waited = _peers_ns(recorded)
    if recorded.share(waited) < _TURNS:
        return None
    waiting = recorded.per_step(waited)
    return speak(
        recorded,
        "RANKS_TAKE_TURNS",
        f"Ranks wait for each other in turn, {written_ms(waiting)} per step, and none of them is the slow one.",
        "Look for what varies from step to step: lengths of samples, logging, CPU cores shared or not pinned.",
        recorded.prize(Changes(balanced=True), waited),
        waiting_ns=waiting,
        reason=found.reason,
    )


def straggler(recorded: Recorded) -> Finding | None:
    """The others wait for a rank, which is named with the phase it is slow in."""
    found = recorded.stragglers
    if found is None or not found.ranks or not found.step_ns:
        return None
    rank = found.ranks[0]
    delay = float(found.table.filter(pl.col("rank") == rank)["delay_ns"][0])
    others = found.table.filter(pl.col("rank") != rank)["waiting_ns"].fill_nan(None).drop_nulls().to_list()
    waiting = sum(others) / len(others) if others else 0.0
    late = found.late_in.get(rank)
    where = "" if late is None or late.phase is None else f" in {late.phase}"
    # What it gains is no more than what it is late by, nor than what the others wait.
    gain = max(0.0, min(delay, waiting)) * recorded.units.height
    return speak(
        recorded,
        "STRAGGLER",
        f"Rank {rank} comes {written_ms(delay)} per step after the others to what all take part in"
        f"{where and f': it is slow{where}'}; they wait {written_ms(waiting)} for it.",
        f"Look at what rank {rank} does before it: chakra-capture summary PATH --rank {rank}.",
        recorded.prize(Changes(gone=frozenset({rank})), gain),
        phase=None if late is None else late.phase,
        ranks=(rank,),
        delay_ns=delay,
        waiting_ns=waiting,
        late_in=None if late is None else late.as_json(),
    )


def slow_collectives(recorded: Recorded) -> Finding | None:
    """Of equal collectives most are much slower than the best of them: never against a data sheet."""
    table = recorded.collectives
    if table is None:
        return None
    op = table.group_by("collective_id").agg(
        pl.col("process_group", "collective", "comm_bytes", "num_ranks").first(), pl.col("transfer_ns").median()
    )
    op = op.filter((pl.col("comm_bytes") >= _LARGE_BYTES) & (pl.col("transfer_ns") > 0))
    op = op.with_columns(
        size_class=pl.col("comm_bytes").log(2).floor(), speed=bus_bytes() / pl.col("transfer_ns") * 1e9
    )
    keys = ["process_group", "collective", "num_ranks", "size_class"]
    best = pl.col("speed").quantile(_BEST)
    classes = op.group_by(keys).agg(
        pl.len().alias("count"),
        pl.col("speed").median().alias("usual"),
        best.alias("best"),
        pl.col("comm_bytes").max(),
        over=(pl.col("transfer_ns") * (1 - pl.col("speed") / best)).clip(lower_bound=0).sum(),
    )
    slow = classes.filter((pl.col("count") >= _FEW_CALLS) & (pl.col("usual") < _SLOW * pl.col("best")))
    if slow.is_empty():
        return None
    row = slow.sort("over", descending=True).row(0, named=True)
    # Each operation is one of all ranks: its time is one of each rank's steps.
    over = row["over"] * len(recorded.traces)
    return speak(
        recorded,
        "SLOW_COLLECTIVES",
        f"{row['collective']} of {row['comm_bytes'] / 1e6:.1f} MB reaches {row['usual'] / 1e9:.2f} GB/s as a rule, "
        f"others of this size {row['best'] / 1e9:.2f} GB/s.",
        "Look at what shares the network or the bus with them, and at the topology of the group.",
        recorded.at_most(over),
        count=row["count"],
        usual_bytes_per_s=row["usual"],
        best_bytes_per_s=row["best"],
    )


def small_collectives(recorded: Recorded) -> Finding | None:
    """Many collectives of little data: each costs its latency."""
    table = recorded.collectives
    if table is None:
        return None
    small = table.filter(pl.col("comm_bytes") < _SMALL_BYTES)
    count = recorded.per_step(small.height)
    if count < _MANY:
        return None
    kernels = pl.concat([exposed_of_kernels(trace) for trace in recorded.traces]).drop("kernel_ns")
    small = small.join(kernels, on=["rank", "node_id"], how="left")
    # Of a kernel the part that nothing hides; without one, what is not waiting for others.
    own = pl.col("end_ns") - pl.col("arrival_ns") - pl.col("wait_ns").fill_null(0)
    total = int(small.select(pl.coalesce("exposed_ns", own).clip(lower_bound=0).sum()).item() or 0)
    saved = total * (1 - 1 / count)
    return speak(
        recorded,
        "SMALL_COLLECTIVES",
        f"{count:.0f} collectives of less than {_SMALL_BYTES // 1000} kB per step cost "
        f"{written_ms(recorded.per_step(total))}.",
        "Send them together: larger buckets, coalesced or fused calls, metrics reduced once.",
        recorded.at_most(saved),
        num_per_step=count,
        total_ns=recorded.per_step(total),
    )


def _peers_ns(recorded: Recorded) -> int:
    """Time in which ranks wait for others, that of several operations at once counted once."""
    table = recorded.collectives
    if table is None:
        return 0
    total = 0
    for mine in table.filter(pl.col("wait_ns") > 0).partition_by("rank"):
        begin = mine["arrival_ns"].to_numpy()
        total += intervals.total(begin, begin + mine["wait_ns"].to_numpy())
    return total


def _peers_share(recorded: Recorded) -> float:
    """Waiting for other ranks, of the time in collectives for which it is known."""
    table = recorded.collectives
    if table is None:
        return 0.0
    known = table.filter(pl.col("wait_ns").is_not_null())
    total = int(known["wait_ns"].sum()) + int(known["transfer_ns"].sum())
    return int(known["wait_ns"].sum()) / total if total else 0.0
