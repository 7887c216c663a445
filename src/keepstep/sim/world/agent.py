"""An agent: its process, its stream to the orchestrator, and the production machine inside.

What the machine asks for is carried out by the node (node.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from keepstep.core.agent import actions, inputs
from keepstep.core.agent import machine as core
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.sim.ground.connections import Connection
from keepstep.sim.ground.groups import SimStore
from keepstep.sim.ground.memory import NodeMemory
from keepstep.sim.ground.world_view import SimSurroundings
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import MS, SECOND

BACKOFF_NS_MIN = 100 * MS
BACKOFF_NS_MAX = 2 * SECOND
ACCEPT_TIMEOUT_NS = 10 * SECOND


class NodeSurroundings(SimSurroundings, Protocol):
    """What a node sees of the world."""

    ranks: dict[str, Rank]

    def next_pid(self) -> int: ...

    def node_died(self, node: str) -> None:
        """Not without a sign."""
        ...


class SimAgent:
    def __init__(
        self, world: NodeSurroundings, name: str, index: int, slots: int, labels: dict[str, str]
    ) -> None:
        self.world = world
        self.name = name
        self.index = index
        self.slots = slots
        self.blobs = m.Address(name, 1)
        self.alive = True
        self.vanished = False  # died without a sign: nobody's connection is refused
        self.paused = False
        self.processes: dict[str, Rank] = {}
        self.stores: dict[int, SimStore] = {}
        self.memory = NodeMemory()
        self.machine = core.AgentMachine(
            core.MachineSetting(
                job=world.plan.job,
                node=name,
                slots=slots,
                stall_timeout_ns=world.plan.stall_ns,
                progress_ns=world.plan.progress_ns,
                labels=labels,
            ),
            world.now,
        )
        self.stream: Connection | None = None
        self.accepted = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._backoff_ns = BACKOFF_NS_MIN
        world.after(world.random.randrange(100 * MS), self.connect)
        world.at(self.machine.deadline(), self.look)

    # ------------------------------------------------------------------ process

    def later(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        self.world.after(ns, self.run, work, *args)

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """In the agent's process: not after its end, and later if it is stopped."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((work, args))
        else:
            work(*args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            backlog, self._backlog = self._backlog, []
            for work, args in backlog:
                self.run(work, *args)

    # ------------------------------------------------------------------ stream

    def connect(self) -> None:
        self.run(self._connect)

    def _connect(self) -> None:
        if self.stream is not None:
            return
        orchestrator = self.world.orchestrator
        reachable = self.world.net.both_ways(self.name, "orchestrator")
        if not orchestrator.alive or not reachable:
            self._retry()
            return
        net, job = self.world.net, self.world.plan.job
        self.stream = stream = Connection(net, job, self, orchestrator, orchestrator.epoch)
        self.accepted = False
        hello = self.machine.hello(
            self.world.now,
            token="",
            pid=self.index + 100,
            session=self.index + 100,
            blobs=self.blobs,
            workers=self._seen(),
            retained=[
                w for w, p in self.processes.items() if not p.alive and w in self.memory.pages
            ],
            stores=list(self.stores),
        )
        stream.up(hello)
        self.later(ACCEPT_TIMEOUT_NS, self._give_up, stream)

    def _give_up(self, stream: Connection) -> None:
        if self.stream is stream and not self.accepted:
            stream.close("agent")

    def _retry(self) -> None:
        wait = int(self._backoff_ns * (0.5 + self.world.random.random() / 2))
        self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_NS_MAX)
        self.world.after(wait, self.connect)

    def stream_lost(self, stream: Connection) -> None:
        if self.stream is stream:
            self.stream = None
            self.run(self._stream_lost)

    def _stream_lost(self) -> None:
        self.handle(inputs.StreamLost())
        self._retry()

    def receive(self, stream: Connection, command: agent_messages.AgentCommand) -> None:
        self.run(self._receive, stream, command)

    def _receive(self, stream: Connection, command: agent_messages.AgentCommand) -> None:
        if self.stream is not stream:
            return
        if isinstance(command, agent_messages.Accepted):
            self.accepted = True
            self._backoff_ns = BACKOFF_NS_MIN
            self.handle(inputs.HelloTaken())
        else:
            self.handle(inputs.Heard(command))

    # ------------------------------------------------------------------ machine

    def handle(self, given: inputs.Given) -> None:
        for effect in self.machine.handle(self.world.now, given):
            self.carry_out(effect)

    def carry_out(self, effect: actions.AnyEffect) -> None:
        raise NotImplementedError

    def _seen(self) -> list[inputs.Seen]:
        return [
            inputs.Seen(
                name,
                process.sample(),
                cpu_ns=self.world.now if process.hung else 0,
                stopped=process.stopped,
            )
            for name, process in self.processes.items()
            if process.alive
        ]

    def look(self) -> None:
        self.run(self._look)

    def _look(self) -> None:
        self.handle(inputs.Looked(self._seen()))
        self.world.at(self.machine.deadline(), self.look)
