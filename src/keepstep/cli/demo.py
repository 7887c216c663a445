"""`keepstep demo`: the same small training twice, once left alone and once disturbed.

The disturbed run meets one fault of each kind: a rank is killed from outside (unplanned), a node
is drained for maintenance and given back (planned), another is tainted (pre-emptive). Each rank
of both runs writes digests of its whole state at the end, and they are held against each other.

Both runs are ordinary `keepstep run` processes, watched and operated through REST as any operator
would; nothing here reaches into them. They live in a temporary KEEPSTEP_HOME. stdout gets the
table (or the JSON), stderr what is going on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.cli import show
from keepstep.cli.client import Client
from keepstep.cli.surroundings import surroundings
from keepstep.errors import KeepstepError, PermanentError
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import DrainRequest, Ok, TaintRequest, UntaintRequest

T = TypeVar("T")

RANKS = 4
SPARE_NODES = 1
EPOCHS = 4
STEPS_PER_EPOCH = 40
KILL_RANK, DRAIN_RANK, TAINT_RANK = 1, 0, 3
FIRST_FAULT_STEP = 12
STEPS_BETWEEN = 6  # undisturbed training seen between two faults
PACE_S = 0.15
DEADLINE_S = 150.0  # for one condition; far more than any takes
POLL_S = 0.02
STOP_S = 6.0
INCIDENTS_MIN = 3
NOT_PROVED = 1
PR_SET_PDEATHSIG = 1


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What keepstep.demo_train writes at its end."""

    digests: dict[str, str]
    steps: int
    first_loss: float
    last_loss: float
    parameters: int


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    bit_identical: bool
    steps_lost: int
    steps_recomputed: int
    differences: list[str]
    incidents: list[IncidentView]
    ranks: int
    steps: int
    parameters: int
    first_loss: float
    last_loss: float
    sha256: dict[str, list[str]]  # of the disturbed run, one per rank
    undisturbed_s: float
    disturbed_s: float

    @property
    def proved(self) -> bool:
        resolved = all(one.outcome == "RESOLVED" for one in self.incidents)
        return self.bit_identical and resolved and len(self.incidents) >= INCIDENTS_MIN


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def demo(as_json: bool) -> None:
    """Train a small GPT twice, the second time with faults, and compare every bit."""
    began_s = time.monotonic()
    with terminated_as_interrupt(), _temporary_home() as where:
        say(f"training a small GPT on {RANKS} ranks, each on its own local node, with 1 spare")
        say(f"run 1 of 2, undisturbed: {EPOCHS * STEPS_PER_EPOCH} steps")
        plain, plain_s, _ = train(where / "undisturbed", lambda run: run.hurry())
        say(f"run 1 of 2 took {plain_s:.0f} s")
        say("run 2 of 2, the same with a kill -9, a drain and a taint")
        hurt, hurt_s, incidents = train(where / "disturbed", disturb)
        say(f"run 2 of 2 took {hurt_s:.0f} s; together {time.monotonic() - began_s:.0f} s")
    report = compare(plain, hurt, incidents, plain_s, hurt_s)
    if as_json:
        show.print_json(report)
    else:
        print_report(report)
    if not report.proved:
        sys.exit(NOT_PROVED)


# --------------------------------------------------------------------------- the two runs


def train(
    folder: Path, during: Callable[[DemoRun], None]
) -> tuple[list[RankResult], float, list[IncidentView]]:
    began_s = time.monotonic()
    with DemoRun(folder) as run:
        during(run)
        incidents = run.finish()
        return run.results(), time.monotonic() - began_s, incidents


