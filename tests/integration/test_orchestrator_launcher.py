"""The launcher with real agents and workers: how jobs end, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli.agent_processes import members
from keepstep.orchestrator import registry

START_S_MAX = 40.0


def agent_sessions(launcher: int) -> set[int]:
    """Agents lead sessions of their own: their pid is the session's id."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return {int(pid) for pid in children if os.getsid(int(pid)) == int(pid)}


class Run:
    def __init__(
        self, tmp_path: Path, script: str, *options: str, home: Path | None = None
    ) -> None:
        self.home = home or tmp_path / "home"
        self.script = tmp_path / "script.py"
        self.script.write_text(script)
        self.env = {**os.environ, "KEEPSTEP_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.env.pop("RANK", None)
        self.out = (tmp_path / "out").open("w+")
        self.err = (tmp_path / "err").open("w+")
        command = [sys.executable, "-m", "keepstep", "run", *options, str(self.script), "--lr", "1"]
        self.process = subprocess.Popen(command, env=self.env, stdout=self.out, stderr=self.err)
        self.sessions: set[int] = set()

    def words(self) -> str:
        return Path(self.err.name).read_text()

    def lines(self) -> list[str]:
        return Path(self.out.name).read_text().splitlines()

    def until_line(self, word: str, count: int = 1) -> None:
        end = time.monotonic() + START_S_MAX
        while sum(word in line for line in self.lines()) < count:
            assert self.process.poll() is None, self.words()
            assert time.monotonic() < end, f"no {word!r} in {self.lines()}\n{self.words()}"
            time.sleep(0.02)
        self.sessions = agent_sessions(self.process.pid)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def nothing_left(self) -> None:
        assert self.sessions and members(self.sessions) == []

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "keepstep", *words]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.process.kill()  # its agents end with it
            run.process.wait()
        run.out.close()
        run.err.close()


SLEEPER = "import os, time\nprint('up', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


def test_signals_end_one_of_two_jobs_side_by_side(tmp_path: Path, runs: list[Run]) -> None:
    home = tmp_path / "home"
    for name, options in (("a", ["--local-nodes", "2"]), ("b", ["--nproc_per_node", "1"])):
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, SLEEPER, "--job-id", name, *options, home=home))
    first, second = runs
    first.until_line("up", 2)
    second.until_line("up")
    assert {line[:9] for line in first.lines() if "up" in line} == {"[rank 0] ", "[rank 1] "}
    assert {view["job"] for view in json.loads(first.cli("status", "--json"))} == {"a", "b"}

    first.process.send_signal(signal.SIGINT)
    assert first.wait(5.0) == 130
    first.nothing_left()
    assert [entry.id for entry in registry.live(home)] == ["b"]
    assert members(second.sessions)

    second.process.send_signal(signal.SIGTERM)
    assert second.wait(5.0) == 143
    second.nothing_left()
    assert registry.live(home) == []
    views = json.loads(first.cli("status", "--all", "--json"))
    ends = [(view["job"], view["state"], view["exit_code"]) for view in views]
    assert ends == [("b", "cancelled", 143), ("a", "cancelled", 130)]
    assert first.cli("ledger", "verify").count(": ok") == 2


def test_a_failing_script_ends_with_its_traceback_and_code_1(
    tmp_path: Path, runs: list[Run]
) -> None:
    script = "import os, sys\nprint('up', sys.argv[1:])\nraise ValueError('of the user')\n"
    run = Run(tmp_path, script, "--nproc-per-node", "1")
    runs.append(run)
    assert run.wait(START_S_MAX) == 1
    assert "ValueError: of the user" in run.words()
    assert "[rank 0] up ['--lr', '1']" in run.lines()
    assert registry.live(run.home) == []


def test_a_killed_launcher_leaves_nothing_running(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, SLEEPER, "--nproc-per-node", "1")
    runs.append(run)
    run.until_line("up")
    run.process.kill()
    run.process.wait()
    end = time.monotonic() + 5
    while members(run.sessions):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.02)
    assert registry.live(run.home) == []
