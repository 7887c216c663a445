"""A job whose ranks move as images of their processes, and a CRIU and a driver that fail."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.agent import preflight
from keepstep.model.views import IncidentView
from tests.support.job import Job, wait_for
from tests.support.scripts import TESTS

SCRIPT = TESTS / "transparent" / "train.py"
FAULTY = TESTS / "transparent" / "faulty_criu.sh"
FAKE_CUDA = TESTS / "unit" / "fake_cuda.c"
Launch = Callable[..., "Transparent"]


def missing() -> str:
    """Why nothing can be moved as a whole here; empty if it can."""
    trouble = preflight.host().trouble
    if trouble:
        return "; ".join(trouble)
    words = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.strip()}"


def no_images_left(jobs: list[Job]) -> None:
    left = [path for job in jobs for path in Path("/dev/shm").glob(f"keepstep-{job.job}-*")]
    assert not left, f"images were left behind: {left}"


class Transparent:
    """A job whose ranks move as images, and what is done to it."""

    def __init__(
        self, tmp_path: Path, *words: str, nodes: int = 2, each: int = 1, **more: Any
    ) -> None:
        self.job = Job(
            *("--mode", "transparent", "--local-nodes", str(nodes), "--nproc-per-node", str(each)),
            *("--spare-nodes", "1", *more.pop("options", ())),
            script_args=[*words, "--destroy", "--slow", "yes"],
            world=nodes * each,
            script=more.pop("script", SCRIPT),
            out=tmp_path / "out",
            **more,
        )

    def train(self) -> None:
        """Until it trains and has a spare."""
        self.job.until(lambda s: s.state == "running", "training")
        self.job.spare_parked()
        self.job.until_step(self.job.step() + 2)

    def node(self, rank: int) -> str:
        return self.job.rank(rank).node

    def migrate(self, rank: int) -> IncidentView:
        """Asked for, and its end."""
        before = len(self.incidents())
        answer = self.job.post("migrate", {"ranks": [rank], "reason": "test"})
        assert answer.status_code < 300, answer.text
        return self.ended(before)

    def incidents(self) -> list[IncidentView]:
        found = self.job.live_incidents()
        assert found is not None, "there is no orchestrator"
        return found

    def ended(self, before: int) -> IncidentView:
        def done() -> IncidentView | None:
            self.job.look()
            if self.job.process.poll() is not None:
                raise AssertionError(f"the job has ended\n{self.job.output()[-6000:]}")
            found = self.incidents()[before:]
            over = bool(found) and all(i.outcome != "OPEN" for i in found)
            return found[0] if over else None

        incident = wait_for(done, "the end of the move")
        step = self.job.step()
        self.job.until_step(step + 2)  # it trains
        return incident

    def moved(self, rank: int) -> IncidentView:
        """A move that must succeed."""
        old = self.node(rank)
        self.job.spare_parked()
        incident = self.migrate(rank)
        assert incident.outcome == "RESOLVED", incident.reason
        assert self.node(rank) != old
        assert {"dump", "stream", "restore"} <= set(incident.timings_ms), incident
        return incident

    def holders(self) -> list[int]:
        """Processes of the ranks, which must stay the same."""
        return [live.pid for live in self.job.status().ranks]

    def undone(self, incident: IncidentView, words: str) -> None:
        assert incident.outcome == "ABORTED", incident
        assert incident.steps_lost == 0
        assert words in incident.reason, incident.reason
        # Ranks that held for it have connected again, all of them.
        for other in self.incidents():
            assert other.outcome in ("ABORTED", "RESOLVED"), other
            assert other.steps_lost == 0


def launching(tmp_path: Path, jobs: list[Job], *always: str) -> Iterator[Launch]:
    """The body of the fixtures `launch`."""

    def begin(*words: str, **more: Any) -> Transparent:
        started = Transparent(tmp_path, *always, *words, **more)
        jobs.append(started.job)
        return started

    yield begin
    for job in jobs:
        job.kill()
    no_images_left(jobs)


class Faults:
    """A CRIU that fails as it is told: one word in a file, until it is taken back."""

    def __init__(self, folder: Path) -> None:
        self.file, self.struck = folder / "fault", folder / "struck"
        program = folder / "criu"
        program.write_text(FAULTY.read_text())
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        os.environ["KEEPSTEP_CRIU"] = str(program)
        os.environ["FAULT_FILE"], os.environ["FAULT_STRUCK"] = str(self.file), str(self.struck)

    def set(self, word: str) -> None:
        self.struck.unlink(missing_ok=True)
        self.file.write_text(word)

    def clear(self) -> None:
        assert self.struck.exists(), "the fault never fired"
        self.file.unlink()

    def until_struck(self) -> None:
        wait_for(self.struck.exists, "the fault")


class Cuda:
    """A driver in host memory that fails when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.once = folder / "once"
        self.state = folder / "state"

    def fail_once(self, call: str) -> None:
        self.once.write_text(f"{call}=999")

    def struck(self) -> None:
        assert not self.once.exists(), "the fault never fired"
        assert self.state.read_text() == "0"
