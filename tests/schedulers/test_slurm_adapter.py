"""What only Slurm has: allocations of others, reservations that refill themselves, a controller
that goes away; and launchers that are killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.cli import release_guard
from keepstep.cli.main import invoke
from keepstep.errors import NoSpare, TransientError, UsageError
from keepstep.model.schedule import START, AgentStart, Ask, Constraints, Kind, Lease
from tests.schedulers.cluster import RESERVED, Cluster, until
from tests.schedulers.jobs import SlurmJob, allocations, nodes_of
from tests.support.scripts import SCRIPT

slow = pytest.mark.skipif(
    "KEEPSTEP_ALL" not in os.environ, reason="only make test-all has the time"
)
GPUS = Constraints(partition="train", gpus=4, gpu_type="h200")


def ask(op: str, *kinds: Kind, count: int = 1, **more: str) -> Ask:
    limits = Constraints(**{"partition": "train", "gpus": 4, "gpu_type": "h200", **more})  # type: ignore[arg-type]
    return Ask(job="job", op=op, constraints=limits, kinds=list(kinds), count=count)


def agent(folder: Path, node: str) -> AgentStart:
    return AgentStart(
        job="job",
        node=node,
        command=["sleep", "600"],
        env={},
        directory=str(folder),
        log=str(folder / f"{node}.log"),
    )


def patiently(scheduler: SlurmScheduler, wanted: Ask) -> Lease:
    """Slurm takes its time to use nodes again that were in an allocation that has shrunk."""

    def given() -> Lease | None:
        with contextlib.suppress(NoSpare):
            return scheduler.acquire(wanted, 20)
        return None

    found: Lease = until(given, "a lease")
    return found


def users_own(cluster: Cluster, *words: str) -> str:
    """Somebody's allocation of two nodes; its id."""
    options = ["-p", "train", "-N2", "--exclusive", "--gres=gpu:h200:4", "-J", "mine"]
    cluster.ask(*words, *options, *(["--wrap", "sleep 600"] if words[0] == "sbatch" else []))
    until(lambda: cluster.jobs() and "mine|c" in cluster.jobs()[0], "an allocation")
    return cluster.ask("squeue", "-h", "-n", "mine", "-o", "%i")


@slow
def test_an_allocation_that_was_adopted_is_left_as_it_was_found(
    cluster: Cluster, tmp_path: Path
) -> None:
    mine = users_own(cluster, "salloc", "--no-shell", "--no-kill")
    scheduler = SlurmScheduler()
    with pytest.raises(UsageError, match="3 nodes are wanted, and allocation"):
        scheduler.adopt("job", mine, 3)
    lease, note = scheduler.adopt("job", mine)
    assert lease.adopted and len(lease.places) == 2 and note == ""
    assert SlurmScheduler().leases("job") == [lease]
    with pytest.raises(UsageError, match="belongs to a job of Keepstep already"):
        scheduler.adopt("other", mine)
    for index, place in enumerate(lease.places):
        scheduler.start_agent(place, agent(tmp_path, f"n{index}"))
    scheduler.commit_swap("job", lease.places[0])
    assert nodes_of(cluster, mine) == lease.places[1:]
    (left,) = scheduler.leases("job")
    scheduler.release(left)
    assert scheduler.leases() == [] and nodes_of(cluster, mine) == lease.places[1:]
    assert "keepstep-" not in cluster.ask("squeue", "-h", "-s", "-o", "%j")


@slow
def test_the_node_of_a_batch_script_is_not_given_back(cluster: Cluster) -> None:
    mine = users_own(cluster, "sbatch", "--no-kill")
    scheduler = SlurmScheduler()
    lease, note = scheduler.adopt("job", mine)
    assert f"batch script on {lease.places[0]}, whose loss ends it" in note
    scheduler.commit_swap("job", lease.places[0])
    assert nodes_of(cluster, mine) == lease.places
    scheduler.commit_swap("job", lease.places[1])
    assert nodes_of(cluster, mine) == lease.places[:1]


