"""Sharded and replicated training on two ranks with gloo: the same bits with us, and whole pairs."""

import sys

import warm
from recording.recorded import check_pair, manifest

from integrations.modern_ranks_job import KINDS
from integrations.test_lightning_ddp import environment, free_port


def test_two_ranks_train_to_the_same_bits_with_us_however_they_share_the_network(tmp_path):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "integrations.modern_ranks_job", str(tmp_path)]
    ranks = [warm.start(command, env=environment(RANK=rank, **place)) for rank in "01"]
    said = warm.outputs(ranks, timeout=240)

    assert [rank.returncode for rank in ranks] == [0, 0], said
    for kind in KINDS:
        for number in (0, 1):
            check_pair(tmp_path / kind, [2, 3, 4], rank=number)
            assert manifest(tmp_path / kind, number)["complete"], kind
