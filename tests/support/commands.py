"""One `keepstep run` (or another command) as a user starts it: its words, its end, its remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support import scripts

SCRIPTS = scripts.TESTS / "integration" / "scripts"
PLAIN = str(scripts.PLAIN)
PYTHON = sys.executable
DEADLINE_S = 90.0
# A rank of somebody else must not become one of ours.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(home: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in (*TORCHRUN, "KEEPSTEP_TOKEN")}
    return {**env, "KEEPSTEP_HOME": str(home), "OMP_NUM_THREADS": "1"}


def command(
    words: list[str], home: Path, cwd: Path | None = None, timeout_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, *words],
        env=environment(home),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Job:
    def __init__(self, base: Path, *words: str, cwd: Path | None = None) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.home = base / "home"
        self._out, self._err = base / "out", base / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "keepstep", "run", *words],
                env=environment(self.home),
                cwd=cwd,
                stdout=out,
                stderr=err,
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert self.process.poll() is None, f"ended before {what}\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"waited for {what}\n{self.out}\n{self.err}"
            self._look()
            time.sleep(0.05)
        return value

    def end(self, code: int) -> None:
        """Wait for the launcher's end; nothing it ever started may be left then."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"does not end\n{self.out}\n{self.err}"
            self._look()
            time.sleep(0.05)
        assert self.process.returncode == code, f"{self.out}\n{self.err}"
        assert self._seen
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=5.0)
        assert alive == []

    def cli(self, *words: str) -> str:
        done = command(["-m", "keepstep", *words], self.home)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cli_json(self, *words: str) -> Any:
        return json.loads(self.cli(*words, "--json"))

    def kill(self) -> None:
        """However a test ended: agents and ranks die with their launcher."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            pass
