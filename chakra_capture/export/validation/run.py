"""Validates the .et files of one export, rank by rank, then the ranks against each other."""

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_capture.export.et_files import EtPaths
from chakra_capture.export.et_graph import GraphBuilder
from chakra_capture.export.et_reader import EtFile
from chakra_capture.export.et_records import DamagedEtError
from chakra_capture.export.et_schema import NodeType
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.across import RankOperations, check_npus, check_point_to_point, check_ranks
from chakra_capture.export.validation.findings import Findings, Level, Place
from chakra_capture.export.validation.graph_checks import check_graph
from chakra_capture.export.validation.groups import Groups, check_use, check_world_size, read_groups, stated_groups
from chakra_capture.export.validation.node_checks import NodeChecks, Operation, Profile, is_on_cpu
from chakra_capture.export.validation.rank_order import collective_order, issue_order

_ANY_MAY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class FileReport:
    """What was read of one rank."""

    rank: int
    path: Path
    num_nodes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Validation:
    """What was read and found."""

    files: list[FileReport]
    num_groups: int
    findings: Findings

    @property
    def is_valid(self) -> bool:
        """No error was found; warnings may have been."""
        return self.findings.count(Level.ERROR) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How to validate.

    Attributes:
        comm_group: file of process groups; None: the one beside the traces.
        npus: dimensions of the network that will be simulated; None: not known.
        seen: told the rank and how many bytes of its file were read.
    """

    profile: Profile = Profile.ASTRA
    comm_group: Path | None = None
    npus: Sequence[int] | None = None
    seen: Callable[[int, int], None] | None = None


def validate_et(paths: EtPaths, asked: Asked | None = None) -> Validation:
    """Check all files; defects become findings, whatever is in the files.

    Raises:
        TraceFileError: a file cannot be opened.
    """
    asked = asked or Asked()
    findings = Findings()
    groups = read_groups(asked.comm_group or paths.comm_group, findings)
    _check_names(paths, findings)
    reports, ranks = [], []
    for rank, path in paths.by_rank.items():
        report, operations = _check_file(rank, path, groups, findings=findings, asked=asked)
        reports.append(report)
        if operations is not None:
            ranks.append(operations)
    if paths.is_whole:
        num_ranks = max(paths.by_rank) + 1
        check_world_size(groups, num_ranks, findings)
        check_ranks(ranks, groups, findings)
        check_point_to_point(ranks, num_ranks, findings)
        if asked.npus is not None:
            check_npus(num_ranks, asked.npus, findings)
    return Validation(reports, len(groups.members), findings)


def _check_names(paths: EtPaths, findings: Findings) -> None:
    for path in paths.odd:
        findings.add(checks.NAME, Place(detail=path.name))
    if paths.is_whole:
        expected = range(max(paths.by_rank))
        for rank in expected if len(paths.by_rank) <= len(expected) else ():
            if rank not in paths.by_rank:
                findings.add(checks.RANK_MISSING, Place(rank))


def _check_file(
    rank: int, path: Path, groups: Groups, *, findings: Findings, asked: Asked
) -> tuple[FileReport, RankOperations | None]:
    """Check one file; of a damaged one no more than its nodes, since what they refer to may be missing."""
    if not path.stat().st_mode & _ANY_MAY_WRITE:
        findings.add(checks.READ_ONLY, Place(rank, detail=path.name))
    node_checks = NodeChecks(rank, asked.profile, findings)
    builder, operations, found = GraphBuilder(), dict[int, Operation](), RankOperations(rank)
    num_nodes, is_whole, seen = 0, True, asked.seen
    try:
        with EtFile(path, (lambda size: seen(rank, size)) if seen else None) as file:
            if file.is_gzip:
                findings.add(checks.COMPRESSED, Place(rank, detail=path.name))
            if file.metadata is None:
                findings.add(checks.NO_METADATA, Place(rank, detail=path.name))
            else:
                found.steps = file.metadata.value("steps")
            for node in file.nodes():
                num_nodes += 1
                operation = node_checks.check(node)
                found.groups.update(stated_groups(node))
                builder.add(node, on_cpu=is_on_cpu(node))
                if operation is not None:
                    operations[node.node_id] = operation
    except DamagedEtError as error:
        findings.add(checks.DAMAGED, Place(rank, detail=str(error)))
        is_whole = False
    node_checks.finish()
    if is_whole:
        _check_order(builder, operations, found, groups=groups, findings=findings)
    return FileReport(rank, path, num_nodes, path.stat().st_size), found if is_whole else None


def _check_order(
    builder: GraphBuilder,
    operations: dict[int, Operation],
    found: RankOperations,
    *,
    groups: Groups,
    findings: Findings,
) -> None:
    graph = builder.build()
    walked = check_graph(graph, found.rank, findings)
    ordered = issue_order(operations, walked, graph)
    collectives = [one for one in ordered if one.type == NodeType.COMM_COLL_NODE]
    check_use(collectives, found.rank, groups, findings)
    found.point_to_point = [one for one in ordered if one.type != NodeType.COMM_COLL_NODE]
    found.issued = collective_order(graph, walked, operations, rank=found.rank, findings=findings)
