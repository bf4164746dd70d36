"""What a process of somebody else's pool or cluster runs; light, so that it is there before polars is."""

import pickle
from typing import TYPE_CHECKING

from chakra_capture.merge.memory import give_back, limit_threads

if TYPE_CHECKING:
    from chakra_capture.merge.many.job import Job
    from chakra_capture.merge.rank import RankReport


def packed(job: "Job") -> bytes:
    """A job as it travels: unpacking it imports polars, so that must not happen before ``merge_packed`` runs."""
    return pickle.dumps(job)


def merge_packed(data: bytes) -> "RankReport":
    """Merge one rank in this process."""
    limit_threads()
    job: Job = pickle.loads(data)
    from chakra_capture.merge.many.job import merge_job

    report = merge_job(job)
    give_back()
    return report
