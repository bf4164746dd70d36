"""What a run communicates: its operations by group, kind and size, with waiting, transfer and bandwidth.

Bandwidth (NCCL tests, doc/PERFORMANCE.md): S is the payload of the full result per rank, the algorithm bandwidth S over
the time of transfer, the bus bandwidth that times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and
all_to_all, and 1 for the others.
"""

import polars as pl

from chakra_capture.trace.schema import Column

SUMMARY = (
    Column("process_group", pl.String, "name of the process group; null where nothing tells"),
    Column("mesh_dim", pl.String, "dimension of the device mesh that it serves"),
    Column("collective", pl.String, "operation"),
    Column("num_ranks", pl.Int64, "ranks that take part"),
    Column("min_bytes", pl.Int64, "smallest of the class: sizes between two powers of 2 are one class", "bytes"),
    Column("max_bytes", pl.Int64, "largest of the class", "bytes"),
    Column("count", pl.Int64, "operations"),
    Column("dur_ns", pl.Float64, "median over operations and ranks, waiting and transfer", "ns"),
    Column("wait_ns", pl.Float64, "median of the part until the last rank it needs had arrived; null = not measured",
           "ns"),
    Column("transfer_ns", pl.Float64, "median of the part after it; null = not measured", "ns"),
    Column("total_ns", pl.Float64, "sum over operations, mean over ranks", "ns"),
    Column("algorithm_bytes_per_s", pl.Float64, "median algorithm bandwidth; null = not measured",
           "bytes/s"),
    Column("bus_bytes_per_s", pl.Float64, "median bus bandwidth; null = not measured",
           "bytes/s"),
)  # fmt: skip

SCHEMA = (
    *SUMMARY,
    Column("overlap", pl.Float64, "part of the time of its kernels in which something computes; null: none ran as a "
           "kernel (gloo)"),
    Column("exposed_ns", pl.Float64, "time of its kernels in which nothing computes, sum over operations, mean over "
           "ranks; that of two kernels at once counts to both; null like overlap", "ns"),
)  # fmt: skip

_BOTH_WAYS, _ONE_WAY = ("all_reduce",), ("all_gather", "reduce_scatter", "all_to_all")


def communication_summary(collectives: pl.DataFrame) -> pl.DataFrame:
    """The same without what only kernels show, for an overview.

    Args:
        collectives: the table of the run, or the rows of some ranks.

    Returns:
        a table of ``SUMMARY``; empty where nothing was communicated.
    """
    nothing = (pl.lit(None, dtype=pl.Int64).alias(name) for name in ("kernel_ns", "exposed_ns"))
    return _classes(collectives.with_columns(nothing)).select(column.name for column in SUMMARY)


def communication_statistics(collectives: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Sum up the operations of a run, the class that takes most time first.

    Args:
        collectives: the table of the run, or the rows of some ranks.
        kernels: of these ranks, as ``exposed_of_kernels`` gives them.

    Returns:
        a table of ``SCHEMA``; empty where nothing was communicated.
    """
    return _classes(collectives.join(kernels, on=["rank", "node_id"], how="left", maintain_order="left"))


def _classes(collectives: pl.DataFrame) -> pl.DataFrame:
    keys = ["process_group", "mesh_dim", "collective", "num_ranks", "size_class"]
    # log2 of 0 is no class; barrier and what sends nothing make one of their own.
    size_class = pl.when(pl.col("comm_bytes") > 0).then(pl.col("comm_bytes").log(2).floor()).cast(pl.Int64)
    rows = collectives.with_columns(
        size_class=size_class,
        dur_ns=pl.col("end_ns") - pl.col("arrival_ns"),
        algorithm=_payload() / pl.when(pl.col("transfer_ns") > 0).then("transfer_ns") * 1e9,
    ).with_columns(bus=pl.col("algorithm") * _bus_factor())
    table = rows.group_by(keys, maintain_order=True).agg(
        min_bytes=pl.col("comm_bytes").min(),
        max_bytes=pl.col("comm_bytes").max(),
        count=pl.col("collective_id").n_unique(),
        dur_ns=pl.col("dur_ns").median(),
        wait_ns=pl.col("wait_ns").median(),
        transfer_ns=pl.col("transfer_ns").median(),
        total_ns=pl.when(pl.col("dur_ns").count() > 0).then(pl.col("dur_ns").sum() / pl.col("rank").n_unique()),
        algorithm_bytes_per_s=pl.col("algorithm").median(),
        bus_bytes_per_s=pl.col("bus").median(),
        overlap=1 - pl.col("exposed_ns").sum() / pl.when(pl.col("kernel_ns").sum() > 0).then(pl.col("kernel_ns").sum()),
        exposed_ns=pl.when(pl.col("exposed_ns").count() > 0).then(
            pl.col("exposed_ns").sum() / pl.col("rank").n_unique()
        ),
    )
    order = ["total_ns", "process_group", "collective", "min_bytes"]
    table = table.sort(order, descending=[True, False, False, False], nulls_last=True)
    return table.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)


def bus_bytes() -> pl.Expr:
    """What counts over the bus for bandwidth, as in NCCL's tests; null where the size is not known."""
    return _payload() * _bus_factor()


def _payload() -> pl.Expr:
    """S in bytes; null where the size or, for all_gather, the number of ranks is not known."""
    num_bytes = pl.col("comm_bytes")
    whole = pl.when(pl.col("collective") == "all_gather").then(num_bytes * pl.col("num_ranks")).otherwise(num_bytes)
    return pl.when(num_bytes > 0).then(whole)


def _bus_factor() -> pl.Expr:
    n, kind = pl.col("num_ranks"), pl.col("collective")
    share = (n - 1) / n
    return pl.when(kind.is_in(_BOTH_WAYS)).then(2 * share).when(kind.is_in(_ONE_WAY)).then(share).otherwise(1.0)
