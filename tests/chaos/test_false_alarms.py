"""Whoever stands still for less than the limits is healthy: nobody is ever replaced for it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.job import Job
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

STALL_S = 8
STOP_S_MAX = 3.0
ROUNDS = 34
AT_ONCE = 3
ARGS = ["--epochs", "40", "--steps-per-epoch", "12", "--slow", "yes"]


def everybody(job: Job) -> list[psutil.Process]:
    """Ranks, their agents, the parked spare, and the launcher with its orchestrator."""
    launcher = psutil.Process(job.process.pid)
    children = launcher.children(recursive=True)
    return [launcher, *(p for p in children if p.status() != psutil.STATUS_ZOMBIE)]


@pytest.mark.cost(110)
def test_a_hundred_short_stalls_cost_nobody_the_seat(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    chance = random.Random(7)
    job = start(
        "--nproc-per-node", "2", "--local-nodes", "2", "--spare-nodes", "1",
        "--stall-timeout", str(STALL_S), script_args=ARGS, world=4,
    )  # fmt: skip
    job.until_step(5)
    job.spare_parked()
    before = [rank.pid for rank in job.status().ranks]
    stalls = 0
    for _ in range(ROUNDS):
        chosen = chance.sample(everybody(job), AT_ONCE)
        woken = time.monotonic() + chance.uniform(0.2, STOP_S_MAX)
        for process in chosen:
            process.send_signal(signal.SIGSTOP)
            stalls += 1
        try:
            while time.monotonic() < woken:
                time.sleep(0.01)
        finally:
            for process in chosen:
                process.send_signal(signal.SIGCONT)
        step = job.step()
        job.until(lambda s, step=step: s.committed_step > step, "a step in between")
    assert stalls >= 100
    assert [rank.pid for rank in job.status().ranks] == before
    job.finish()
    verdict.identical(job, reference(4, *ARGS), faults=stalls, incidents=0)
