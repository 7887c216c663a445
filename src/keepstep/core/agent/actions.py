"""What the agent's machine has done: the shell carries it out in this order."""

from __future__ import annotations

import msgspec

from keepstep.model.agent_messages import AgentMessage, StartWorker
from keepstep.model.commands import WorkerCommand


class Effect(msgspec.Struct, frozen=True):
    pass


class SayUp(Effect, frozen=True):
    """Write it to the stream. If that fails and `keep` is set, hand it to `unsent`."""

    message: AgentMessage
    keep: bool = True


class Spawn(Effect, frozen=True):
    """Answered by Spawned or NotSpawned."""

    start: StartWorker


class KillProcess(Effect, frozen=True):
    """SIGKILL to its process group."""

    worker: str


class Relay(Effect, frozen=True):
    """Write the command to the worker's socket."""

    worker: str
    command: WorkerCommand


class Raise(Effect, frozen=True):
    """Send a signal, for fault injection."""

    worker: str
    signal: int
    resume_after_ns: int


class HostStore(Effect, frozen=True):
    """Answered by StoreSaid."""

    generation: int


class DropStore(Effect, frozen=True):
    """End the store's process, if it runs."""

    generation: int


class DropPage(Effect, frozen=True):
    """Nobody needs the side state of this dead worker any more."""

    worker: str


class DropCopies(Effect, frozen=True):
    """Nobody needs what ranks of generations before this one have put here as their buddy."""

    before: int


class EndWorkers(Effect, frozen=True):
    """Answered by Emptied. `finished`: they are ending by themselves."""

    grace_ns: int
    finished: bool


class EndNode(Effect, frozen=True):
    """End what is left of the node, then the agent."""

    code: int
    why: str


class KillSession(Effect, frozen=True):
    """At once and all of it, the agent included."""


AnyEffect = (
    SayUp
    | Spawn
    | KillProcess
    | Relay
    | Raise
    | HostStore
    | DropStore
    | DropPage
    | DropCopies
    | EndWorkers
    | EndNode
    | KillSession
)
