"""Run a real job under `keepstep run`, hurt it, and hold it against an undisturbed one."""

from __future__ import annotations

import contextlib
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
from typing import Any

import httpx
import psutil
import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "train.py"
PLAIN = HERE.parent / "plain.py"
SHAPES = HERE / "shapes.py"
LAYOUTS = HERE / "layouts.py"
DATA_ORDER = HERE / "data_order.py"
DEADLINE_S = 120.0


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
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


def results(out: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def _tail(path: Path, start: int) -> str:
    with path.open(errors="replace") as file:
        file.seek(start)
        frame = r'  File ".*?([^/"]+)", line (\d+) in (.*)'  # as short as can be: reports are cut
        return re.sub(frame, r" \1:\2 \3", file.read(16_000))


def run_plain(
    out: Path, world: int, script_args: list[str], script: Path = SCRIPT
) -> list[dict[str, Any]]:
    """The same script under plain torchrun: the numbers everything is held against."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--log-dir", str(out / "logs")]
    command += ["--nproc-per-node", str(world), str(PLAIN)]
    command += [str(script), "--out", str(out), *script_args]
    done = subprocess.run(
        command, env=environment(out), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return results(out, world)


class Job:
    """One `keepstep run`, watched through its REST interface."""

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
        self.last: dict[str, Any] = {}

    # ------------------------------------------------------------------ looking

    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def _connect(self) -> httpx.Client | None:
        if self._client is None:
            for path in (self.home / "orchestrators").glob("*.json"):
                try:
                    entry = json.loads(path.read_text())
                except FileNotFoundError:
                    continue  # it ends just now
                # A killed orchestrator leaves its file behind; another may have its jobs now.
                if entry["jobs"] and psutil.pid_exists(entry["pid"]):
                    self.job = entry["jobs"][-1]
                    self._client = httpx.Client(
                        base_url=entry["url"],
                        headers={"Authorization": f"Bearer {entry['token']}"},
                        timeout=10,
                    )
        return self._client

    def status(self) -> dict[str, Any]:
        """The job's view; the last one seen when the orchestrator is gone."""
        client = self._connect()
        if client is not None:
            try:
                answer = client.get(f"/v1/jobs/{self.job}")
                if answer.status_code == 200:
                    self.last = answer.json()
            except httpx.HTTPError:
                self._client = None
        self._remember()
        return self.last

    def _remember(self) -> None:
        """Every process the job ever had, to see that none is left."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            pass

    def rank(self, rank: int) -> dict[str, Any]:
        view: dict[str, Any] = self.status()["ranks"][rank]
        return view

    def step(self) -> int:
        status = self.status()
        return int(status.get("committed_step", -1)) if status else -1

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended before step {step}\n{self.output()[-6000:]}")
            return self.step() >= step

        wait_for(reached, f"step {step}")

    def until(
        self, condition: Callable[[dict[str, Any]], Any], what: str, deadline_s: float = DEADLINE_S
    ) -> Any:
        def check() -> Any:
            status = self.status()
            if not status:
                return None
            value = condition(status)
            if not value and self.process.poll() is not None:
                raise AssertionError(f"the job ended before {what}\n{self.output()[-6000:]}")
            return value

        return wait_for(check, what, deadline_s)

    def spare_parked(self, count: int = 1) -> None:
        self.until(
            lambda s: sum(x["state"] == "parked" for x in s["spares"]) >= count,
            f"{count} parked spare(s)",
        )

    def incidents(self) -> list[dict[str, Any]]:
        """In the order they were opened; after the end of the job from its ledger."""
        answer: list[dict[str, Any]] = self.cli_json("incidents", "--job", self.job)
        return sorted(answer, key=lambda incident: incident["opened_at_ns"])

    # ------------------------------------------------------------------ doing

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "keepstep", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def cli_json(self, *words: str) -> Any:
        done = self.cli(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        client = self._connect()
        assert client is not None
        return client.post(f"/v1/jobs/{self.job}/{path}", json=body)

    def kill_rank(self, rank: int, how: int = signal.SIGKILL) -> int:
        pid = int(self.rank(rank)["pid"])
        os.kill(pid, how)
        return pid

    def hurry(self) -> None:
        self.slow.unlink(missing_ok=True)

    # ------------------------------------------------------------------ ending

    def finish(self, code: int = 0, deadline_s: float = DEADLINE_S) -> None:
        self.hurry()
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.status()
            if time.monotonic() > end:
                raise TimeoutError(self.stuck())
            time.sleep(0.02)
        got = self.process.returncode
        assert got == code, f"exit code {got}, expected {code}\n{self.output()[-8000:]}"
        self.nothing_left()

    def stuck(self) -> str:
        """Ends a job that does not end by itself, and says what its ranks were doing."""
        status, incidents = self.status(), self.incidents()
        lengths = {path: path.stat().st_size for path in self.home.rglob("*.log")}
        for rank in status.get("ranks", []):
            with contextlib.suppress(OSError):
                os.kill(rank["pid"], signal.SIGSTOP)  # nobody acts on the end of another
        for rank in status.get("ranks", []):
            with contextlib.suppress(OSError):
                os.kill(rank["pid"], signal.SIGABRT)
                os.kill(rank["pid"], signal.SIGCONT)
        gone = [self.seen[r["pid"]] for r in status.get("ranks", []) if r["pid"] in self.seen]
        psutil.wait_procs(gone, timeout=5)
        self.kill()
        names = {rank["worker"] for rank in status.get("ranks", [])}
        logs = [f"{p.name}: {_tail(p, at)}" for p, at in lengths.items() if p.stem in names]
        known = ("state", "reason", "generation", "committed_step")
        about = {key: status.get(key) for key in known}
        ranks = [(r["rank"], r["worker"], r["state"]) for r in status.get("ranks", [])]
        output = self.output()[-4000:]
        found = [json.dumps(one) for one in (*incidents, status)]
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

    def results(self) -> list[dict[str, Any]]:
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


def differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    """Which parts of which rank differ; empty means bit-identical."""
    found = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        if x["sha256"] != y["sha256"]:
            parts = [k for k in x["state"] if x["state"][k] != y["state"][k]]
            found.append(f"rank {rank}: {', '.join(parts)}")
    return found


report: list[dict[str, Any]] = []  # written by conftest.py at the end


class Verdict:
    """Holds a finished job against the reference and writes the report."""

    def __init__(self, name: str) -> None:
        self.name = name

    def identical(
        self, job: Job, expected: list[dict[str, Any]], *, faults: int, incidents: int | None = None
    ) -> list[dict[str, Any]]:
        """All resolved, nothing lost, every injected fault fired, every bit equal."""
        seen = job.incidents()
        entry = {
            "cell": self.name,
            "faults": faults,
            "incidents": [
                {
                    k: i[k]
                    for k in ("trigger", "cause", "victims", "decision", "outcome", "attempts")
                }
                | {"pause_ms": round(i["pause_ms"], 1), "lost": i["steps_lost"]}
                for i in seen
            ],
            "different": differences(job.results(), expected),
        }
        report.append(entry)
        assert entry["different"] == [], entry
        assert all(i["outcome"] in ("RESOLVED", "ABORTED") for i in seen), seen
        assert sum(i["steps_lost"] for i in seen) == 0
        if incidents is not None:
            assert len(seen) == incidents, [(i["cause"], i["victims"], i["reason"]) for i in seen]
        verified = job.cli("ledger", "verify")
        assert verified.returncode == 0, verified.stderr
        return seen

    def note(self, faults: int, what: str) -> None:
        report.append({"cell": self.name, "faults": faults, "result": what, "different": []})
