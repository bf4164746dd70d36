"""Are these two files of one process, rank and run? The evidence is stated, and a difference refuses."""

from dataclasses import dataclass

from chakra_capture.errors import PairingError
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace

# A true pair has every name and sequence number equal (measured on all pairs of torch 2.13); a little
# slack is left for names that were repaired while reading.
_MIN_EQUAL = 0.9


@dataclass(frozen=True, slots=True)
class OrderEvidence:
    """How well call order joins two traces without common ids.

    Attributes:
        num_compared, num_matched: host ops, and those with a counterpart.
        num_occurrences: how often the host trace's ops occur in the device trace.
        num_sequence_compared, num_sequence_equal: sequence numbers of the matched ops. None equal: the host trace
            is of another iteration than the ops it is linked to.
    """

    num_compared: int
    num_matched: int
    num_occurrences: int
    num_sequence_compared: int
    num_sequence_equal: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What host and device trace say of each other; ``order`` where they were joined by call order."""

    host_pid: int | None
    device_pids: tuple[int, ...]
    device_rank: int | None
    expected_rank: int | None
    num_host_ids: int
    num_device_ids: int
    num_ids_common: int
    num_names_equal: int
    num_sequence_common: int
    num_sequence_equal: int
    order: OrderEvidence | None = None

    def faults(self) -> list[str]:
        """Reasons why the two files do not belong together; empty for a pair."""
        found = []
        if self.host_pid is not None and self.device_pids and self.host_pid not in self.device_pids:
            pids = ", ".join(str(pid) for pid in self.device_pids[:3])
            found.append(f"different process: host trace of pid {self.host_pid}, device trace of pid {pids}")
        if None not in (self.device_rank, self.expected_rank) and self.device_rank != self.expected_rank:
            found.append(f"different rank: rank {self.expected_rank} expected, device trace of rank {self.device_rank}")
        if self.num_host_ids and self.num_device_ids and not self.num_ids_common:
            found.append("different window: no record-function id of the host trace is in the device trace")
        if self.order is not None and self.order.num_matched < _MIN_EQUAL * self.order.num_compared:
            found.append(
                "different program: no record-function ids in common, and by call order only "
                f"{self.order.num_matched} of {self.order.num_compared} host ops have a counterpart"
            )
        if self.num_ids_common and self.num_names_equal < _MIN_EQUAL * self.num_ids_common:
            found.append(
                "different program: of the record-function ids in both files only "
                f"{self.num_names_equal} of {self.num_ids_common} have the same name"
            )
        elif self.num_sequence_equal < _MIN_EQUAL * self.num_sequence_common:
            found.append(
                f"different run: {self.num_sequence_common - self.num_sequence_equal} of "
                f"{self.num_sequence_common} sequence numbers differ"
            )
        return found


def check_pair(host: HostTrace, device: DeviceTrace, evidence: Evidence, *, force: bool) -> list[str]:
    """Return the faults of a forced pair.

    Raises:
        PairingError: there are faults and ``force`` is off.
    """
    faults = evidence.faults()
    if faults and not force:
        raise PairingError(
            f"{host.path} and {device.path} are not a pair: {'; '.join(faults)}. "
            "Give the two files of one rank of one run, or merge them all the same with --force."
        )
    return faults


def check_rank(device: DeviceTrace, rank: int, *, force: bool) -> list[str]:
    """Return the fault of a forced device trace that states another rank than its name.

    Raises:
        PairingError: it does, and ``force`` is off.
    """
    if device.rank in (None, rank):
        return []
    fault = f"different rank: rank {rank} expected, device trace of rank {device.rank}"
    if not force:
        raise PairingError(
            f"{device.path} is not of this rank: {fault}. "
            "Give each rank its own file, or merge it all the same with --force."
        )
    return [fault]
