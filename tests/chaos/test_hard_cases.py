"""The cases that break naive designs. Each is ordinary here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from keepstep.model.views import JobView
from tests.support.job import Job, inject, wait_for
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]


@pytest.mark.cost(30)
def test_node_with_rank_0_and_the_store_dies(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--local-nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1",
        *inject("kill-node:node=n0,step=6"),
        world=4,
    )  # fmt: skip
    job.finish()
    seen = verdict.identical(job, reference(4), faults=1, incidents=1)
    assert seen[0].victims == [0, 1]
    assert seen[0].cause == "node-lost"
    assert "buddy" in seen[0].source


@pytest.mark.cost(25)
def test_node_killed_from_outside(start: Start, reference: Reference, verdict: Verdict) -> None:
    """Every process of the agent's session at once, as a power cut would."""
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", "--spare-nodes", "1", script_args=args
    )
    job.until_step(5)
    job.spare_parked()
    session = next(n.session for n in job.status().nodes if n.node == "n1")
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass
    job.finish()
    verdict.identical(job, reference(3, *args), faults=1, incidents=1)


@pytest.mark.cost(50)
def test_understudies_spare_the_pause_a_long_construction(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    """Built long before, in another epoch, as the rank they take over; the second one beside a
    spare that was itself started after the first fault."""
    args = ["--epochs", "30", "--steps-per-epoch", "12", "--slow", "yes", "--build-s", "6"]
    options = ("--nproc-per-node", "3", "--spares", "1", "--understudies", "1")
    job = start(*options, script_args=args)
    used = []
    for victim in (0, 0):
        job.until(lambda s, v=victim: ready_for(s) == [v], "an understudy that is ready", 120)
        step = job.step()
        job.until_step(step + 14)  # in another epoch
        used.append(understudy(job.status(), victim))
        job.kill_rank(victim)
        job.until(lambda s, v=victim: s.ranks[v].pid == used[-1], "the understudy takes over")
        job.until(lambda s: s.state == "running", "training")
    job.finish(deadline_s=240)
    seen = verdict.identical(job, reference(3, *args), faults=2, incidents=2)
    assert all(one.pause_ms < 6000 for one in seen), [one.pause_ms for one in seen]
    assert all("newcomer_build" not in one.timings_ms for one in seen)


def ready_for(status: JobView) -> list[int]:
    found = [one for spare in status.spares for one in spare.understudies]
    return sorted(one.rank for one in found if one.state == "ready")


def understudy(status: JobView, rank: int) -> int:
    found = [one for spare in status.spares for one in spare.understudies]
    return next(one.pid for one in found if one.rank == rank)


@pytest.mark.cost(28)
def test_two_ranks_die_at_once(start: Start, reference: Reference, verdict: Verdict) -> None:
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start("--nproc-per-node", "3", "--spares", "2", script_args=args)
    job.until_step(4)
    job.spare_parked(2)
    pids = [job.rank(r).pid for r in (0, 2)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.finish()
    seen = verdict.identical(job, reference(3, *args), faults=2)
    assert {v for i in seen for v in i.victims} == {0, 2}


@pytest.mark.cost(30)
@pytest.mark.parametrize("second", ["survivor", "newcomer"])
def test_second_death_while_the_first_is_replaced(
    second: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """`--build-s` keeps the newcomer busy long enough to hit recovery in the middle."""
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes", "--build-s", "2"]
    job = start("--nproc-per-node", "3", "--spares", "3", script_args=args)
    job.until_step(4)
    job.spare_parked(3)
    job.kill_rank(1)
    assigned = job.until(
        lambda s: [x for x in s.spares if x.state == "assigned"],
        "an assigned newcomer",
    )
    if second == "survivor":
        job.kill_rank(2)
    else:
        os.kill(assigned[0].pid, signal.SIGKILL)
    job.finish()
    seen = verdict.identical(job, reference(3, *args), faults=2, incidents=1)
    assert seen[0].attempts >= (2 if second == "survivor" else 1)


@pytest.mark.cost(30)
def test_source_dies_while_copying(start: Start, reference: Reference, verdict: Verdict) -> None:
    """A survivor is killed as soon as it holds and serves state."""
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes", "--build-s", "1.5"]
    job = start("--nproc-per-node", "3", "--spares", "3", script_args=args)
    job.until_step(4)
    job.spare_parked(3)
    job.kill_rank(0)
    job.until(
        lambda s: all(r.state == "holding" for r in s.ranks if r.rank in (1, 2)),
        "survivors that hold",
    )
    job.kill_rank(1)
    job.finish()
    verdict.identical(job, reference(3, *args), faults=2, incidents=1)


@pytest.mark.cost(30)
def test_rank_dies_in_the_last_barrier_and_after_it(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Rank 2 is killed after the last step, while the others are on their way to the barrier."""
    gate = tmp_path / "open"
    job = start("--nproc-per-node", "3", "--spares", "1", script_args=["--gate", str(gate)])
    job.until_step(16)
    job.spare_parked()
    job.kill_rank(2)
    gate.touch()
    job.finish()
    verdict.identical(job, reference(3), faults=1, incidents=1)


@pytest.mark.cost(55)
def test_no_spare_holds_writes_a_checkpoint_and_resumes(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    """No spare and no free slot: the node is gone. Nothing is lost, now or in another job."""
    args = ["--epochs", "2", "--steps-per-epoch", "12", "--slow", "yes"]
    options = ["--local-nodes", "3", "--nproc-per-node", "1"]
    job = start(*options, *inject("kill-node:node=n1,step=7"), script_args=args)
    job.until(lambda s: s.state == "held" and s.checkpoint, "a held job with a checkpoint")
    checkpoint = job.status().checkpoint
    manifest = json.loads((Path(checkpoint) / "manifest.json").read_text())
    assert manifest["step"] >= 7
    job.process.send_signal(signal.SIGTERM)
    job.finish(code=143)
    again = start(*options, "--resume", checkpoint, script_args=args)
    again.finish()
    verdict.identical(again, reference(3, *args), faults=1)


@pytest.mark.cost(30)
@pytest.mark.parametrize("victim", [1, 2])
def test_second_death_at_the_moment_of_the_swap(
    victim: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """The new generation is on record and the swaps are on their way when a rank of the other node
    (2), or of the same one (1), is killed."""
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start(
        "--local-nodes", "2", "--nproc-per-node", "2", "--spares", "2", world=4, script_args=args
    )
    job.until_step(4)
    job.spare_parked(2)
    generation = job.status().generation
    pid = job.rank(victim).pid
    job.kill_rank(0)
    job.until(lambda s: s.generation > generation, "the commit of the new generation")
    os.kill(pid, signal.SIGKILL)
    job.finish()
    seen = verdict.identical(job, reference(4, *args), faults=2)
    assert {v for i in seen for v in i.victims} == {0, victim}


@pytest.mark.cost(60)
@pytest.mark.parametrize("hold_s", [0, 15])
def test_spare_that_appears_later_continues_a_held_job(
    hold_s: int, start: Start, reference: Reference, verdict: Verdict
) -> None:
    """Also after a hold of several stall timeouts: who holds does not hang."""
    args = ["--epochs", "2", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start(
        "--local-nodes", "3", "--nproc-per-node", "1", *inject("kill-node:node=n2,step=5"),
        "--stall-timeout", "4", script_args=args,
    )  # fmt: skip
    job.until(lambda s: s.state == "held" and s.checkpoint, "a held job")
    pids = [job.rank(rank).pid for rank in (0, 1)]
    time.sleep(hold_s)  # longer than the stall timeout: the point of the test
    assert [job.rank(rank).pid for rank in (0, 1)] == pids
    assert job.status().state == "held"
    joined = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "agent", "--job", job.job, "--slots", "1"],
        env=job.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        job.finish()
    finally:
        joined.terminate()
        joined.wait(10)
    verdict.identical(job, reference(3, *args), faults=1, incidents=1)


@pytest.mark.cost(18)
def test_all_ranks_die_at_once_is_said_and_has_its_own_code(start: Start, verdict: Verdict) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1", script_args=["--epochs", "9", "--step-ms", "20"]
    )
    job.until_step(3)
    node = job.status().nodes[0].node
    done = job.cli("inject", "kill-node", "--node", node)
    assert done.returncode == 0, done.stderr
    job.finish(code=4)
    assert "fell back" in job.output()
    assert job.incidents()[-1].outcome == "FELL_BACK"
    assert job.incidents()[-1].steps_lost >= 3
    verdict.note(1, "fell back, exit code 4")


@pytest.mark.cost(22)
def test_short_stop_is_nothing(start: Start, reference: Reference, verdict: Verdict) -> None:
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start("--nproc-per-node", "3", "--spares", "1", "--stall-timeout", "8", script_args=args)
    job.until_step(4)
    pid = job.kill_rank(1, signal.SIGSTOP)
    time.sleep(2)  # shorter than the stall timeout: the point of the test
    os.kill(pid, signal.SIGCONT)
    job.finish()
    verdict.identical(job, reference(3, *args), faults=1, incidents=0)


@pytest.mark.cost(30)
def test_long_stop_is_a_hang_and_the_rank_is_fenced(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--epochs", "5", "--steps-per-epoch", "12", "--slow", "yes"]
    job = start("--nproc-per-node", "3", "--spares", "1", "--stall-timeout", "4", script_args=args)
    job.until_step(4)
    job.spare_parked()
    stopped = psutil.Process(job.kill_rank(1, signal.SIGSTOP))
    job.finish()
    assert not stopped.is_running()
    seen = verdict.identical(job, reference(3, *args), faults=1, incidents=1)
    assert (seen[0].cause, seen[0].victims) == ("hang", [1])


@pytest.mark.cost(30)
def test_busy_loop_that_never_reaches_a_collective_is_a_hang(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1", "--stall-timeout", "4",
        script_args=["--busy-loop", "2:6"],
    )  # fmt: skip
    job.finish()
    seen = verdict.identical(job, reference(3), faults=1, incidents=1)
    assert (seen[0].cause, seen[0].victims) == ("hang", [2])


@pytest.mark.cost(40)
def test_long_section_with_progress_is_no_hang(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    args = ["--epochs", "1", "--evaluate-every", "99", "--evaluate-s", "5"]
    job = start("--nproc-per-node", "3", "--stall-timeout", "2.5", script_args=args)
    job.finish()
    verdict.identical(job, reference(3, *args), faults=0, incidents=0)


@pytest.mark.cost(22)
def test_device_error_replaces_the_rank(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject("device-error:rank=1,step=6,point=before_forward"),
    )  # fmt: skip
    job.finish()
    seen = verdict.identical(job, reference(3), faults=1, incidents=1)
    assert (seen[0].cause, seen[0].victims) == ("device-error", [1])


@pytest.mark.cost(18)
def test_user_exception_ends_the_job_with_its_traceback(start: Start, verdict: Verdict) -> None:
    job = start("--nproc-per-node", "3", "--spares", "1", script_args=["--user-error", "1:5"])
    job.finish(code=1)
    assert "ValueError: a bug in the training script" in job.output()
    assert "RESOLVED" not in job.output()
    assert not [i for i in job.incidents() if i.moves]
    verdict.note(1, "user error: exit code 1, traceback shown, nothing migrated")


@pytest.mark.cost(35)
def test_user_exception_together_with_a_death_is_retried(
    start: Start, reference: Reference, verdict: Verdict
) -> None:
    """A survivor's error right when a peer dies is taken for a cascade; a real bug comes again."""
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        *inject("kill:rank=0,step=5,point=before_forward"),
        script_args=["--user-error", "1:5"],
    )  # fmt: skip
    job.finish(code=1)
    assert "ValueError: a bug in the training script" in job.output()
    verdict.note(2, "death and bug: replaced, then the bug ended the job")


@pytest.mark.cost(15)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything_within_five_seconds(
    how: signal.Signals, start: Start, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        script_args=["--epochs", "99", "--step-ms", "20", "--workers", "1"],
    )  # fmt: skip
    job.until_step(3)
    began = time.monotonic()
    job.process.send_signal(how)
    job.process.wait(10)
    job.nothing_left(5 - min(5, time.monotonic() - began) + 0.5)
    assert job.process.returncode == 128 + how
    verdict.note(1, f"{how.name}: exit code {128 + how}, nothing left")


@pytest.mark.cost(20)
def test_launcher_killed_leaves_nothing(start: Start, verdict: Verdict) -> None:
    job = start(
        "--nproc-per-node", "3", "--spares", "1",
        script_args=["--epochs", "99", "--step-ms", "20", "--workers", "1"],
    )  # fmt: skip
    job.until_step(3)
    job.process.kill()
    job.process.wait()
    job.nothing_left(10)
    verdict.note(1, "launcher killed: nothing left")


@pytest.mark.cost(40)
def test_orchestrator_killed_and_restarted_is_not_noticed(
    start: Start, reference: Reference, verdict: Verdict, tmp_path: Path
) -> None:
    """Training goes on without it; a migration asked for afterwards works."""
    args = ["--epochs", "8", "--steps-per-epoch", "12", "--slow", "yes"]
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "KEEPSTEP_HOME": str(home)}
    command = [sys.executable, "-m", "keepstep", "orchestrator", "--id", "brain"]

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)

    brain = begin()
    try:
        wait_for((home / "orchestrators" / "brain.json").exists, "the orchestrator")
        job = start(
            "--nproc-per-node", "3", "--spares", "1", "--orchestrator", "brain",
            script_args=args, home=home,
        )  # fmt: skip
        job.until_step(5)
        job.spare_parked()
        before = job.rank(0)
        brain.kill()
        brain.wait()
        brain = begin()
        job.until(lambda s: s.committed_step > before.committed_step + 5, "more steps")
        assert job.rank(0).pid == before.pid
        job.kill_rank(0)
        job.finish()
        verdict.identical(job, reference(3, *args), faults=2, incidents=1)
    finally:
        brain.terminate()
        brain.wait(10)
