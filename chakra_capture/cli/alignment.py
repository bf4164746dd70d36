"""What the communication of a run says of its ranks, as lines of a screen."""

from typing import TYPE_CHECKING

from chakra_capture.cli.output import count_of, duration, number_ranges, print_line

if TYPE_CHECKING:
    from chakra_capture.merge.across.outcome import Alignment

_MOST_LINES = 5


def print_alignment(alignment: "Alignment | None") -> None:
    """Print how the ranks of a run go together."""
    if alignment is None:
        print_line("collectives: matched by the call that finds all ranks merged, or by chakra-capture merge PATH")
        return
    if not alignment.num_operations:
        print_line("collectives: none recorded")
        return
    print_line(f"collectives: {alignment.num_matched} of {alignment.num_operations} found on all of their ranks")
    print_line(f"clocks: {_clocks(alignment)}")
    for line in _faults(alignment):
        print_line(f"  note: {line}")


def _clocks(alignment: "Alignment") -> str:
    others = [clock for clock in alignment.clocks.values() if clock.rank != clock.reference and clock.comparable]
    references = sorted({clock.reference for clock in others})
    if not others:
        return "not compared"
    farthest = max(others, key=lambda clock: abs(clock.offset_ns or 0))
    against = f"rank {references[0]}" if len(references) == 1 else f"ranks {number_ranges(references)}"
    text = f"{count_of(len(others), 'rank')} compared with {against}"
    if not farthest.offset_ns:
        return f"{text}, all the same"
    return f"{text}, farthest rank {farthest.rank} by {duration(farthest.offset_ns)}"


def _faults(alignment: "Alignment") -> list[str]:
    mismatches = [group["first_mismatch"] for group in alignment.groups if group["first_mismatch"]]
    apart = [f"rank {clock.rank}: {clock.reason}" for clock in alignment.clocks.values() if clock.reason]
    unreadable = [f"rank {rank}: {why}" for rank, why in alignment.unreadable.items()]
    found = [*mismatches, *apart, *unreadable, *alignment.notes]
    more = [f"... and {len(found) - _MOST_LINES} more in alignment.json"] if len(found) > _MOST_LINES else []
    return [*found[:_MOST_LINES], *more]
