"""What the files and folders of a run are called; no other module spells these names."""

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TRACE_DIR = "chakra_traces"
PART_SUFFIX = ".part"
KINETO_DRAFT_SUFFIX = ".tmp"
HOST_FOLDER = "chakra"
DEVICE_FOLDER = "kineto"
PHASES_FOLDER = "phases"
RUN_FOLDER = "run"
MERGED_FOLDER = "merged"
ET_FOLDER = "et"
ET_PREFIX = "chakra"
LINKED_FOLDER = "chakra_json"
COMM_GROUP_FILE = "comm_group.json"
CLAIM_FILE = "run.json"
SUMMARY_FILE = "final_summary.json"
TRIGGER_FILE = "trigger.json"
TRIGGER_ANSWER_FILE = "trigger-answer.json"

NODES_FILE = "nodes.parquet"
EDGES_FILE = "edges.parquet"
STEPS_FILE = "steps.parquet"
COMMUNICATION_FILE = "communication.parquet"
COLLECTIVES_FILE = "collectives.parquet"
ALIGNMENT_FILE = "alignment.json"
LINK_FILE = "link.json"

RUN_FOLDER_NAME = re.compile(r"(?P<job>.+)_(?P<part>chakra|kineto|phases|run|merged)")
TRACE_NAME = re.compile(r"rank-(?P<rank>\d+)(?:\.cycle-(?P<cycle>\d+))?\.json(?P<gz>\.gz)?(?P<part>\.part)?")
PHASES_NAME = re.compile(r"rank-(?P<rank>\d+)\.jsonl(?P<part>\.part)?")
ET_NAME = re.compile(r"(?P<prefix>.+)\.(?P<rank>\d+)\.et(?P<gz>\.gz)?", re.DOTALL)
MERGED_RANK_NAME = re.compile(r"rank=(?P<rank>\d+)")


def trace_file_name(rank: int, cycle: int = 0, *, compress: bool = False) -> str:
    """Name the host or device trace of one rank; the first recorded cycle carries no number."""
    number = f".cycle-{cycle}" if cycle else ""
    return f"rank-{rank}{number}.json{'.gz' if compress else ''}"


def rank_folder_name(rank: int) -> str:
    """Name the folder that holds the merged tables of one rank."""
    return f"rank={rank}"


def et_file_name(rank: int, prefix: str = ET_PREFIX) -> str:
    """Name the Chakra trace of one rank, as simulators look for it."""
    return f"{prefix}.{rank}.et"


def graph_file_name(rank: int, suffix: str) -> str:
    """Name the file that holds the dependency graph of one rank."""
    return f"rank-{rank}.{suffix}"


def linked_file_name(rank: int, window: int | str = 0) -> str:
    """Name the linked host and device JSON of one rank; the first window carries no number, ``*`` stands for any."""
    number = f".window-{window}" if window else ""
    return f"{ET_PREFIX}.{rank}{number}.json"


def perfetto_file_name(rank: int) -> str:
    """Name the Perfetto trace of one rank."""
    return f"rank-{rank}.json.gz"


def part_path(final: Path) -> Path:
    """Path under which a file is written before it is complete."""
    return final.with_name(final.name + PART_SUFFIX)


def kineto_draft_path(part: Path) -> Path:
    """Path that Kineto writes to, beside the one it is given, and renames (torch 2.13)."""
    return part.with_name(part.name + KINETO_DRAFT_SUFFIX)


def resources_path(host_trace: Path) -> Path:
    """Folder that the observer puts beside a host trace for its extra resources."""
    return host_trace.with_name(host_trace.name.removesuffix(".json") + "_resources")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of one run: ``<trace_dir>/<job>_chakra`` and its siblings."""

    trace_dir: Path
    job: str

    def _folder(self, part: str) -> Path:
        return self.trace_dir / f"{self.job}_{part}"

    @property
    def host_dir(self) -> Path:
        return self._folder(HOST_FOLDER)

    @property
    def device_dir(self) -> Path:
        return self._folder(DEVICE_FOLDER)

    @property
    def phases_dir(self) -> Path:
        return self._folder(PHASES_FOLDER)

    @property
    def run_dir(self) -> Path:
        return self._folder(RUN_FOLDER)

    @property
    def merged_dir(self) -> Path:
        return self._folder(MERGED_FOLDER)

    def host_trace(self, rank: int, cycle: int = 0, *, compress: bool = False) -> Path:
        return self.host_dir / trace_file_name(rank, cycle, compress=compress)

    def device_trace(self, rank: int, cycle: int = 0, *, compress: bool = False) -> Path:
        return self.device_dir / trace_file_name(rank, cycle, compress=compress)

    def phases_file(self, rank: int) -> Path:
        return self.phases_dir / f"rank-{rank}.jsonl"

    def manifest(self, rank: int) -> Path:
        return self.run_dir / f"rank-{rank}.json"

    def issued_operations(self, rank: int, cycle: int = 0) -> Path:
        """What torch noted of the collectives of one cycle."""
        return self.run_dir / trace_file_name(rank, cycle).replace(".json", ".collectives.json")

    def memory_snapshot(self, rank: int) -> Path:
        return self.run_dir / f"rank-{rank}.memory.pickle"

    @property
    def claim(self) -> Path:
        """File whose exclusive creation gives the folder names to one run id."""
        return self.run_dir / CLAIM_FILE

    @property
    def summary(self) -> Path:
        return self.run_dir / SUMMARY_FILE

    @property
    def trigger_request(self) -> Path:
        """File by which somebody asks the running job for a window."""
        return self.run_dir / TRIGGER_FILE

    @property
    def trigger_answer(self) -> Path:
        return self.run_dir / TRIGGER_ANSWER_FILE

    def merged_rank(self, rank: int) -> Path:
        return self.merged_dir / rank_folder_name(rank)

    def suffixed(self, number: int) -> "RunPaths":
        """Paths of the ``number``-th further run under the same job name."""
        return RunPaths(self.trace_dir, f"{self.job}.{number}") if number else self