def disturb(run: DemoRun) -> None:
    run.reach(FIRST_FAULT_STEP)
    run.spare()
    victim = run.view().ranks[KILL_RANK]
    say(
        f"  step {run.step()}: kill -9 of rank {victim.rank} (pid {victim.pid}, node {victim.node})"
    )
    os.kill(victim.pid, signal.SIGKILL)
    run.resolved(1)

    run.spare()
    node = run.view().ranks[DRAIN_RANK].node
    say(f"  step {run.step()}: drain {node} (rank {DRAIN_RANK})")
    run.post("drain", DrainRequest(node=node, reason="demo: maintenance"))
    run.resolved(2)
    say(f"  step {run.step()}: untaint {node}: maintenance is over, its slot gets the next spare")
    run.post("untaint", UntaintRequest(target=node))

    run.spare()
    node = run.view().ranks[TAINT_RANK].node
    say(f"  step {run.step()}: taint {node} (rank {TAINT_RANK})")
    run.post("taint", TaintRequest(target=node, reason="demo: rising error counts"))
    run.resolved(3)
    run.hurry()


class DemoRun:
    """One `keepstep run` in a session of its own, so that Ctrl-C reaches only the demo, which
    then ends it in order."""

    def __init__(self, folder: Path) -> None:
        self._home, self._out = folder / "home", folder / "out"
        self._out.mkdir(parents=True)
        self._log_path = folder / "log"
        self._client: Client | None = None
        self._job = ""
        self._incidents: list[IncidentView] = []
        command = [sys.executable, "-m", "keepstep", "run"]
        command += ["--local-nodes", str(RANKS), "--nproc-per-node", "1"]
        command += ["--spare-nodes", str(SPARE_NODES), "-m", "keepstep.demo_train"]
        command += ["--out", str(self._out), "--epochs", str(EPOCHS)]
        command += ["--steps-per-epoch", str(STEPS_PER_EPOCH), "--step-s", str(PACE_S)]
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment(surroundings().environ, self._home),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def __enter__(self) -> DemoRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing running, whatever happened."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()  # its agents end with it: they read its death on their stdin
            self._process.wait()
            self._log.close()

    # ------------------------------------------------------------------ looking

    def view(self) -> JobView:
        return self._wait(self._try_view, "the job to be known")

    def step(self) -> int:
        return self.view().committed_step

    def reach(self, step: int) -> None:
        self._wait(lambda: self.step() >= step, f"step {step}")

    def spare(self) -> None:
        """Wait for a parked spare, with training slowed down meanwhile; then let it get back to
        its pace, so that the pause of the next incident is measured against ordinary steps."""
        slow = self._out / "slow"
        slow.touch()
        self._wait(
            lambda: any(one.state == "parked" for one in self.view().spares), "a parked spare"
        )
        slow.unlink()
        self.reach(self.step() + STEPS_BETWEEN)

    def resolved(self, count: int) -> None:
        """Wait for the end of the `count`-th incident and say how it ended."""

        def ended() -> IncidentView | None:
            self._look_at_incidents()
            done = [one for one in self._incidents if one.outcome != "OPEN"]
            return done[count - 1] if len(done) >= count else None

        one = self._wait(ended, f"the end of incident {count}")
        moves = "; ".join(one.moves) or "no move"
        say(f"  step {self.step()}: {one.outcome}, {moves}, pause {one.pause_ms:.0f} ms")
        if one.outcome != "RESOLVED":
            raise PermanentError(f"{one.id} {one.outcome}: {one.reason}", hint=self._words())

    def finish(self) -> list[IncidentView]:
        """Wait for the run's own end; returns its incidents, oldest first."""
        while self._process.poll() is None:
            # The launcher goes away a moment after the job's end: the last look counts.
            with contextlib.suppress(KeepstepError):
                self._look_at_incidents()
            time.sleep(POLL_S)
        if self._process.returncode != 0:
            raise PermanentError(
                f"the run ended with code {self._process.returncode}", hint=self._words()
            )
        return self._incidents

    def results(self) -> list[RankResult]:
        return [
            msgspec.json.decode((self._out / f"rank-{rank}.json").read_bytes(), type=RankResult)
            for rank in range(RANKS)
        ]

    def _try_view(self) -> JobView | None:
        if self._client is None:
            for entry in registry.live(self._home):
                if entry.jobs:
                    self._client, self._job = Client.of(entry), entry.jobs[-1]
        if self._client is None:
            return None
        return self._client.get(f"/v1/jobs/{self._job}", JobView)

    def _look_at_incidents(self) -> None:
        if self._client is not None:
            path = f"/v1/jobs/{self._job}/incidents"
            found = self._client.get(path, list[IncidentView])
            self._incidents = sorted(found, key=lambda one: one.opened_at_ns)

    def _wait(self, condition: Callable[[], T | None], what: str) -> T:
        end_s = time.monotonic() + DEADLINE_S
        while True:
            ended = self._process.poll() is not None
            value = None if ended else condition()
            if value:
                return value
            if ended:
                raise PermanentError(f"the run ended before {what}", hint=self._words())
            if time.monotonic() > end_s:
                raise PermanentError(f"waited {DEADLINE_S:g} s for {what}", hint=self._words())
            time.sleep(POLL_S)

    def _words(self) -> str:
        """The end of the run's own output: the folder is gone when somebody reads this."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "its last words:\n" + "\n".join(lines[-25:])

    # ------------------------------------------------------------------ doing

    def post(self, verb: str, body: Any) -> None:
        self.view()
        assert self._client is not None
        self._client.post(f"/v1/jobs/{self._job}/{verb}", body, Ok)

    def hurry(self) -> None:
        (self._out / "hurry").touch()


def environment(given: Mapping[str, str], where: Path) -> dict[str, str]:
    environ = {**given, "KEEPSTEP_HOME": str(where)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    return environ


def _end_with_parent() -> None:
    """Even a killed demo leaves nothing: its runs get SIGTERM and end in order."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _temporary_home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, through everything that must be ended."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------- the verdict


