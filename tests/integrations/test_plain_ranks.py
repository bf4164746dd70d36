"""A plain loop on two ranks with gloo, of which one dies."""

import signal
import subprocess
import sys

from recording.recorded import check_pair, files, manifest

from integrations.test_lightning_ddp import environment, free_port


def test_rank_that_dies_in_the_window_leaves_the_survivors_traces_whole(tmp_path):
    port = str(free_port())
    ranks = []
    for rank in "01":
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "integrations.plain_ranks_job", str(tmp_path)]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(**place))
        )
    said = [rank.communicate(timeout=240)[0].decode() for rank in ranks]

    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL], said
    assert "RuntimeError" in said[0]
    check_pair(tmp_path, [2, 3, 4, 5])
    survivor = manifest(tmp_path)
    assert (survivor["complete"], survivor["reason"], survivor["detail"]) == (False, "exception", "RuntimeError")
    assert (survivor["windows"][0]["steps"], survivor["windows"][0]["partial_step"]) == ([2, 3, 4], 5)
    # Of the dead rank only what is not finished, under a name that says so.
    assert {name for name in files(tmp_path) if "rank-1" in name and "_run" not in name} == {
        "0_chakra/rank-1.json.part",
        "0_kineto/rank-1.json.part",
    }
