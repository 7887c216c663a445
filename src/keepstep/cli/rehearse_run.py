"""One run of a rehearsal: an ordinary `keepstep run`, watched and disturbed through REST.

Faults come one after another. Before each the run waits at the gate (worker/step/trace.py) until a
spare is parked; then the gate moves to the next fault, and the run goes on to it once the incident
has come to its end. A planned move needs a job that trains while it is prepared, and has steps to
stop at: there the gate moves on step by step.

A fault has its incident if one was opened after it was let go. One that never fired has none, and
that is told as such.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keepstep.cli import past_jobs, rehearsal
from keepstep.cli.client import Client
from keepstep.cli.faultplan import FaultLine
from keepstep.cli.rehearsal import RunTrace
from keepstep.cli.scratch import Scratch
from keepstep.errors import KeepstepError
from keepstep.model import trace
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import MigrateRequest, Ok

POLL_S = 0.05
PACE_S = 0.4  # a step, during a planned move
STEPS_BESIDE = 2  # of training while it is prepared
MOVE_S = 300.0
GOES_ON = ("OPEN", "RESOLVED", "ABORTED")  # outcomes after which the job trains on
STOP_S = 8.0
WORDS_MAX = 8_000
PR_SET_PDEATHSIG = 1


class Setup:
    """What all runs of a rehearsal have in common."""

    def __init__(
        self,
        scratch: Scratch,
        words: list[str],
        *,
        world: int,
        steps_max: int,
        stall_s: float,
        limit_s: float,
    ) -> None:
        self.scratch = scratch
        self.words = words  # [-m] SCRIPT ARGS
        self.world = world
        self.steps_max = steps_max
        self.stall_s = stall_s
        self.limit_s = limit_s  # of one run
        self.count = 0


class RunOutcome(NamedTuple):
    """What is left of a run."""

    code: int | None  # None: it did not end in time
    view: JobView | None
    trace: RunTrace
    words: str  # the end of what the script and Keepstep said
    fired: frozenset[str]  # ids of faults
    incidents: dict[str, IncidentView]  # of faults


class RehearsalRun:
    def __init__(self, setup: Setup, faults: list[FaultLine]) -> None:
        setup.count += 1
        self._setup = setup
        self._faults = faults
        self._folder = setup.scratch.base / str(setup.count)
        self._trace = self._folder / "trace"
        self._trace.mkdir(parents=True)
        self._log = self._folder / "log"
        self._client: Client | None = None
        self._job = ""
        self._opened: dict[str, str] = {}  # fault -> incident
        self._end_s = time.monotonic() + setup.limit_s
        if faults:
            self._gate(faults[0].step)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        setup = self._setup
        command = [sys.executable, "-m", "keepstep", "run", "--quiet"]
        command += ["--nproc-per-node", str(setup.world)]
        command += ["--spares", "1" if self._faults else "0"]
        command += ["--stall-timeout", str(setup.stall_s)]
        for fault in self._faults:
            if fault.action == "kill":
                spec = f"kill:rank={fault.rank},step={fault.step},point={fault.point}"
                command += ["--inject", spec]
        command, cwd = setup.scratch.command(self._folder, [*command, *setup.words])
        env = setup.scratch.environment(self._folder)
        env[trace.FOLDER] = str(self._trace)
        env[trace.STEPS_MAX] = str(setup.steps_max)
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def __enter__(self) -> RehearsalRun:
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

    # ------------------------------------------------------------------ the course of a run

    def play(self) -> RunOutcome:
        """From the first fault to the end."""
        following = [*(fault.step for fault in self._faults[1:]), None]
        for fault, next_step in zip(self._faults, following, strict=False):
            if not self._wait(partial(self._at, fault.step)):
                break
            if not self._wait(self._spare_parked):
                break
            before = len(self._incidents())
            if fault.action == "migrate":
                done = self._migrate(fault, before, next_step)
            else:
                self._gate(next_step)
                done = self._wait(partial(self._over, before, next_step))
            found = self._incidents()
            if len(found) > before:
                self._opened[fault.id] = found[before].id
                if found[before].outcome not in GOES_ON:
                    # It ends by itself, or it holds for somebody to look at it.
                    self._end_s = min(self._end_s, time.monotonic() + STOP_S)
                    break
            if not done:
                break
        self._gate(None)
        self._wait(lambda: False)
        return self._outcome()

    def _migrate(self, fault: FaultLine, before: int, next_step: int | None) -> bool:
        """Whether it has come to its end."""
        assert self._client is not None
        with contextlib.suppress(KeepstepError):  # its incident, or its absence, tells
            body = MigrateRequest(ranks=[fault.rank], reason="rehearsal")
            self._client.post(f"/v1/jobs/{self._job}/migrate", body, Ok)
        gate = fault.step
        limit = fault.step + fault.steps
        stuck_s = time.monotonic() + MOVE_S
        while True:
            # While the newcomer is built training goes on, but not far: it waits for the hold.
            if gate < fault.step + STEPS_BESIDE or (gate < limit and self._held(before)):
                gate += 1
                self._gate(gate)
            if not self._wait(partial(self._closed_or_late, before, time.monotonic() + PACE_S)):
                return False
            if self._closed(before):
                self._gate(next_step)
                return True
            if time.monotonic() > stuck_s:
                self._end_s = 0.0  # nothing of what follows could be told apart any more
                return False

    def _held(self, before: int) -> bool:
        """The move has come to where all ranks stop."""
        found = self._incidents()
        return len(found) > before and any(one.phase == "HOLD" for one in found[before].phases)

    def _over(self, before: int, next_step: int | None) -> bool:
        """The fault's incident has been closed, or the job went past it without any."""
        if self._closed(before):
            return True
        passed = next_step is not None and self._at(next_step)
        return passed and not self._opened_since(before)

    # ------------------------------------------------------------------ looking

    def _view(self) -> JobView | None:
        if self._client is None:
            for entry in registry.live(self._folder / "home"):
                if entry.jobs:
                    self._client, self._job = Client.of(entry), entry.jobs[-1]
        if self._client is None:
            return None
        try:
            return self._client.get(f"/v1/jobs/{self._job}", JobView)
        except KeepstepError:
            return None

    def _incidents(self) -> list[IncidentView]:
        """In the order they were opened."""
        if self._client is None:
            return []
        try:
            path = f"/v1/jobs/{self._job}/incidents"
            found = self._client.get(path, list[IncidentView])
        except KeepstepError:
            found = [one for past in self._past() for one in past.incidents]
        return sorted(found, key=lambda one: one.opened_at_ns)

    def _opened_since(self, before: int) -> bool:
        return len(self._incidents()) > before

    def _closed(self, before: int) -> bool:
        found = self._incidents()
        return len(found) > before and found[before].outcome != "OPEN"

    def _closed_or_late(self, before: int, end_s: float) -> bool:
        return self._closed(before) or time.monotonic() > end_s

    def _at(self, step: int) -> bool:
        view = self._view()
        return view is not None and view.committed_step >= step and view.state == "running"

    def _spare_parked(self) -> bool:
        view = self._view()
        return view is not None and any(one.state == "parked" for one in view.spares)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """False: the run has ended, or its time is over."""
        while self._process.poll() is None and time.monotonic() < self._end_s:
            if condition():
                return True
            time.sleep(POLL_S)
        return False

    def _gate(self, step: int | None) -> None:
        """No step or section begins at this version or beyond it."""
        path = self._trace / trace.GATE
        if step is None:
            path.unlink(missing_ok=True)
            return
        fresh = path.with_name("gate.new")  # a reader sees the old number or the new one
        fresh.write_text(str(step))
        fresh.rename(path)

    # ------------------------------------------------------------------ the end

    def _past(self) -> list[past_jobs.Past]:
        try:
            return past_jobs.past_jobs(self._folder / "home", latest=True)
        except (KeepstepError, OSError):
            return []

    def _outcome(self) -> RunOutcome:
        late = self._process.poll() is None
        view, incidents = (self._view(), self._incidents()) if late else (None, [])
        self.__exit__()
        for past in self._past():
            view, incidents = view or past.view, incidents or past.incidents
        known = {one.id: one for one in incidents}
        of_fault = {f: known[i] for f, i in self._opened.items() if i in known}
        # `keepstep run` numbers what it injects in the order of its arguments.
        kills = [fault.id for fault in self._faults if fault.action == "kill"]
        injected = {f"inject-{number}": fault for number, fault in enumerate(kills, 1)}
        fired = {injected[one] for one in (view.injects_fired if view else ()) if one in injected}
        fired |= {f.id for f in self._faults if f.action == "migrate" and f.id in of_fault}
        return RunOutcome(
            code=None if late else self._process.returncode,
            view=view,
            trace=read(self._trace, self._setup.world),
            words=self._log.read_text(errors="replace")[-WORDS_MAX:],
            fired=frozenset(fired),
            incidents=of_fault,
        )


def read(folder: Path, world: int) -> RunTrace:
    texts = {}
    for rank in range(world):
        path = folder / trace.file_name(rank)
        texts[rank] = path.read_bytes() if path.exists() else b""
    return rehearsal.parse(texts)


def play(setup: Setup, faults: list[FaultLine]) -> RunOutcome:
    with RehearsalRun(setup, faults) as run:
        return run.play()


def _end_with_parent() -> None:
    """Even a killed rehearsal leaves nothing: its runs get SIGTERM and end in order."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
