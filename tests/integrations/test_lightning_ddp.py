"""Several processes with gloo on the CPU: every rank its own pair under its global rank, one run id."""

import os
import socket
import sys
from pathlib import Path

import warm
from recording.recorded import check_pair, files, manifest, read

TESTS = Path(__file__).resolve().parents[1]
JOB = ["-m", "integrations.ddp_job"]


def environment(**changes):
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    left_out = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "SLURM_", "TORCHELASTIC")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(left_out)}, **own, **changes}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(arguments, modules=warm.TRAINING):
    """Run the process that others are started by: these are Python's own, but for children that it forks."""
    done = warm.run([sys.executable, *arguments], timeout=240, env=environment(), modules=modules)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def check_two_ranks(trace_dir, steps, job="0"):
    for rank in (0, 1):
        check_pair(trace_dir, steps, rank=rank, job=job)
        said = manifest(trace_dir, rank, job)
        assert (said["rank"], said["world_size"], said["complete"]) == (rank, 2, True)
        (group,) = said["surroundings"]["process_groups"]
        assert (group["size"], group["ranks"]) == (2, None)
        assert "gloo" in group["backend"]
    ids = {manifest(trace_dir, rank, job)["run_id"] for rank in (0, 1)}
    assert ids == {read(trace_dir / f"{job}_run/run.json")["run_id"]}
    assert files(trace_dir / f"{job}_kineto") == ["rank-0.json", "rank-1.json"]
    assert manifest(trace_dir, 0, job)["pid"] != manifest(trace_dir, 1, job)["pid"]


def test_lightning_starts_two_processes_and_a_second_run_lies_beside_the_first(tmp_path):
    run([*JOB, str(tmp_path), "5", "10", "devices=2"], warm.LIGHTNING)
    done = run([*JOB, str(tmp_path), "2", "4", "devices=2", "accumulate_grad_batches=3"], warm.LIGHTNING)

    check_two_ranks(tmp_path, [5, 6, 7, 8, 9, 10])
    check_two_ranks(tmp_path, [2, 3, 4], job="0.1")
    assert done.stderr.count("already holds another run") == 1


def test_processes_that_are_children_of_the_one_that_fits(tmp_path):
    strategies = ("ddp_fork", "ddp_spawn")
    run([*JOB, str(tmp_path), "2", "4", "devices=2", f"strategy={','.join(strategies)}"], warm.LIGHTNING)

    for strategy in strategies:
        check_two_ranks(tmp_path / strategy, [2, 3, 4])


def test_two_nodes_of_one_process_under_torchrun(tmp_path):
    port = free_port()
    nodes = []
    for node in (0, 1):
        launcher = [
            "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-nodes", "--local-addr=127.0.0.1",
        ]  # fmt: skip
        command = [sys.executable, *launcher, *JOB, str(tmp_path), "3", "5", "devices=1", "num_nodes=2"]
        nodes.append(warm.start(command, env=environment()))
    outputs = warm.outputs(nodes, timeout=240)

    assert [node.returncode for node in nodes] == [0, 0], outputs
    check_two_ranks(tmp_path, [3, 4, 5], job="two-nodes")
