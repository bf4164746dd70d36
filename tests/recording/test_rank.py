"""The rank a process takes from its launcher."""

import pytest

from chakra_capture.recording.rank import RankInfo, rank_from_environment


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankInfo(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, RankInfo(3, 8)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, RankInfo(3, 8)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_ID": "0"}, RankInfo(5, 16)),
        # An sbatch script that starts python itself is one process, whatever was allocated.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, RankInfo(0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, RankInfo(0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, RankInfo(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, RankInfo(0, 1)),
    ],
)
def test_rank_is_read_from_torchrun_then_srun(environ, expected):
    assert rank_from_environment(environ) == expected
