"""What a process of somebody else's pool or cluster runs; light, so that it is there before polars is."""

import pickle

from chakra_capture.merge.many.job import Job, merge_job
from chakra_capture.merge.memory import give_back, limit_threads
from chakra_capture.merge.report import RankReport


def packed(job: Job) -> bytes:
    """A job as it travels: nobody on its way, such as a scheduler, is to unpack it."""
    return pickle.dumps(job)


def merge_packed(data: bytes) -> RankReport:
    """Merge one rank in this process."""
    limit_threads()
    report = merge_job(pickle.loads(data))
    give_back()
    return report
