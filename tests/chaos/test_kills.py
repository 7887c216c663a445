"""kill -9 at every point of the protocol, on every rank, and at random times from outside."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.support.job import Job, inject
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

POINTS = [
    "before_forward",
    "in_backward",
    "before_fence",
    "in_fence",
    "in_optimizer",
    "after_step",
    "in_section",
]


@pytest.mark.cost(32)
@pytest.mark.parametrize("point", POINTS)
def test_kill_each_rank_at(
    point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    steps = [6, 15, 21] if point == "in_section" else [3, 10, 17]
    faults = [f"kill:rank={(r + 1) % 3},step={s},point={point}" for r, s in enumerate(steps)]
    job = start(
        "--nproc-per-node", "3", "--spares", "2", *inject(*faults), script_args=["--epochs", "3"]
    )
    job.finish()
    seen = verdict.identical(job, reference(3, "--epochs", "3"), faults=3, incidents=3)
    assert {v for i in seen for v in i.victims} == {0, 1, 2}


@pytest.mark.cost(22)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("point", ["before_forward", "in_backward", "in_fence", "after_step"])
def test_kill_in_the_first_steps(
    step: int, point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """DDP moves its parameters between buckets after the first backward: a trap of its own."""
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject(f"kill:rank={(step + 1) % 3},step={step},point={point}"),
    )  # fmt: skip
    job.finish()
    verdict.identical(job, reference(3), faults=1, incidents=1)


@pytest.mark.cost(22)
@pytest.mark.parametrize("point", ["in_backward", "in_optimizer", "after_step"])
def test_kill_in_the_last_step(
    point: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject(f"kill:rank=2,step=15,point={point}"),
    )  # fmt: skip
    job.finish()
    verdict.identical(job, reference(3), faults=1, incidents=1)


@pytest.mark.cost(32)
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_from_outside(
    seed: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """Three kills at moments nobody chose: the pid is taken from `status`, the signal is sent."""
    args = ["--epochs", "5", "--step-ms", "15"]
    dice = random.Random(seed)
    job = start("--nproc-per-node", "3", "--spares", "2", script_args=args)
    for number in range(3):
        job.until_step(2 + 11 * number + dice.randrange(6))
        time.sleep(dice.uniform(0, 0.06))  # the moment inside the step: the point of the test
        job.kill_rank(dice.randrange(3))
        job.until(lambda s, n=number: s.last_incident.endswith(f"-{n + 1}"), "the incident")
        job.until(lambda s: s.state != "recovering", "recovery")
    job.finish()
    verdict.identical(job, reference(3, *args), faults=3, incidents=3)


@pytest.mark.cost(30)
@pytest.mark.parametrize("loader", ["workers", "stateful"])
def test_kill_with_other_loaders(
    loader: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--epochs", "3"] + (["--workers", "2"] if loader == "workers" else ["--stateful"])
    job = start(
        "--nproc-per-node", "3", "--spares", "2",
        *inject("kill:rank=0,step=5,point=in_backward", "kill:rank=2,step=12,point=before_fence"),
        script_args=args,
    )  # fmt: skip
    job.finish()
    verdict.identical(job, reference(3, *args), faults=2, incidents=2)