@pytest.mark.parametrize(
    ("allocation", "error"), [("999999", "no job 999999"), ("next", "'next' is no job id")]
)
def test_what_cannot_be_adopted_is_refused(
    cluster: Cluster,
    allocation: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    assert invoke(["slurm", "launch", "--adopt", allocation, str(SCRIPT)]) == 2
    said = capsys.readouterr().err
    assert error in said and "hint: " in said


@slow
def test_a_reservation_that_replaces_is_full_again_at_once(cluster: Cluster) -> None:
    words = f"ReservationName={RESERVED} Users=root NodeCnt=1 PartitionName=train Features=new"
    cluster.ask(
        "scontrol", "create", "reservation", *words.split(), "StartTime=now", "Duration=60",
        "Flags=REPLACE",
    )  # fmt: skip
    scheduler = SlurmScheduler()
    first = patiently(scheduler, ask("s1", "reserved", reservation=RESERVED))
    assert first.kind == "reserved"

    def refilled() -> str:
        said = cluster.ask("scontrol", "-o", "show", "reservation", RESERVED)
        nodes = said.partition(" Nodes=")[2].split()[0]
        return nodes if nodes not in first.places else ""

    until(refilled, "another node in the reservation")
    second = patiently(scheduler, ask("s2", "reserved", reservation=RESERVED))
    assert second.kind == "reserved" and second.places != first.places


@slow
def test_a_controller_that_is_away_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    scheduler = SlurmScheduler()
    lease = patiently(scheduler, ask(START, "queue", count=2))
    scheduler.start_agent(lease.places[0], agent(tmp_path, "n0"))
    given = time.time()
    saved = cluster.folder / "state" / "job_state"
    until(lambda: saved.stat().st_mtime > given, "what it knows on disk")
    cluster.stop_controller()
    try:
        for call in (scheduler.watch, lambda: scheduler.acquire(ask("s1", "idle"), 1.0)):
            with pytest.raises(TransientError) as away:
                call()
            assert "controller" in away.value.message
    finally:
        cluster.start_controller()
    assert scheduler.leases("job") == [lease], "nothing is lost, and nothing was begun"
    until(lambda: all(p.state in ("free", "used") for p in scheduler.places()), "all nodes")
    assert scheduler.acquire(ask("s1", "idle"), 20).kind == "idle"


def test_a_node_that_comes_back_while_it_is_fenced_stays_away(cluster: Cluster) -> None:
    scheduler = SlurmScheduler()
    (place,) = patiently(scheduler, ask(START, "queue")).places
    cluster.crash_node(place)
    scheduler.taint(place, "fenced", "does not answer")
    cluster.start_node(place)
    until(lambda: "*" not in cluster.states()[place], "its slurmd")
    assert cluster.states()[place] == "down"
    for kind in ("idle", "preempt"):
        only = Ask(job="job", op="s1", constraints=GPUS, kinds=[kind], only=place)
        assert place not in [one.place for one in scheduler.spares(only)]
    with pytest.raises(NoSpare):
        scheduler.acquire(Ask(job="job", op="s1", constraints=GPUS, kinds=["idle"], only=place), 1)
    assert scheduler.untaint(place)
    until(lambda: cluster.states()[place] in ("idle", "allocated"), "the node")


def test_a_guard_gives_back_what_its_launcher_cannot(cluster: Cluster, tmp_path: Path) -> None:
    patiently(SlurmScheduler(), ask(START, "queue", count=2))
    code = "import sys, time; from pathlib import Path; from keepstep.cli import release_guard\n"
    code += "print(release_guard.begin(Path(sys.argv[1]), 'job').pid, flush=True); time.sleep(600)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    watcher = psutil.Process(int(launcher.stdout.readline()))
    assert allocations(cluster)
    launcher.kill()
    launcher.wait()
    until(lambda: not allocations(cluster), "the end of the allocation")
    release_guard.hold(tmp_path, "job")  # whoever launches it again waits for the guard
    psutil.wait_procs([watcher], timeout=10)  # its lock is let go a moment before it is gone
    assert not watcher.is_running() or watcher.status() == "zombie"


@pytest.mark.timeout(120)
def test_a_killed_launcher_leaves_no_allocation(cluster: Cluster, tmp_path: Path) -> None:
    job = SlurmJob(tmp_path)
    job.until(lambda: "start:queue" in allocations(cluster), "an allocation")
    job.until(job.view, "the orchestrator")
    job.process.kill()
    job.process.wait()
    until(lambda: allocations(cluster) == {}, "the end of the allocation")
    release_guard.hold(tmp_path / "home", "job")  # as the next launcher does
