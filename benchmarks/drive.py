"""Jobs under `keepstep run` and under torchrun, watched by the commits that their ranks log.

The scripts in train/ append one record per committed step to a file of their rank. The clock is
the machine's monotonic one, so times of different processes can be compared, and the measurement
does not depend on what Keepstep says about itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

TRAIN = Path(__file__).parent / "train"
DEADLINE_S = 180.0
POLL_S = 0.01  # a look at a log file
# A question to the orchestrator or to /proc takes time from the job that is being measured.
ASK_S = 0.25
RECORD = struct.Struct("<qqq")  # step, time.monotonic_ns, pid


class Commit(NamedTuple):
    step: int
    at_ns: int
    pid: int


def environment(home: Path) -> dict[str, str]:
    env = {**os.environ, "KEEPSTEP_HOME": str(home), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def wall_offset_ns() -> int:
    """What to add to a monotonic time to compare it with a wall clock time."""
    return time.time_ns() - time.monotonic_ns()


class Launched:
    """A launcher's process, its ranks' logs, and everything it ever started."""

    def __init__(
        self,
        launcher: list[str],
        script: str,
        arguments: list[str],
        environ: dict[str, str] | None = None,
    ) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
        self.home = self.base / "home"
        self.out = self.base / "out"
        self.out.mkdir()
        self._log = (self.base / "launcher.log").open("w+")
        self.env = {**environment(self.home), **(environ or {})}
        command = [sys.executable, "-m", *launcher, str(TRAIN / script)]
        self.began_ns = time.monotonic_ns()
        self.process = subprocess.Popen(
            [*command, "--out", str(self.out), *arguments],
            env=self.env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.end()
        if kind is None:
            shutil.rmtree(self.base, ignore_errors=True)

    # ------------------------------------------------------------------ looking

    def output(self) -> str:
        return Path(self._log.name).read_text()

    def commits(self, rank: int) -> list[Commit]:
        path = self.out / f"rank-{rank}.commits"
        data = path.read_bytes() if path.exists() else b""
        whole = len(data) - len(data) % RECORD.size
        return [Commit(*entry) for entry in RECORD.iter_unpack(data[:whole])]

    def last_commit(self, rank: int) -> Commit | None:
        path = self.out / f"rank-{rank}.commits"
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END) // RECORD.size
                file.seek(max(0, size - 1) * RECORD.size)
                data = file.read(RECORD.size)
        except FileNotFoundError:
            return None
        return Commit(*RECORD.unpack(data)) if len(data) == RECORD.size else None

    def step(self, rank: int = 0) -> int:
        commit = self.last_commit(rank)
        return commit.step if commit is not None else 0

    def results(self, world: int) -> list[dict[str, Any]]:
        return [json.loads((self.out / f"rank-{rank}.json").read_text()) for rank in range(world)]

    def descendants(self) -> list[psutil.Process]:
        found: list[psutil.Process]
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        for process in found:
            self.seen.setdefault(process.pid, process)
        return found

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        deadline_s: float = DEADLINE_S,
        every_s: float = POLL_S,
    ) -> Any:
        end = time.monotonic() + deadline_s
        while not (value := condition()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the job ended before {what}\n{self.output()[-6000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"waited {deadline_s:g} s for {what}\n{self.output()[-6000:]}")
            time.sleep(every_s)
        return value

    # ------------------------------------------------------------------ ending

    def wait(self, deadline_s: float) -> float:
        """Seconds from the start to the launcher's exit, which must be a success."""
        self.descendants()
        code = self.process.wait(deadline_s)
        took = (time.monotonic_ns() - self.began_ns) / 1e9
        if code != 0:
            raise RuntimeError(f"exit code {code}\n{self.output()[-6000:]}")
        return took

    def end(self) -> None:
        """Stop it, politely and then not, and only what this job started."""
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.seen.values():
            try:
                process.kill()  # psutil compares creation times: a reused pid is safe
            except psutil.NoSuchProcess:
                pass
        self._log.close()


class Torchrun(Launched):
    def __init__(
        self, world: int, script: str, arguments: list[str], options: tuple[str, ...] = ()
    ) -> None:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        # This torch shares one store over all restarts without a prefix, and gloo then meets the
        # addresses of dead ranks and may wait for ever. Without sharing, restarts work.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        super().__init__([*launcher, *options], script, arguments, own)


class Keepstep(Launched):
    """One `keepstep run`, also watched through its REST interface."""

    def __init__(
        self,
        options: list[str],
        script: str,
        arguments: list[str],
        environ: dict[str, str] | None = None,
    ) -> None:
        super().__init__(["keepstep", "run", *options], script, arguments, environ)
        self.job = ""
        self._client: httpx.Client | None = None

    def client(self) -> httpx.Client:
        def connect() -> httpx.Client | None:
            for path in (self.home / "orchestrators").glob("*.json"):
                try:
                    entry = json.loads(path.read_text())
                except (OSError, ValueError):
                    continue
                if entry["jobs"]:
                    self.job = entry["jobs"][-1]
                    token = {"Authorization": f"Bearer {entry['token']}"}
                    return httpx.Client(base_url=entry["url"], headers=token, timeout=30)
            return None

        if self._client is None:
            self._client = self.until(connect, "the orchestrator")
        return self._client

    def get(self, path: str = "") -> Any:
        client = self.client()
        answer = client.get(f"/v1/jobs/{self.job}{path}")
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: dict[str, Any]) -> None:
        client = self.client()
        client.post(f"/v1/jobs/{self.job}/{path}", json=body).raise_for_status()

    def incidents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/incidents")
        return sorted(found, key=lambda incident: incident["opened_at_ns"])

    def recorded_incidents(self) -> list[dict[str, Any]]:
        """After the job's end, from its ledger, as an operator would."""
        done = subprocess.run(
            [sys.executable, "-m", "keepstep", "incidents", "--json", "--job", self.job],
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def calm(self, understudies: int = 0) -> bool:
        """Every rank runs, no incident is open, a spare is parked, and whoever is built beside it
        is ready."""
        view = self.get()
        self.descendants()
        running = view["state"] == "running" and all(r["state"] == "running" for r in view["ranks"])
        ready = any(
            spare["state"] == "parked"
            and [one["state"] for one in spare["understudies"]] == ["ready"] * understudies
            for spare in view["spares"]
        )
        return running and ready and all(x["outcome"] != "OPEN" for x in self.incidents())
