"""A real job under `keepstep run`, watched by its REST interface and hurt.

What is seen of it is typed: `keepstep.model.views`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil
import pytest

from keepstep.model.views import IncidentView, JobView, RankView
from keepstep.orchestrator import registry
from tests.support.scripts import SCRIPT

DEADLINE_S = 120.0
T = TypeVar("T")
Result = dict[str, Any]  # what one rank wrote at its end; its parts are the script's affair


def wait_for(condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Until it is true of something."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline_s:g} s for {what}")
        time.sleep(0.005)


def environment(home: Path) -> dict[str, str]:
    env = {**os.environ, "KEEPSTEP_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    env["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints what each thread was doing: see `stuck`
    env.pop("RANK", None)
    return env


def _tail(path: Path, start: int) -> str:
    with path.open(errors="replace") as file:
        file.seek(start)
        frame = r'  File ".*?([^/"]+)", line (\d+) in (.*)'  # as short as can be: reports are cut
        return re.sub(frame, r" \1:\2 \3", file.read(16_000))


def results(out: Path, world: int) -> list[Result]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def inject(*faults: str) -> list[str]:
    """Options of a job that is to be hurt at chosen points."""
    return [word for fault in faults for word in ("--inject", fault)]


class Job:
    """One `keepstep run`, watched through its REST interface.

    It has many methods because it is the vocabulary of the cases: a line for each thing that they
    see of a job or do to it.
    """

    def __init__(
        self,
        *options: str,
        script_args: list[str] | None = None,
        world: int = 3,
        home: Path | None = None,
        out: Path | None = None,
        script: Path = SCRIPT,
        source: Path | None = None,
    ) -> None:
        """`source`: of another Keepstep than the one that is installed."""
        # Not below pytest's own folder: there are names of sockets in it, which must be short.
        self.base = base = Path(tempfile.mkdtemp(prefix="keepstep-chaos-"))
        self.home = home or base / "home"
        self.out = out or base / "out"
        self.home.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.world = world
        self.log = (base / "launcher.log").open("w+")
        # Until `hurry` the job takes its time: whatever is done to it happens while it trains.
        self.slow = base / "slow"
        self.slow.touch()
        command = [sys.executable, "-m", "keepstep", "run", *options, str(script)]
        command += ["--out", str(self.out), *(script_args or [])]
        if script_args and "--slow" in script_args:
            command[command.index("--slow") + 1] = str(self.slow)
        self.env = environment(self.home)
        if source is not None:
            self.env["PYTHONPATH"] = os.pathsep.join(
                [str(source), *filter(None, [self.env.get("PYTHONPATH")])]
            )
        self.process = subprocess.Popen(
            command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._client: httpx.Client | None = None
        self.job = ""
        self.seen: dict[int, psutil.Process] = {}
        self.last: JobView | None = None
        self.injected = [b for a, b in itertools.pairwise(options) if a == "--inject"]

    # ------------------------------------------------------------------ looking

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def _connect(self) -> httpx.Client | None:
        if self._client is None:
            # The newest first: another may have the jobs of one that was killed or stands still.
            entry = next((one for one in registry.live(self.home) if one.jobs), None)
            if entry is not None:
                self.job = entry.jobs[-1]
                headers = {"Authorization": f"Bearer {entry.token}"}
                self._client = httpx.Client(base_url=entry.url, headers=headers, timeout=10)
        return self._client

    def ask(self, path: str, kind: type[T], **query: Any) -> T | None:
        """An answer of the orchestrator; None while there is none to be had."""
        client = self._connect()
        if client is None:
            return None
        try:
            answer = client.get(f"/v1/jobs/{self.job}{path}", params=query)
        except httpx.HTTPError:
            self._client = None
            return None
        return msgspec.json.decode(answer.content, type=kind) if answer.is_success else None

    def look(self) -> JobView | None:
        """The job's view; the last one seen when the orchestrator is gone, None before any."""
        self.last = self.ask("", JobView) or self.last
        self._remember()
        return self.last

    def status(self) -> JobView:
        """The same of a job that has been seen."""
        view = self.look()
        assert view is not None, f"nobody has seen the job yet\n{self.output()[-6000:]}"
        return view

    def disconnect(self) -> None:
        """The next question finds out anew who is there to answer it."""
        self._client = None

    def reached(self) -> httpx.Client:
        """The connection itself."""
        client = self._connect()
        assert client is not None, "there is no orchestrator"
        return client

    def _remember(self) -> None:
        """Every process the job ever had, to see that none is left."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            pass

    def rank(self, rank: int) -> RankView:
        return self.status().ranks[rank]

    def step(self) -> int:
        view = self.look()
        return -1 if view is None else view.committed_step

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended before step {step}\n{self.output()[-6000:]}")
            return self.step() >= step

        wait_for(reached, f"step {step}")

    def until(
        self, condition: Callable[[JobView], T], what: str, deadline_s: float = DEADLINE_S
    ) -> T:
        def check() -> T | None:
            view = self.look()
            if view is None:
                return None
            value = condition(view)
            if not value and self.process.poll() is not None:
                raise AssertionError(f"the job ended before {what}\n{self.output()[-6000:]}")
            return value

        return wait_for(check, what, deadline_s)

    def spare_parked(self, count: int = 1) -> None:
        self.until(
            lambda s: sum(spare.state == "parked" for spare in s.spares) >= count,
            f"{count} parked spare(s)",
        )

    def incidents(self) -> list[IncidentView]:
        """In the order they were opened; after the end of the job from its ledger."""
        answer = self.cli_as(list[IncidentView], "incidents", "--job", self.job)
        return sorted(answer, key=lambda incident: incident.opened_at_ns)

    def live_incidents(self) -> list[IncidentView] | None:
        """The same while the job runs, at less cost; None while the orchestrator is away."""
        answer = self.ask("/incidents", list[IncidentView])
        return answer and sorted(answer, key=lambda incident: incident.opened_at_ns)

    def until_closed(self, count: int) -> None:
        """Incidents that are over."""

        def closed() -> bool:
            seen = self.live_incidents() or []
            return sum(one.outcome != "OPEN" for one in seen) >= count

        wait_for(closed, f"{count} closed incident(s)")

    def unfired(self) -> list[str]:
        """Faults that were injected and did not come, as far as can be told by their number."""
        if not self.injected:
            return []
        fired = self.last.injects_fired if self.last is not None else []
        if len(fired) < len(self.injected):  # the last ones may have come behind the last look
            ended = self.cli_as(list[JobView], "status", "--job", self.job)
            self.last = ended[0] if ended else self.last
            fired = self.last.injects_fired if self.last is not None else []
        if len(fired) >= len(self.injected):
            return []
        return [f"{len(fired)} of {len(self.injected)}: {', '.join(self.injected)}"]

    # ------------------------------------------------------------------ doing

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "keepstep", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def cli_as(self, kind: type[T], *words: str) -> T:
        done = self.cli(*words, "--json")
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout, type=kind)

    def verify_ledger(self) -> None:
        verified = self.cli("ledger", "verify")
        assert verified.returncode == 0, verified.stderr

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.reached().post(f"/v1/jobs/{self.job}/{path}", json=body)

    def kill_node(self, node: str) -> None:
        """By its agent, at once."""
        id = f"kill-{node}-{len(self.injected)}"
        self.post("inject", {"id": id, "action": "kill-node", "node": node}).raise_for_status()
        self.injected.append(f"kill-node:node={node}")

    def kill_rank(self, rank: int, how: int = signal.SIGKILL) -> int:
        pid = self.rank(rank).pid
        os.kill(pid, how)
        return pid

    def hurry(self) -> None:
        self.slow.unlink(missing_ok=True)

    # ------------------------------------------------------------------ ending

    def finish(self, code: int = 0, deadline_s: float = DEADLINE_S) -> None:
        self.hurry()
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.look()
            if time.monotonic() > end:
                raise TimeoutError(self.stuck())
            time.sleep(0.02)
        got = self.process.returncode
        assert got == code, f"exit code {got}, expected {code}\n{self.output()[-8000:]}"
        self.nothing_left()

    def stuck(self) -> str:
        """Ends a job that does not end by itself, and says what its ranks were doing."""
        view = self.look()
        if view is None:
            self.kill()
            return f"job did not begin\n{self.output()[-4000:]}"
        incidents = self.incidents()
        lengths = {path: path.stat().st_size for path in self.home.rglob("*.log")}
        for rank in view.ranks:
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGSTOP)  # nobody acts on the end of another
        for rank in view.ranks:
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGABRT)
                os.kill(rank.pid, signal.SIGCONT)
        psutil.wait_procs([self.seen[r.pid] for r in view.ranks if r.pid in self.seen], timeout=5)
        self.kill()
        names = {rank.worker for rank in view.ranks}
        logs = [f"{p.name}: {_tail(p, at)}" for p, at in lengths.items() if p.stem in names]
        about = (view.state, view.reason, view.generation, view.committed_step)
        ranks = [(r.rank, r.worker, r.state) for r in view.ranks]
        output = self.output()[-4000:]
        found = [msgspec.json.encode(one).decode() for one in (*incidents, view)]
        return "\n".join([f"job did not end: {about} {ranks}", *logs, output, *found])

    def nothing_left(self, within_s: float = 5.0) -> None:
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=within_s)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not alive, f"left running: {[(p.pid, p.cmdline()) for p in alive]}"

    def kill(self) -> None:
        self._remember()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.seen.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass

    def results(self) -> list[Result]:
        return results(self.out, self.world)


@contextlib.contextmanager
def ending(request: pytest.FixtureRequest) -> Iterator[list[Job]]:
    """Jobs that end with the test. What they leave behind stays only if it failed."""
    jobs: list[Job] = []
    failed = request.session.testsfailed
    yield jobs
    for job in jobs:
        job.kill()
        job.log.close()
        if request.session.testsfailed == failed:
            shutil.rmtree(job.base, ignore_errors=True)
