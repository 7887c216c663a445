"""What the agent's machine sees and hears."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.model.messages import (
    AgentCommand,
    StartWorker,
    StoreFailed,
    StoreOpened,
    WorkerExited,
    WorkerMessage,
)
from keepstep.model.network import PathEvent
from keepstep.model.page import Sample


class Input(msgspec.Struct, frozen=True):
    pass


class Accepted(Input, frozen=True):
    """The orchestrator took our Hello: from now on what is said reaches it."""


class Lost(Input, frozen=True):
    """The stream is gone. `last_word_ns`: when the orchestrator was heard for the last time, where
    it has promised to be heard (an office held by a lease); 0: now."""

    last_word_ns: int = 0


class Heard(Input, frozen=True):
    """A command of the orchestrator."""

    command: AgentCommand


class Spawned(Input, frozen=True):
    """The process runs."""

    start: StartWorker
    pid: int


class Adopted(Input, frozen=True):
    """An earlier agent of this node has started it. The next Hello tells of it."""

    worker: str
    slot: int
    rank: int
    pid: int


class NotSpawned(Input, frozen=True):
    """It could not be started."""

    start: StartWorker
    error: str


class Said(Input, frozen=True):
    """A worker's message, to be passed on."""

    worker: str
    said: WorkerMessage


class Exited(Input, frozen=True):
    """A process of this node is gone and reaped."""

    exited: WorkerExited


class Seen(msgspec.Struct, frozen=True):
    worker: str
    sample: Sample | None
    cpu_ns: int = 0  # used by its main thread
    stopped: bool = False


class Looked(Input, frozen=True):
    """A look at the pages and processes of all workers, taken at the deadline."""

    workers: Sequence[Seen]


class StoreSaid(Input, frozen=True):
    """Answer to HostStore; it failed, too, if it ends later by itself."""

    message: StoreOpened | StoreFailed


class NetworkSaid(Input, frozen=True):
    """A word of the network plugin of one of the node's processes."""

    event: PathEvent


class StopNow(Input, frozen=True):
    """Asked for on this machine, not by the orchestrator."""

    grace_ns: int


class Emptied(Input, frozen=True):
    """Answer to EndWorkers."""

    all_gone: bool


Given = (
    Accepted
    | Lost
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
