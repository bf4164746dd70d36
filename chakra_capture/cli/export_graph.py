"""``chakra-capture export graph``: the dependencies of some rows, to draw or to ask."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chakra_capture.cli.output import (
    EXIT_OK,
    UsageError,
    count_of,
    not_negative,
    print_json,
    print_line,
    status,
)
from chakra_capture.cli.selection import chosen_ranks, chosen_steps, parse_ranges
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.export.graph import Graph

_MOST_NODES = 5000


def export_graph(
    path: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    steps: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    ranks: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    nodes: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    format: Literal["graphml", "dot"] = "graphml",
    max_nodes: Annotated[int, Parameter(validator=not_negative)] = _MOST_NODES,
    anonymize: Annotated[bool, Parameter(negative=())] = False,
    job: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write the dependencies of some rows as GraphML or DOT.

    For Gephi, yEd or networkx (GraphML), or Graphviz (DOT). A node is a row of
    the table nodes: name, kind, process and thread, device and stream, step,
    start and duration in ns. An edge is a row of the table edges between two of
    them: why the one waits for the other, which side of it for which, and the
    lag between the two times in ns (the offset of the device clock removed).
    One file per rank: rank-<R>.graphml or .dot. What waits for other ranks is in
    collectives.parquet.

    --steps takes the rows that chakra-capture slice keeps of these steps. For
    one op and what it launches, slice it out with --node, and export the slice.

    Examples:
        chakra-capture export graph ./traces --steps 5 --ranks 0 -o graph
        chakra-capture export graph ./traces/0_merged/rank=0 --nodes 4700-4800
            --format dot -o graph
        chakra-capture slice ./traces --node 4711 --rank 0 -o addmm
        chakra-capture export graph addmm -o graph

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    output
        Folder for the files; it must not exist.
    steps
        Steps, such as 5, 5-6 or 1,3-5; default: all rows.
    ranks
        Ranks, such as 0 or 0,2-3; default: all.
    nodes
        node_ids of one rank, such as 100-200.
    format
        graphml or dot.
    max_nodes
        Nodes of a rank at most: larger graphs take programs that draw them hours.
    anonymize
        Write hashes for names; equal names stay equal, on all ranks.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    json
        Print JSON.
    """
    wanted = None if nodes is None else parse_ranges(nodes, "--nodes")
    from chakra_capture.export.anonymize import Anonymizer
    from chakra_capture.export.graph import Graph, GraphTooLargeError, graph_of_rank
    from chakra_capture.export.graph_files import write_dot, write_graphml
    from chakra_capture.layout import graph_file_name, rank_folder_name
    from chakra_capture.merge.folder import new_folder
    from chakra_capture.trace.sql import open_tables

    tables = open_tables(path, job)
    chosen = chosen_ranks(tables, path, ranks)
    if wanted is not None and len(chosen) > 1:
        raise UsageError("--nodes are of one rank. Name it with --ranks.")
    numbers = None if steps is None else tuple(chosen_steps(tables, path, chosen, steps))
    write = write_dot if format == "dot" else write_graphml
    made: dict[int, Graph] = {}
    hider = Anonymizer() if anonymize else None
    with status("reading") as watch, new_folder(output) as folder:
        for rank in chosen:
            watch(f"rank {rank}, {len(made) + 1} of {len(chosen)}")
            of = tables.folder / rank_folder_name(rank)
            try:
                graph = graph_of_rank(of, steps=numbers, nodes=wanted, max_nodes=max_nodes)
            except GraphTooLargeError as error:
                raise TraceFileError(
                    f"{error}, which nothing draws well. Name fewer with --steps, --ranks or --nodes, slice one op out "
                    "first (chakra-capture slice --node), or allow more with --max-nodes."
                ) from error
            if graph.nodes.is_empty() and wanted is not None:
                raise TraceFileError(f"{of} has no row with such a node_id. Rows are numbered from 0 on.")
            if hider is not None:
                graph = Graph(hider.nodes(graph.nodes), graph.edges)
            write(graph, folder / graph_file_name(rank, format))
            made[rank] = graph
    if json:
        print_json(_as_json(output, format, made))
    else:
        for rank, graph in made.items():
            file = output / graph_file_name(rank, format)
            print_line(f"{file}: {count_of(graph.nodes.height, 'node')}, {count_of(graph.edges.height, 'edge')}")
    return EXIT_OK


def _as_json(output: Path, format: str, made: "dict[int, Graph]") -> dict[str, object]:
    from chakra_capture.layout import graph_file_name

    files = [
        {
            "rank": rank,
            "file": str(output / graph_file_name(rank, format)),
            "num_nodes": graph.nodes.height,
            "num_edges": graph.edges.height,
        }
        for rank, graph in made.items()
    ]
    return {"schema_version": 1, "format": format, "files": files}
