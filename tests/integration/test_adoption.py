"""A training job whose agents are killed and started again: no rank is lost, no bit differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from keepstep.agent import identity, keeper
from keepstep.model.views import IncidentView, JobView, NodeView
from tests.support.commands import environment
from tests.support.job import results
from tests.support.scripts import SCRIPT
from tests.support.torchrun import differences, run_plain

STEPS = ["--epochs", "2", "--steps-per-epoch", "150"]
DEADLINE_S = 120.0
T = TypeVar("T")
PYTHON = sys.executable


class Lab:
    """An orchestrator of its own, nodes by `keepstep agent --adopt`, and a job on them."""

    def __init__(self, base: Path, stall_s: float) -> None:
        self.base, self.home, self.out = base, base / "home", base / "out"
        self.out.mkdir()
        self.slow = base / "slow"
        self.slow.touch()
        self.started: list[subprocess.Popen[str]] = []
        self.seen: dict[int, psutil.Process] = {}
        self.start("orchestrator", "--id", "main")
        self.until((self.home / "orchestrators" / "main.json").exists, "the orchestrator")
        words = ("--orchestrator", "main", "--nnodes", "2", "--nproc-per-node", "2", "--spares")
        options = ("--out", str(self.out), *STEPS, "--slow", str(self.slow))
        self.run = self.start(
            *("run", *words, "1", "--stall-timeout", str(stall_s), "--job-id", "job"),
            *(str(SCRIPT), *options),
        )
        self.nodes = {name: self.agent(name) for name in ("n0", "n1")}

    def start(self, *words: str) -> subprocess.Popen[str]:
        with (self.base / f"{len(self.started)}-{words[0]}.log").open("w") as log:
            process = subprocess.Popen(
                [PYTHON, "-m", "keepstep", *words],
                env=environment(self.home),
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def agent(self, name: str) -> subprocess.Popen[str]:
        where = ("--orchestrator", "main", "--job", "job", "--node", name)
        return self.start("agent", *where, "--adopt", "--wait")

    def cli(self, kind: type[T], *words: str) -> T:
        done = subprocess.run(
            [PYTHON, "-m", "keepstep", *words, "--job", "job", "--json"],
            env=environment(self.home),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return msgspec.json.decode(done.stdout or "[]", type=kind)

    def incidents(self) -> list[IncidentView]:
        return self.cli(list[IncidentView], "incidents")

    def view(self) -> JobView | None:
        for process in [p for p in self.started if p.poll() is None]:
            for child in psutil.Process(process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        found = self.cli(list[JobView], "status")
        return found[0] if found else None

    def node(self, name: str) -> NodeView | None:
        view = self.view()
        return next((n for n in (view.nodes if view else []) if n.node == name), None)

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"waited for {what}\n{self.logs()}"
            time.sleep(0.05)
        return value

    def until_step(self, step: int) -> JobView:
        def there() -> JobView | None:
            view = self.view()
            return view if view is not None and view.committed_step >= step else None

        return self.until(there, f"step {step}")

    def until_back(self, name: str, pid: int) -> NodeView:
        def there() -> NodeView | None:
            node = self.node(name)
            back = node is not None and node.state == "connected" and node.pid != pid
            return node if back else None

        return self.until(there, f"another agent of {name} than {pid}")

    def logs(self) -> str:
        paths = [*self.base.glob("*.log"), *self.home.rglob("*.log")]
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')[-2500:]}" for p in paths)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for folder in (self.home / "nodes").glob("*"):
            if (note := keeper.living(folder)) is not None:
                os.kill(note.pid, signal.SIGKILL)  # its workers die with it


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    it = Lab(tmp_path, stall_s=40)
    yield it
    it.close()


@pytest.mark.timeout(290)
def test_agents_are_killed_and_replaced_under_living_ranks(lab: Lab, tmp_path: Path) -> None:
    view = lab.until_step(3)
    pids = {live.rank: live.pid for live in view.ranks}
    agents = {node.node: node.pid for node in view.nodes}

    # The agent alone: its parent starts the next one.
    os.kill(agents["n1"], signal.SIGKILL)
    lab.until_back("n1", agents["n1"])
    # All of `keepstep agent`, as in an upgrade: somebody starts it again.
    lab.nodes["n0"].kill()
    lab.nodes["n0"].wait()
    lab.until(lambda: not psutil.pid_exists(agents["n0"]), "the end of the agent")
    assert keeper.living(identity.folder(lab.home, "job", "n0")) is not None
    lab.agent("n0")
    lab.until_back("n0", agents["n0"])

    view = lab.until_step(view.committed_step + 3)
    assert {live.rank: live.pid for live in view.ranks} == pids
    assert lab.incidents() == []

    # Adopted ranks can be lost and moved as any others, even with all agents at once: what is
    # needed of the dead rank is in its page, which comes back with its agent.
    os.kill(pids[1], signal.SIGKILL)
    for node in view.nodes:
        os.kill(node.pid, signal.SIGKILL)
    lab.until(lambda: [i for i in lab.incidents() if i.outcome == "RESOLVED"], "recovery")
    assert lab.cli(IncidentView, "migrate", "--rank", "2").outcome == "RESOLVED"
    lab.slow.unlink()
    assert lab.run.wait(DEADLINE_S) == 0, lab.logs()
    seen = lab.incidents()
    assert sorted(i.cause for i in seen) == ["migrate", "process-exit"]
    assert sum(i.steps_lost for i in seen) == 0
    _, left = psutil.wait_procs(list(lab.seen.values()), timeout=20)
    assert left == []

    plain = run_plain(tmp_path / "plain", 4, STEPS)
    assert differences(results(lab.out, 4), plain) == []
