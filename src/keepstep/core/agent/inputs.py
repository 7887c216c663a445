"""What the agent's machine sees and hears."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.model.agent_messages import (
    AgentCommand,
    StartWorker,
    StoreFailed,
    StoreOpened,
    WorkerExited,
)
from keepstep.model.messages import WorkerMessage
from keepstep.model.network import PathEvent
from keepstep.model.page import Sample


class AgentInput(msgspec.Struct, frozen=True):
    pass


class HelloTaken(AgentInput, frozen=True):
    """The orchestrator took our Hello: from now on what is said reaches it."""


class StreamLost(AgentInput, frozen=True):
    """The stream is gone. `last_word_ns`: when the orchestrator was heard for the last time, where
    it has promised to be heard (an office held by a lease); 0: now."""

    last_word_ns: int = 0


class Heard(AgentInput, frozen=True):
    """A command of the orchestrator."""

    command: AgentCommand


class Spawned(AgentInput, frozen=True):
    """The process runs."""

    start: StartWorker
    pid: int


class Adopted(AgentInput, frozen=True):
    """An earlier agent of this node has started it. The next Hello tells of it."""

    worker: str
    slot: int
    rank: int
    pid: int


class NotSpawned(AgentInput, frozen=True):
    """It could not be started."""

    start: StartWorker
    error: str


class Said(AgentInput, frozen=True):
    """A worker's message, to be passed on."""

    worker: str
    said: WorkerMessage


class Exited(AgentInput, frozen=True):
    """A process of this node is gone and reaped."""

    exited: WorkerExited


class Seen(msgspec.Struct, frozen=True):
    worker: str
    sample: Sample | None
    cpu_ns: int = 0  # used by its main thread
    stopped: bool = False


class Looked(AgentInput, frozen=True):
    """A look at the pages and processes of all workers, taken at the deadline."""

    workers: Sequence[Seen]


class StoreSaid(AgentInput, frozen=True):
    """Answer to HostStore; it failed, too, if it ends later by itself."""

    message: StoreOpened | StoreFailed


class NetworkSaid(AgentInput, frozen=True):
    """A word of the network plugin of one of the node's processes."""

    event: PathEvent


class StopNow(AgentInput, frozen=True):
    """Asked for on this machine, not by the orchestrator."""

    grace_ns: int


class Emptied(AgentInput, frozen=True):
    """Answer to EndWorkers."""

    all_gone: bool


Given = (
    HelloTaken
    | StreamLost
    | Heard
    | Spawned
    | Adopted
    | NotSpawned
    | Said
    | Exited
    | Looked
    | StoreSaid
    | NetworkSaid
    | StopNow
    | Emptied
)
