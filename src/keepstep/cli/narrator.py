"""What the launcher says about its job: incidents, holds, notes, output of ranks, and how it ended.

Everything comes from views of the orchestrator; each thing is said once. stdout is the ranks', and
stderr is ours (output.py).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from keepstep.cli.output import (
    LogTail,
    Output,
    closed_text,
    closing_text,
    opened_text,
    progress_text,
)
from keepstep.model.job import JobSpec
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator.main import ENDED
from keepstep.orchestrator.requests import Watch


class Narrator:
    def __init__(self, spec: JobSpec, output: Output) -> None:
        self.view: JobView | None = None
        self._spec = spec
        self._output = output
        self._tail = LogTail(Path(spec.directory) / "logs")
        self._incidents: dict[str, IncidentView] = {}
        self._held_said: set[str] = set()
        self._noted_ns = 0
        self._state_before_end = ""

    def learn(self, seen: Watch) -> None:
        self.view = seen.job
        if seen.job.state not in ENDED:
            self._state_before_end = seen.job.state
        self._tail.learn(seen.job)
        for incident in seen.incidents:
            before = self._incidents.get(incident.id)
            if before is None:
                self._output.words(opened_text(incident))
            if incident.outcome != "OPEN" and (before is None or before.outcome == "OPEN"):
                self._output.words(closed_text(incident))
            self._incidents[incident.id] = incident
        for note in seen.job.notes:
            if note.at_ns > self._noted_ns:
                self._output.words(f"note: {note.text}")
        self._noted_ns = max((note.at_ns for note in seen.job.notes), default=self._noted_ns)
        self._say_held(seen.job)

    def _say_held(self, view: JobView) -> None:
        if view.state != "held":
            self._held_said.clear()
            return
        if view.divergence:
            self._say_diverged(view)
            return
        if "held" not in self._held_said:
            self._held_said.add("held")
            spare = f"a spare appears: keepstep agent --job {view.job} --slots 1"
            if self._spec.provision is not None:
                spare = f"{self._spec.provision.scheduler} gives a node"
            self._output.words(
                f"job {view.job} holds: {view.reason or 'no spare is left'}. Nothing is lost; it "
                f"goes on when {spare}",
                always=True,
            )
        if view.checkpoint and view.checkpoint not in self._held_said:
            self._held_said.add(view.checkpoint)
            self._output.words(f"just-in-time checkpoint: {view.checkpoint}", always=True)

    def _say_diverged(self, view: JobView) -> None:
        """At once and in any case: whoever does not look has `hold_ns` to."""
        if view.divergence in self._held_said or self._spec.policy.on_divergence != "hold":
            return
        self._held_said.add(view.divergence)
        hold_s = self._spec.policy.hold_ns / 1e9
        limit = f"; it ends in {hold_s:g} s if nobody does" if hold_s else ""
        self._output.words(
            f"job {view.job} holds, because numbers differ: {view.divergence}. Nothing is lost or "
            f"written. `keepstep stop --job {view.job}` ends it, `keepstep proceed --job "
            f"{view.job}` goes on all the same{limit}",
            always=True,
        )

    def show_lines(self, now_s: float, *, last: bool = False) -> None:
        self._output.lines(self._tail.poll(now_s, last=last))

    def show_progress(self, view: JobView) -> None:
        self._output.progress(progress_text(view, self._incidents.get(view.last_incident)))

    def close(self, view: JobView) -> None:
        """How it ended and, if it failed, what it goes on from."""
        failed = view.exit_code != 0
        if view.state == "failed" and view.traceback:
            self._output.raw_words(view.traceback)
        self._output.words(closing_text(view, list(self._incidents.values())), always=failed)
        periodic = view.checkpoints.newest if view.checkpoints is not None else ""
        if (view.checkpoint or periodic) and failed:
            command = resume_command(self._spec, view.checkpoint or periodic)
            # A job that went on after it was held has left its checkpoint behind.
            exact = self._state_before_end == "held" or view.checkpoint in view.reason
            older = "" if view.checkpoint and exact else "an older checkpoint exists: "
            self._output.words(f"hint: {older}{command}", always=True)


def resume_command(spec: JobSpec, checkpoint: str) -> str:
    """The same job again, from where it holds."""
    command = ["keepstep", "run", "--resume", checkpoint]
    command += ["--local-nodes", str(spec.world // spec.local_world)]
    command += ["--nproc-per-node", str(spec.local_world), "--spares", str(spec.spares)]
    command += ["--understudies", str(spec.understudies)] if spec.understudies else []
    if spec.checkpoints:
        command += ["--checkpoint-dir", os.path.dirname(spec.checkpoints)]
    command += ["--redundancy", spec.redundancy] if spec.redundancy != "auto" else []
    return shlex.join(command + spec.script)
