"""Two orchestrators on one PostgreSQL store; the active one or the store goes at a bad moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.orchestrator import registry
from tests.support.job import Job, environment, wait_for
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]

LEASE_S = 4
ARGS = ["--epochs", "8", "--steps-per-epoch", "12", "--slow", "yes"]
OPTIONS = ("--nproc-per-node", "3", "--spares", "1", "--orchestrator", "a,b")


class Pair:
    """Orchestrators a (active) and b (standby)."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.url = url
        self.env = {**environment(home), "KEEPSTEP_STORE": url}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for id in "ab":
            self.start(id)
        self.connect()

    def start(self, id: str) -> None:
        command = [sys.executable, "-m", "keepstep", "orchestrator"]
        command += ["--id", id, "--lease", str(LEASE_S)]
        with (self.home / f"{id}.log").open("ab") as log:
            self.processes[id] = subprocess.Popen(command, env=self.env, stderr=log)
        wait_for(
            lambda: any(entry.id == id for entry in registry.live(self.home)), f"orchestrator {id}"
        )

    def connect(self) -> None:
        import psycopg

        self.db = psycopg.connect(self.url, autocommit=True)

    def decided_tick(self) -> int:
        query = "SELECT body FROM keepstep_records WHERE kind = 'Decided'"
        row = self.db.execute(query).fetchone()
        assert row is not None
        return int(json.loads(row[0])["tick"])

    def records(self, kind: str) -> int:
        query = "SELECT count(*) FROM keepstep_records WHERE kind = %s"
        row = self.db.execute(query, [kind]).fetchone()
        return int(row[0]) if row else 0

    def token(self) -> int:
        row = self.db.execute("SELECT token FROM keepstep_head").fetchone()
        return int(row[0]) if row else 0

    def hit(self, id: str, number: int) -> None:
        self.processes[id].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[id].wait()

    def verify(self) -> None:
        words = [sys.executable, "-m", "keepstep", "ledger", "verify", self.url]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def end(self) -> None:
        self.db.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            process.wait(20)


@pytest.fixture
def pair(postgres: Any, tmp_path: Path) -> Iterator[Pair]:
    home = tmp_path / "home"
    home.mkdir()
    made = Pair(home, postgres.store())
    yield made
    made.end()


def begin(start: Start, pair: Pair) -> Job:
    job = start(*OPTIONS, script_args=ARGS, home=pair.home)
    job.until_step(5)
    job.spare_parked()
    return job


@pytest.mark.cost(45)
@pytest.mark.parametrize("kind", ["IncidentOpened", "Decided", "Committed"])
def test_active_orchestrator_killed_during_a_recovery(
    start: Start, reference: Reference, verdict: Verdict, pair: Pair, kind: str
) -> None:
    job = begin(start, pair)
    job.kill_rank(1)
    wait_for(lambda: pair.records(kind), f"record {kind}")
    pair.hit("a", signal.SIGKILL)
    wait_for(lambda: pair.token() == 2, "the standby takes over")
    wait_for(lambda: pair.records("IncidentClosed"), "the recovery is finished")
    job.finish()
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=1)
    pair.verify()


@pytest.mark.cost(45)
@pytest.mark.parametrize("kind", ["AttemptStarted", "Committed"])
def test_active_orchestrator_killed_during_a_planned_move(
    start: Start, reference: Reference, verdict: Verdict, pair: Pair, kind: str
) -> None:
    job = begin(start, pair)
    assert job.cli("migrate", "--rank", "2").returncode == 0
    wait_for(lambda: pair.records(kind), f"record {kind}")
    pair.hit("a", signal.SIGKILL)
    wait_for(lambda: pair.token() == 2, "the standby takes over")
    wait_for(lambda: pair.records("IncidentClosed"), "the move is finished")
    pair.start("a")  # and the killed one is the next standby
    job.finish()
    seen = verdict.identical(job, reference(3, *ARGS), faults=1)
    assert seen[0].outcome == "RESOLVED" and seen[0].trigger == "planned"
    pair.verify()


@pytest.mark.cost(50)
def test_stopped_orchestrator_wakes_after_another_took_over(
    start: Start, reference: Reference, verdict: Verdict, pair: Pair
) -> None:
    """It still believes to be active, in the middle of a recovery that was finished without it."""
    job = begin(start, pair)
    job.kill_rank(0)
    wait_for(lambda: pair.records("Decided"), "a decision")
    pair.hit("a", signal.SIGSTOP)
    wait_for(lambda: pair.token() == 2, "the standby takes over")
    wait_for(lambda: pair.records("IncidentClosed"), "the recovery is finished")
    pair.hit("a", signal.SIGCONT)
    job.disconnect()  # it may have been asked for the status while it was stopped
    step = job.step()
    job.until_step(step + 5)
    assert pair.token() == 2, "it steps down instead of fighting"
    job.finish()
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=1)
    pair.verify()


@pytest.mark.cost(50)
def test_store_goes_away_and_a_rank_dies_meanwhile(
    start: Start, reference: Reference, verdict: Verdict, pair: Pair, postgres: Any
) -> None:
    job = begin(start, pair)
    victim = psutil.Process(int(job.rank(1).pid))
    step = job.step()
    postgres.stop()
    pair.db.close()
    try:
        wait_for(lambda: job.status().control, "status says so")
        words = job.cli("status").stdout
        assert "training goes on, migrations wait" in words, words
        refused = job.cli("migrate", "--rank", "2")
        assert refused.returncode == 3 and "store" in refused.stderr and "hint:" in refused.stderr
        used_s = victim.cpu_times().user
        wait_for(lambda: victim.cpu_times().user > used_s + 0.3, "ranks compute")
        victim.kill()
    finally:
        postgres.start()
    pair.connect()
    wait_for(lambda: pair.records("IncidentClosed"), "the rank is replaced")
    # There is a section for every third step, one per epoch and one more.
    assert pair.decided_tick() > 1.5 * step + 8, "training went on while the store was away"
    job.finish()
    verdict.identical(job, reference(3, *ARGS), faults=2, incidents=1)
    pair.verify()
