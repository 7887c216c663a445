"""What a part of a world sees of the world around it.

A process, a node and the orchestrator know each other and whoever looks on only by these
interfaces, which the world and the parts themselves fulfil. `Rules` is whoever looks on: it is told
of what happens, by names, and ends the world when a rule is broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from keepstep.core.control import Core, Outcome
from keepstep.core.state import Job
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.model.job import CoreInput
from keepstep.model.records import Record
from keepstep.sim.ground.connections import Net, Reachable, ServerEnd
from keepstep.sim.ground.disk import SharedDisk
from keepstep.sim.ground.groups import SimStore
from keepstep.sim.ground.ills import Ills
from keepstep.sim.ground.memory import NodeMemory
from keepstep.sim.ground.training import Undisturbed
from keepstep.sim.plans.world_plan import Plan


class HomeNode(Reachable, Protocol):
    """The node of a process, and the nodes that it asks for something."""

    memory: NodeMemory
    disk: str
    stores: dict[int, SimStore]

    def said(self, worker: str, message: m.WorkerMessage) -> None: ...

    def process_ended(self, worker: str, code: int, tail: str) -> None: ...


class StateHolder(Protocol):
    """A process that may hold the state that another one needs."""

    @property
    def node(self) -> HomeNode: ...

    @property
    def rank(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...

    @property
    def mode(self) -> str: ...

    @property
    def held_generation(self) -> int: ...

    @property
    def tick(self) -> int: ...

    @property
    def shared(self) -> int: ...

    @property
    def shard(self) -> int: ...


class Rules(Protocol):
    # the orchestrator
    def durable(self, records: list[Record]) -> None: ...

    def replayed(self, job: Job, disk: list[Record]) -> None: ...

    def handled(self, core: Core, given: CoreInput, outcome: Outcome) -> None: ...

    def sent(self, node: str, command: agent_messages.AgentCommand) -> None: ...

    def acted(self, job: Job) -> None: ...

    # nodes
    def refused(self, node: str, worker: str) -> None: ...

    def spawned(self, worker: str) -> None: ...

    def fenced(self, node: str) -> None: ...

    def forced(self, worker: str) -> None: ...

    # ranks
    def said(self, worker: str, message: m.WorkerMessage) -> None: ...

    def acknowledged(self, node: str, rank: int, tick: int) -> None:
        """A buddy has taken a side state."""
        ...

    def swapped(self, worker: str) -> None: ...

    def committed(self, worker: str) -> None: ...

    def went_on(self, worker: str) -> None:
        """Numbers differ, and it was told that it may go on."""
        ...

    # whoever plays the world
    def before_healing(self) -> None: ...

    def at_rest(self) -> None: ...


class OrchestratorEnd(ServerEnd, Protocol):
    """The orchestrator, from below."""

    @property
    def alive(self) -> bool: ...

    @property
    def epoch(self) -> int: ...


class SimSurroundings(Protocol):
    plan: Plan
    net: Net
    ills: Ills
    shared_disk: SharedDisk
    truth: Undisturbed
    target: int
    rules: Rules

    @property
    def now(self) -> int: ...

    @property
    def random(self) -> random.Random: ...

    @property
    def nodes(self) -> Mapping[str, HomeNode]: ...

    @property
    def ranks(self) -> Mapping[str, StateHolder]: ...

    @property
    def orchestrator(self) -> OrchestratorEnd: ...

    def at(self, time: int, work: Callable[..., None], *args: Any) -> None: ...

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None: ...

    def trace(self, what: str) -> None: ...

    def fired(self, what: str) -> None: ...

    def blobs_at(self, address: m.Address) -> HomeNode: ...

    def store_at(self, address: m.Address) -> HomeNode: ...
