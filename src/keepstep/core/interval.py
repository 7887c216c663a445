"""How often to write a checkpoint. Pure functions of what was measured.

A checkpoint costs the time for which it holds training up, and a loss costs the steps since the
last one: half an interval on average. With a cost C and a mean time M between losses the sum is
smallest at an interval of sqrt(2 C M) (Young 1974, Daly 2006).

C is the snapshot into host memory, the slowest rank's. The writing goes on beside training and does
not count, but it takes a disk and a network that others use too: so it may fill at most a quarter
of the time.

M of a job is `NODE_MTTF_NS` divided by its nodes unless somebody knows better. 6,000 hours are what
one of the largest runs that was reported on has seen: 419 unexpected interruptions in 54 days on
2,048 nodes of eight GPUs (Llama 3), one per 6,300 hours and node. Most such losses cost Keepstep no
step and do not need a checkpoint; to count them all errs on the side of more checkpoints.
"""

from __future__ import annotations

from math import isqrt

SECOND = 1_000_000_000
HOUR = 3_600 * SECOND
NODE_MTTF_NS = 6_000 * HOUR
FIRST_NS = 60 * SECOND  # until it is known what one costs
INTERVAL_NS_MIN = 10 * SECOND
WRITES_APART = 4  # times that one takes to be written
WEIGHT_OLD = 3  # of the mean so far, against 1 for the newest measurement


def job_mttf_ns(nodes: int, given_ns: int = 0) -> int:
    return given_ns or NODE_MTTF_NS // max(1, nodes)


def interval_ns(cost_ns: int, write_ns: int, mttf_ns: int) -> int:
    best = isqrt(2 * cost_ns * mttf_ns)
    return max(best, WRITES_APART * write_ns, INTERVAL_NS_MIN)


def smoothed(mean_ns: int, measured_ns: int) -> int:
    """The first measurement stands for itself; a single slow one later does not change much."""
    if not mean_ns:
        return measured_ns
    return (WEIGHT_OLD * mean_ns + measured_ns) // (WEIGHT_OLD + 1)
