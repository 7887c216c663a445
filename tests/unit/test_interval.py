"""How often a checkpoint is written."""

from __future__ import annotations

import pytest

from keepstep.core.interval import (
    FIRST_NS,
    HOUR,
    INTERVAL_NS_MIN,
    NODE_MTTF_NS,
    SECOND,
    WRITES_APART,
    interval_ns,
    job_mttf_ns,
    smoothed,
)
from keepstep.core.ranks import Tally
from keepstep.core.saves import Complete, Saves, Saving
from keepstep.model.job import JobSpec, NodeSpec


def spec(**kwargs: int) -> JobSpec:
    return JobSpec(
        job="j",
        world=16,
        local_world=8,
        nodes=[NodeSpec(name="n0", slots=8)],
        spares=0,
        stall_timeout_ns=SECOND,
        script=[],
        directory="/d",
        **kwargs,
    )


@pytest.mark.parametrize(
    ("cost_s", "write_s", "mttf_h", "interval_s"),
    [
        (1, 0, 1, 84.852),  # sqrt(2 * 1 * 3600)
        (2, 10, 24, 587.877),
        (0.001, 1, 24, 13.145),
        (0.001, 60, 24, 240),  # a slow disk: four times what one takes
        (0, 0, 24, 10),  # never more often than that
    ],
)
def test_young_and_daly(cost_s: float, write_s: float, mttf_h: float, interval_s: float) -> None:
    found = interval_ns(int(cost_s * SECOND), int(write_s * SECOND), int(mttf_h * HOUR))
    assert found / SECOND == pytest.approx(interval_s, abs=0.001)


def test_a_larger_job_fails_more_often() -> None:
    assert job_mttf_ns(1) == NODE_MTTF_NS
    assert job_mttf_ns(2048) == pytest.approx(2.93 * HOUR, rel=0.01)
    assert job_mttf_ns(2048, 5 * HOUR) == 5 * HOUR
    assert interval_ns(SECOND, 0, job_mttf_ns(100)) < interval_ns(SECOND, 0, job_mttf_ns(10))


def test_one_slow_checkpoint_does_not_change_much() -> None:
    assert smoothed(0, 70) == 70
    assert smoothed(100, 500) == 200
    assert smoothed(100, 100) == 100


def test_the_first_interval_is_a_guess_and_the_next_is_measured() -> None:
    saves = Saves(spec())
    assert saves.interval_ns == FIRST_NS and saves.mttf_ns == NODE_MTTF_NS // 2
    complete = Complete(path="/c", tick=3, version=2, at=0)
    saves.sealed(complete, SECOND, 2 * SECOND)
    assert saves.interval_ns == interval_ns(SECOND, 2 * SECOND, NODE_MTTF_NS // 2)
    assert saves.newest is complete
    slow = Saves(spec(mttf_ns=HOUR))
    slow.sealed(complete, 0, 1000 * SECOND)
    assert slow.interval_ns == WRITES_APART * 1000 * SECOND > INTERVAL_NS_MIN


def test_a_given_interval_is_kept() -> None:
    saves = Saves(spec(checkpoint_interval_ns=7 * SECOND))
    saves.now = Saving(number=1, asked_at=0, worker="w", parts=Tally(16))
    saves.sealed(Complete(path="/c", tick=3, version=2, at=0), 900 * SECOND, 900 * SECOND)
    assert saves.interval_ns == 7 * SECOND
