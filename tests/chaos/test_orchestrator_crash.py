"""The orchestrator dies at every append of a migration, before and after it is durable.

Real agents, real training. It is started again, replays its ledger, and finishes or gives up the
migration; the result is bit-identical either way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.brain import Brain
from tests.support.job import Job, wait_for
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

ARGS = ["--epochs", "80", "--steps-per-epoch", "12", "--slow", "yes"]
APPENDS_MAX = 30
DOWN_S = 30.0


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[Brain]:
    made = Brain(tmp_path)
    yield made
    made.end()


def begin(start: Start, brain: Brain) -> Job:
    options = ("--nproc-per-node", "3", "--spares", "1", "--orchestrator", "brain")
    return start(*options, script_args=ARGS, home=brain.home)


def calm(job: Job) -> None:
    job.spare_parked()
    job.until(lambda s: s.state == "running", "training")
    step = job.step()
    job.until_step(step + 2)


def generation(job: Job) -> int:
    return job.status().generation


def hit(job: Job, kind: str, rank: int) -> None:
    if kind == "planned":
        assert job.post("migrate", {"ranks": [rank], "reason": "test"}).status_code < 300
    else:
        job.kill_rank(rank)


@pytest.mark.timeout(900)  # each record is a life of the orchestrator
@pytest.mark.cost(150)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["planned", "unplanned"])
def test_killed_at_every_record_of_a_migration(
    kind: str, when: str, start: Start, reference: Reference, verdict: Verdict, brain: Brain
) -> None:
    job = begin(start, brain)
    job.until_step(5)
    deaths: list[str] = []
    for append in range(1, APPENDS_MAX):
        calm(job)
        before = generation(job)
        brain.die_at(when, append)
        try:
            hit(job, kind, append % 3)
        except httpx.HTTPError:
            brain.process.wait(10)  # it died in the request itself, which was not answered
        wait_for(lambda b=before: brain.died() or _over(job, b), "a death, or the migration")
        if not brain.died():  # there are no more appends in a migration than these
            brain.plan.unlink()
            break
        deaths.append(brain.death.read_text())
        brain.process.wait()
        brain.start()
        if kind == "unplanned":
            job.until(lambda s, b=before: s.generation > b, "the recovery")
    else:
        raise AssertionError("no migration takes so many records")
    job.finish(deadline_s=300)
    assert len(deaths) >= 3, deaths  # at least: opened and begun, committed, closed
    seen = verdict.identical(job, reference(3, *ARGS), faults=2 * len(deaths) + 1)
    assert any(i.outcome == "RESOLVED" for i in seen)
    print(f"died at: {deaths}")


def _over(job: Job, before: int) -> bool:
    status = job.status()
    return status.generation > before and status.state == "running" and _closed(job)


def _closed(job: Job) -> bool:
    seen = job.live_incidents()
    return seen is not None and all(one.outcome != "OPEN" for one in seen)


@pytest.mark.cost(60)
def test_training_goes_on_for_half_a_minute_without_an_orchestrator(
    start: Start, reference: Reference, verdict: Verdict, brain: Brain
) -> None:
    job = begin(start, brain)
    job.until_step(5)
    job.spare_parked()
    brain.process.kill()
    brain.process.wait()
    steps = _steps(job)
    wait_for(lambda: _steps(job) >= steps + int(DOWN_S / 0.25), "half a minute of steps")
    brain.start()
    calm(job)
    job.kill_rank(1)
    job.finish(deadline_s=300)
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=1)


def _steps(job: Job) -> int:
    """Without the orchestrator only the script itself can say."""
    path = job.out / "rank-0.steps"
    return os.path.getsize(path) if path.exists() else 0


@pytest.mark.cost(60)
def test_held_ranks_wait_for_the_orchestrator_and_lose_nothing(
    start: Start, reference: Reference, verdict: Verdict, brain: Brain
) -> None:
    """It dies when the decision is durable and untold, and stays away longer than the stall
    timeout: ranks that hold for it are no stall."""
    options = ("--nproc-per-node", "3", "--spares", "1", "--stall-timeout", "8")
    job = start(*options, "--orchestrator", "brain", script_args=ARGS, home=brain.home)
    job.until_step(5)
    calm(job)
    pids = [rank.pid for rank in job.status().ranks]
    brain.die_at("after", 3)
    job.kill_rank(1)
    wait_for(brain.died, "the orchestrator's death")
    held = _steps(job)
    with pytest.raises(TimeoutError):
        wait_for(lambda: _steps(job) > held + 3, "nothing: it must not train", DOWN_S)
    brain.process.wait()
    brain.start()
    job.until(lambda s: s.generation > 0 and s.state == "running", "the recovery")
    now = [rank.pid for rank in job.status().ranks]
    assert (now[0], now[2]) == (pids[0], pids[2])
    job.finish(deadline_s=300)
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=1)
