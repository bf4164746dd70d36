"""Communication kernels of real runs on GPUs, given to their host op as a plain reading of the traces gives them.

NCCL runs all_to_all, as every send and recv, in a kernel named SendRecv; the samples' kernels all have this name.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builder import merge_files
from handed import DATA, load_json, require

from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

DLRM, ALONE = DATA / "pairs" / "dlrm_8gpu_by_order", DATA / "device_only"
TO_ALL, REDUCE, GATHER = "c10d::alltoall_base_", "c10d::allreduce_", "c10d::_allgather_base_"
SAMPLE = {("all_to_all", TO_ALL): 4, ("all_reduce", REDUCE): 4, ("all_gather", GATHER): 2}
NAMES = {"nccl:all_to_all": "all_to_all", "nccl:all_reduce": "all_reduce", "nccl:_all_gather_base": "all_gather"}
Found = dict[int, tuple[str, str, int]]


def by_hand(device: Path) -> Found:
    """By correlation id of each kernel: collective, op around its launch, how long (us) after it the kernel began."""
    spans = [event for event in load_json(device)["traceEvents"] if event.get("ph") == "X"]
    asking = [e for e in spans if e["name"].startswith(("c10d::", "nccl:")) or e["name"] == "record_param_comms"]
    launches = {e["args"]["correlation"]: e for e in spans if e.get("cat") == "cuda_runtime"}
    found = {}
    for kernel in spans:
        if kernel.get("cat") == "kernel" and kernel["name"].startswith("nccl"):
            correlation = kernel["args"]["correlation"]
            launch = launches[correlation]
            around = [e for e in asking if e["tid"] == launch["tid"] and 0 <= launch["ts"] - e["ts"] <= e["dur"]]
            outermost = max(around, key=lambda e: e["dur"])
            (collective,) = {NAMES[e["name"]] for e in around if e["name"] in NAMES}
            found[correlation] = collective, outermost["name"], int(kernel["ts"] - outermost["ts"])
    return found


def by_merge(trace: MergedTrace) -> Found:
    nodes = {row["node_id"]: row for row in trace.nodes.select("node_id", "name", "correlation_id", "ts_ns").to_dicts()}
    found = {}
    for row in trace.communication.to_dicts():
        kernel, op = nodes[row["node_id"]], nodes[row["host_node_id"]]
        assert kernel["correlation_id"] not in found
        after = (kernel["ts_ns"] - op["ts_ns"]) // 1000
        found[kernel["correlation_id"]] = row["collective"], op["name"], after
    return found


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        *(
            (DLRM / "device" / f"rank-{rank}.json.gz", DLRM / "host" / f"rank-{rank}.json.gz",
             {("all_to_all", TO_ALL): 5, ("all_reduce", REDUCE): 3})
            for rank in range(4)
        ),
        (ALONE / "hta_sampled_two_ranks_0.json.gz", None, SAMPLE),
        (ALONE / "hta_sampled_two_ranks_1.json.gz", None, SAMPLE),
        (ALONE / "hta_trace_diff_control.json.gz", None,
         {("all_to_all", "record_param_comms"): 42, ("all_reduce", REDUCE): 18}),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)  # fmt: skip
def test_every_kernel_has_the_collective_and_the_op_around_its_launch(
    device: Path, host: Path | None, expected: dict[tuple[str, str], int], tmp_path: Path
) -> None:
    found = by_merge(merge_files(tmp_path, WindowFiles(host and require(host), require(device)), force=True))
    assert found == by_hand(device)
    assert Counter((collective, name) for collective, name, _ in found.values()) == expected


@pytest.mark.parametrize("rank", range(4))
def test_sizes_are_those_of_the_tensors_that_the_host_trace_records(rank: int, tmp_path: Path) -> None:
    host, device = (require(DLRM / side / f"rank-{rank}.json.gz") for side in ("host", "device"))
    table = merge_files(tmp_path, WindowFiles(host, device), rank=rank).communication.sort("issued_ns")
    nodes = sorted(load_json(host)["nodes"], key=lambda node: node["id"])
    assert table.select("in_bytes", "out_bytes").rows() == [sizes(node) for node in nodes if is_op(node)]


def is_op(node: dict[str, Any]) -> bool:
    return node["name"] in (TO_ALL, REDUCE)


def sizes(node: dict[str, Any]) -> tuple[int, int]:
    """Bytes in and out; a tensor is ``(id, storage, offset, elements, bytes of one, device)``."""
    tensors = node["inputs"][:2] if node["name"] == TO_ALL else node["inputs"][0][:1] * 2
    out, into = (tensor[3] * tensor[4] for tensor in tensors)
    return into, out
