"""An orchestrator of its own that a test kills and starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.job import environment, wait_for
from tests.support.scripts import SUPPORT


class Brain:
    """An orchestrator that can be told when to die."""

    program = SUPPORT / "crashing_orchestrator.py"

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.plan = folder / "plan"
        self.death = folder / "died-at"
        self.log = (folder / "brain.log").open("ab")
        self.start()
        wait_for((self.home / "orchestrators" / "brain.json").exists, "the orchestrator")

    def start(self) -> None:
        command = [sys.executable, str(self.program), "orchestrator"]
        env = {**environment(self.home), "BRAIN_PLAN": str(self.plan)}
        self.process = subprocess.Popen([*command, "--id", "brain"], env=env, stderr=self.log)

    def die_at(self, when: str, append: int) -> None:
        self.death.unlink(missing_ok=True)
        self.give_plan(f"{when} {append}")

    def give_plan(self, text: str) -> None:
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(self.plan)

    def died(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()
