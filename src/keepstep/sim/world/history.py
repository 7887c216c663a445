"""What is seen of a world from outside: lines of its trace, their digest, and reasons it heard."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from keepstep.core.control import Outcome
from keepstep.core.state import Job
from keepstep.model import agent_messages
from keepstep.model.job import (
    AgentGone,
    AgentJoined,
    AgentSaid,
    AgentsSaid,
    CoreInput,
    NodeDead,
    Submit,
)
from keepstep.model.records import Record

SAYING = ("reason", "why", "message", "detail")  # fields of records that carry words


class History:
    def __init__(self, tracing: Callable[[str], None] | None, beside: History | None) -> None:
        """`beside`: of another job of the same orchestrator, which has the same digest."""
        self.said: set[str] = set()  # reasons of decisions
        self._digest: blake2b = blake2b(digest_size=8) if beside is None else beside._digest
        self._tracing = tracing

    def add(self, now: int, what: str, columns: Callable[[], str]) -> None:
        line = f"{now} {what}\n"
        self._digest.update(line.encode())
        if self._tracing is not None:
            self._tracing(f"{now / 1e9:9.3f}  {columns()}  {what}")

    def digest(self) -> str:
        return self._digest.hexdigest()

    def hear(self, records: list[Record], job: Job) -> None:
        for record in records:
            for field in SAYING:
                said = getattr(record, field, "")
                if said:
                    self.said.add(said)
            view = getattr(record, "view", None)
            if view is not None:
                self.said.add(view.reason)
        # Reasons for waiting stand in no record; operators see them.
        if job.reason:
            self.said.add(job.reason)
        if job.attempt is not None and job.attempt.no_spare:
            self.said.add(job.attempt.no_spare)
        for incident in job.incidents:
            self.said.add(incident.reason)


def line(given: CoreInput, outcome: Outcome) -> str:
    """An input, what was decided, and what is to be done."""
    records = "".join(f" | {type(record).__name__}" for record in outcome.records)
    commands = "".join(f" > {_command(send.command)}" for send in outcome.sends)
    return _short(given) + records + commands


def _short(given: CoreInput) -> str:
    if isinstance(given, AgentsSaid):
        return "; ".join(map(_short, given.said))
    if isinstance(given, AgentSaid):
        message = given.message
        if isinstance(message, agent_messages.WorkersSaid):
            return "; ".join(
                f"{one.worker} {type(one.said).__name__} {getattr(one.said, 'generation', '')}"
                for one in message.said
            )
        if isinstance(message, agent_messages.WorkerSaid):
            generation = getattr(message.said, "generation", "")
            return f"{message.worker} {type(message.said).__name__} {generation}"
        return f"{given.node} {type(message).__name__} {getattr(message, 'worker', '')}"
    if isinstance(given, AgentJoined | AgentGone | NodeDead):
        return f"{given.node} {type(given).__name__}"
    return type(given).__name__ + str(msgspec.structs.astuple(given)[1:])[:60] * (
        not isinstance(given, Submit)
    )


def _command(command: agent_messages.AgentCommand) -> str:
    if isinstance(command, agent_messages.Tell):
        told = command.command
        return f"{command.worker}:{type(told).__name__} {getattr(told, 'generation', '')}"
    if isinstance(command, agent_messages.TellRanks):
        told = command.command
        return f"ranks:{type(told).__name__} {getattr(told, 'generation', '')}"
    return f"{type(command).__name__} {getattr(command, 'worker', '')}"