def compare(
    plain: list[RankResult],
    hurt: list[RankResult],
    incidents: list[IncidentView],
    undisturbed_s: float,
    disturbed_s: float,
) -> DemoReport:
    differences = [
        f"rank {rank}: {part}"
        for rank, (a, b) in enumerate(zip(plain, hurt, strict=True))
        for part in a.digests
        if a.digests[part] != b.digests.get(part)
    ]
    return DemoReport(
        bit_identical=not differences and [r.steps for r in plain] == [r.steps for r in hurt],
        steps_lost=sum(one.steps_lost for one in incidents),
        steps_recomputed=sum(one.steps_recomputed for one in incidents),
        differences=differences,
        incidents=incidents,
        ranks=len(hurt),
        steps=hurt[0].steps,
        parameters=hurt[0].parameters,
        first_loss=hurt[0].first_loss,
        last_loss=hurt[0].last_loss,
        sha256={part: [r.digests[part] for r in hurt] for part in hurt[0].digests},
        undisturbed_s=round(undisturbed_s, 1),
        disturbed_s=round(disturbed_s, 1),
    )


def print_report(report: DemoReport) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else show.PIPE_COLUMNS)
    table = Table(title="incidents of the disturbed run", title_justify="left")
    for name in ("incident", "trigger", "victim", "move", "outcome"):
        table.add_column(name)
    for name in ("pause ms", "steps lost", "recomputed"):
        table.add_column(name, justify="right")
    for index, one in enumerate(report.incidents, 1):
        cells = [
            str(index),
            f"{one.trigger} ({one.cause})",
            ", ".join(f"rank {rank}" for rank in one.victims),
            "; ".join(move.partition(": ")[2] or move for move in one.moves),
            one.outcome,
            f"{one.pause_ms:.0f}",
            str(one.steps_lost),
            str(one.steps_recomputed),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    console.print(
        f"{report.parameters} parameters, {report.ranks} ranks, {report.steps} steps, "
        f"loss {report.first_loss:.3f} -> {report.last_loss:.3f}"
    )
    parts = ", ".join(report.sha256)
    console.print(f"sha256 compared on every rank: {parts}")
    for difference in report.differences:
        console.print(f"differs: {difference}")
    console.print(f"steps lost: {report.steps_lost}")
    console.print(f"bit-identical: {'yes' if report.bit_identical else 'NO'}")


def say(text: str) -> None:
    show.words(f"keepstep demo: {text}")
