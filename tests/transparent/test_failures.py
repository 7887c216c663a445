"""What goes wrong before a move is committed: the job goes on with its old members, bit by bit.

A fault stays until the move is given up, then it is taken back, and the next move succeeds.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.brain import Brain
from tests.support.moving import Faults, Launch, Transparent
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict


@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("dump-killed", "could not dump", marks=pytest.mark.always),
        ("dump-hangs", "did not finish the dump"),
        ("restore-fails", "did not come to life"),
    ],
)
def test_criu_fails(
    fault: str, words: str, launch: Launch, reference: Reference, verdict: Verdict, faults: Faults
) -> None:
    it = launch(options=("--stall-timeout", "10"))
    it.train()
    before = it.holders()
    faults.set(fault)
    it.undone(it.migrate(1), words)
    faults.clear()
    assert it.holders() == before
    it.moved(1)
    it.job.finish()
    verdict.identical(it.job, reference(2), faults=1)


@pytest.mark.timeout(290)
def test_no_room_for_the_image(
    launch: Launch, reference: Reference, verdict: Verdict, faults: Faults, small_tmpfs: Path
) -> None:
    it = launch("--workers", "1")
    it.train()
    before = it.holders()
    faults.set("full")
    it.undone(it.migrate(0), "could not dump")
    faults.clear()
    assert it.holders() == before
    assert list(small_tmpfs.iterdir()) == []
    it.moved(0)
    it.job.finish()
    verdict.identical(it.job, reference(2, "--workers", "1"), faults=1)


def capsule_of_newcomer(it: Transparent) -> int:
    """The process that was given the rank, in the spare node."""
    agent = next(n.pid for n in it.job.status().nodes if n.node == "n2")
    capsules = [
        p for p in psutil.Process(agent).children() if "keepstep.agent.capsule" in p.cmdline()
    ]
    return capsules[0].pid


@pytest.mark.timeout(290)
@pytest.mark.parametrize("when", ["restore-hangs", "restored-late"])
@pytest.mark.parametrize("who", ["process", "agent"])
def test_target_dies(
    who: str, when: str, launch: Launch, reference: Reference, verdict: Verdict, faults: Faults
) -> None:
    """Before the image came to life there, and after it."""
    it = launch("--workers", "2")
    it.train()
    before, known = it.holders(), len(it.incidents())
    faults.set(when)
    assert it.job.post("migrate", {"ranks": [1], "reason": "test"}).status_code < 300
    faults.until_struck()
    capsule = capsule_of_newcomer(it)
    faults.clear()
    os.kill(capsule if who == "process" else psutil.Process(capsule).ppid(), signal.SIGKILL)
    if who == "process":
        incident = it.ended(known)
        assert incident.outcome == "RESOLVED" and incident.attempts == 2, incident
    else:
        step = it.job.step()
        it.job.until_step(step + 3)  # it waits for another spare, and trains
        assert it.holders() == before
    it.job.finish()
    verdict.identical(it.job, reference(2, "--workers", "2"), faults=1)


@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("option", "words"),
    [
        pytest.param("--socket", "TCP socket", marks=pytest.mark.always),
        ("--child", "another program"),
    ],
)
def test_scripts_that_cannot_be_moved_are_named_and_left_alone(
    option: str, words: str, launch: Launch, reference: Reference, verdict: Verdict
) -> None:
    it = launch(option)
    it.train()
    before = it.holders()
    incident = it.migrate(0)
    it.undone(incident, words)
    assert [phase.phase for phase in incident.phases] == ["RESERVE"]  # nobody was held
    assert it.holders() == before
    it.job.finish()
    verdict.identical(it.job, reference(2), faults=1, incidents=1)


@pytest.mark.timeout(290)
def test_ranks_that_step_unevenly_train_on(
    launch: Launch, reference: Reference, verdict: Verdict
) -> None:
    it = launch("--uneven", options=("--stall-timeout", "10"))
    it.train()
    before = it.holders()
    it.undone(it.migrate(0), "do not call their optimizers equally often")
    assert it.holders() == before
    it.job.finish()
    verdict.identical(it.job, reference(2), faults=1)


@pytest.mark.timeout(290)
@pytest.mark.parametrize("when", ["dump-hangs", "restored-late"])
def test_orchestrator_is_started_anew(
    when: str,
    launch: Launch,
    reference: Reference,
    verdict: Verdict,
    faults: Faults,
    tmp_path: Path,
) -> None:
    brain = Brain(tmp_path)
    try:
        it = launch(options=("--orchestrator", "brain"), home=brain.home)
        it.train()
        before = it.holders()
        faults.set(when)
        assert it.job.post("migrate", {"ranks": [1], "reason": "test"}).status_code < 300
        faults.until_struck()
        step = it.job.step()  # where the ranks hold
        brain.process.kill()
        brain.process.wait()
        faults.clear()
        brain.start()
        it.job.until_step(step + 3)
        it.job.finish()
        assert before
        verdict.identical(it.job, reference(2), faults=1)
    finally:
        brain.end()
