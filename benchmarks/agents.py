"""Agents without nodes, for the `scale` part: they take commands and answer at once.

`Node` is one agent with its workers; nothing runs and nothing is computed, so what a benchmark
measures around it is the control plane alone. `Cluster` joins such nodes to a core in one process
under a virtual clock, with a fixed delay of the network. `over_sockets` gives each of them a real
stream to a real orchestrator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from keepstep.core.control import EVERY_NODE, Core, Outcome
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model.job import (
    AgentJoined,
    AgentSaid,
    AgentsSaid,
    CoreInput,
    JobSpec,
    NodeSpec,
    Submit,
    Taint,
    Untaint,
    Wake,
)
from keepstep.model.records import AttemptStarted, Record

SECOND = 1_000_000_000
DELAY_NS = 500_000  # one way
SLOTS = 8
SPARES = 8
TICK = 5  # at which every rank is found
SERVE = m.Address("10.0.0.1", 5000)


def spec_of(ranks: int) -> JobSpec:
    """Eight ranks a node, and one node more for spares."""
    names = [f"n{number}" for number in range(ranks // SLOTS + 1)]
    return JobSpec(
        job="scale",
        world=ranks,
        local_world=SLOTS,
        nodes=[NodeSpec(name=name, slots=SLOTS) for name in names],
        spares=SPARES,
        stall_timeout_ns=60 * SECOND,
        script=["train.py"],
        directory="/jobs/scale",
    )


@dataclass(slots=True)
class Process:
    id: str
    slot: int
    rank: int
    generation: int
    tick: int = 1
    joining: bool = False


@dataclass(slots=True)
class Node:
    name: str
    index: int
    processes: dict[str, Process] = field(default_factory=dict)

    def hello(self, token: str = "") -> agent_messages.Hello:
        return agent_messages.Hello(
            protocol=m.PROTOCOL,
            token=token,
            job="scale",
            node=self.name,
            pid=1000 + self.index,
            session=1000 + self.index,
            blobs=m.Address(f"10.{self.index >> 16}.{self.index >> 8 & 255}.1", self.index & 255),
            slots=SLOTS,
        )

    def progress(self) -> agent_messages.Progress:
        for process in self.processes.values():
            process.tick += process.rank >= 0
        return agent_messages.Progress(
            workers=[
                agent_messages.WorkerState(
                    worker=p.id,
                    slot=p.slot,
                    pid=p.slot + 1,
                    rank=p.rank,
                    generation=p.generation,
                    version=p.tick,
                    tick=p.tick,
                    where="compute" if p.rank >= 0 else "parked",
                    steps_per_s=1.0,
                )
                for p in self.processes.values()
            ]
        )

    def die(self, process: Process, code: int) -> list[agent_messages.AgentMessage]:
        if self.processes.pop(process.id, None) is None:
            return []
        return [
            agent_messages.WorkerExited(worker=process.id, rank=process.rank, code=code, tail="")
        ]

    def meant(self, command: agent_messages.AgentCommand) -> list[Process]:
        """The processes that a Tell or TellRanks is for."""
        if isinstance(command, agent_messages.Tell):
            return [p for p in self.processes.values() if p.id == command.worker]
        if isinstance(command, agent_messages.TellRanks):
            ranks = [p for p in self.processes.values() if p.rank >= 0]
            return [p for p in ranks if p.id not in command.besides]
        return []

    def take(self, command: agent_messages.AgentCommand) -> list[agent_messages.AgentMessage]:
        """Carry out one command; what there is to say about it."""
        if isinstance(command, agent_messages.Tell):
            process = self.processes.get(command.worker)
            return [] if process is None else self._told(process, command.command)
        if isinstance(command, agent_messages.TellRanks):
            told = self.meant(command)
            return _gathered([said for p in told for said in self._told(p, command.command)])
        if isinstance(command, agent_messages.StartWorker):
            process = Process(command.worker, command.slot, command.rank, command.generation)
            self.processes[process.id] = process
            started = agent_messages.WorkerStarted(
                worker=process.id, slot=process.slot, pid=process.slot + 1
            )
            first: m.WorkerMessage = m.Parked(where="train.py:1", warm_ns=1)
            if command.rank >= 0:
                first = m.Attached(
                    generation=command.generation,
                    groups=["0"],
                    parameters=1,
                    bytes_state=1,
                    redundant=True,
                )
            return [started, _said(process, first)]
        if isinstance(command, agent_messages.KillWorker):
            process = self.processes.get(command.worker)
            return [] if process is None else self.die(process, -9)
        if isinstance(command, agent_messages.OpenStore):
            return [agent_messages.StoreOpened(generation=command.generation, store=SERVE)]
        return []

    def _told(
        self, process: Process, command: commands.WorkerCommand
    ) -> list[agent_messages.AgentMessage]:
        if isinstance(command, commands.Leave):
            return self.die(process, 0)
        return [_said(process, answer) for answer in _answers(process, command)]


def _gathered(answers: list[agent_messages.AgentMessage]) -> list[agent_messages.AgentMessage]:
    """Ranks that answer together are heard together, once for each kind of answer."""
    kinds: dict[type, list[agent_messages.WorkerSaid]] = {}
    for one in answers:
        assert isinstance(one, agent_messages.WorkerSaid)
        kinds.setdefault(type(one.said), []).append(one)
    return [agent_messages.WorkersSaid(said=said) for said in kinds.values()]


def _said(process: Process, said: m.WorkerMessage) -> agent_messages.WorkerSaid:
    return agent_messages.WorkerSaid(worker=process.id, rank=process.rank, said=said)


def _answers(process: Process, command: commands.WorkerCommand) -> list[m.WorkerMessage]:
    generation: int = getattr(command, "generation", 0)
    if isinstance(command, commands.Assign):
        process.rank, process.joining = command.rank, True
        return [m.Arrived(generation=generation)]
    if isinstance(command, commands.Position):
        return [m.Ready(generation=generation, arrived_ns=1, warm_ns=1)]
    if isinstance(command, commands.Abort):
        report = m.Report(
            generation=generation, tick=TICK, version=TICK, in_fence=False, computing=True
        )
        return [] if process.joining else [report]
    if isinstance(command, commands.Stage):
        return [m.Staged(generation=generation)]
    if isinstance(command, commands.Decide | commands.Hold):
        return [m.Held(generation=generation, tick=TICK, version=TICK, serve=SERVE, pid=1)]
    if isinstance(command, commands.Copy):
        copied = m.Copied(
            generation=generation,
            tick=command.tick,
            bytes_copied=1,
            copy_ns=1,
            sources=[command.sources[0].rank],
            side_state="own-agent",
        )
        return [copied]
    if isinstance(command, commands.Swap):
        process.generation, process.joining = generation, False
        resumed = m.Resumed(
            generation=generation,
            tick=TICK + 1,
            version=TICK + 1,
            last_commit_ns=1,
            first_commit_ns=2,
            median_step_ns=1,
        )
        return [m.Swapped(generation=generation, swap_ns=1), resumed]
    return []


@dataclass(slots=True)
class Move:
    """What one migration cost."""

    signal_cpu_ms: float  # handling the signal, up to the plan with all its first commands
    signal_wall_ms: float
    cpu_s: float = 0.0
    inputs: int = 0
    commands: int = 0
    pause_ms: float = 0.0


class Cluster:
    """A core and simulated nodes under a virtual clock. With `charge`, the CPU time that the core
    takes also passes on that clock, as if it had a core of its own and agents took no time."""

    def __init__(self, ranks: int, charge: bool = False) -> None:
        self.core = Core()
        self.now = 1_000 * SECOND
        self.charge = charge
        self.cpu_ns = 0
        self.inputs = 0
        self.commands = 0
        self.stood_at: int | None = None  # first rank told to stop
        self.went_on_at = 0  # last rank told to go on
        self.spec = spec_of(ranks)
        self.nodes = {n.name: Node(n.name, i) for i, n in enumerate(self.spec.nodes)}
        self._queue: deque[tuple[int, AgentSaid]] = deque()  # the delay is fixed: always in order

    def start(self) -> None:
        self.handle(Submit(spec=self.spec))
        for node in self.nodes.values():
            self.handle(AgentJoined(job="scale", node=node.name, hello=node.hello()))
        self.drain()
        state = self.core.state("scale")
        assert state.mode == "running" and len(state.spares()) == SPARES, state.mode

    def handle(self, event: CoreInput, inputs: int = 1) -> list[Record]:
        began = time.thread_time_ns()
        outcome = self.core.handle(self.now, event)
        self.core.deadline()  # the driver asks for it after every input
        cpu_ns = time.thread_time_ns() - began
        self.cpu_ns += cpu_ns
        self.inputs += inputs
        if self.charge:
            self.now += cpu_ns
        self._deliver(outcome)
        return outcome.records

    def _deliver(self, outcome: Outcome) -> None:
        there = self.now + DELAY_NS
        for send in outcome.sends:
            command = send.command
            told = (
                command.command
                if isinstance(command, agent_messages.Tell | agent_messages.TellRanks)
                else None
            )
            if isinstance(told, commands.Hold | commands.Abort) and self.stood_at is None:
                self.stood_at = there
            elif isinstance(told, commands.Swap):
                self.went_on_at = there
            nodes = list(self.nodes) if send.node == EVERY_NODE else [send.node]
            self.commands += len(nodes)
            for name in nodes:
                for message in self.nodes[name].take(command):
                    said = AgentSaid(job="scale", node=name, message=message)
                    self._queue.append((there + DELAY_NS, said))

    def drain(self) -> None:
        """Until everything is answered."""
        while self._queue:
            self.now = max(self.now, self._queue[0][0])
            said = []
            while self._queue and self._queue[0][0] <= self.now:
                said.append(self._queue.popleft()[1])  # what has come by now, as the driver does
            self.handle(AgentsSaid(job="scale", said=said), len(said))

    def later(self, ns: int) -> None:
        self.now += ns
        due = self.core.deadline(self.now)
        if due is not None and due <= self.now:
            self.handle(Wake())
        self.drain()

    def kill(self, rank: int) -> Move:
        job = self.core.state("scale")
        worker = job.workers[job.owners[rank]]
        node = self.nodes[worker.node]
        died_at = self.now
        (exited,) = node.die(node.processes[worker.id], -9)
        self.now += DELAY_NS
        return self._move(AgentSaid(job="scale", node=node.name, message=exited), died_at)

    def taint(self, rank: int) -> Move:
        """Move a rank away from its slot before anything happens to it."""
        job = self.core.state("scale")
        place = job.workers[job.owners[rank]].place
        move = self._move(Taint(job="scale", target=place, reason="benchmark"), None)
        self.handle(Untaint(job="scale", target=place))
        self.drain()
        return move

    def _move(self, signal: CoreInput, stands_since: int | None) -> Move:
        generation = self.core.state("scale").generation
        cpu_ns, inputs, commands = self.cpu_ns, self.inputs, self.commands
        self.stood_at = stands_since
        began = time.perf_counter_ns()
        records = self.handle(signal)
        wall_ns = time.perf_counter_ns() - began
        assert any(isinstance(record, AttemptStarted) for record in records), records
        move = Move(signal_cpu_ms=(self.cpu_ns - cpu_ns) / 1e6, signal_wall_ms=wall_ns / 1e6)
        self.drain()
        job = self.core.state("scale")
        assert job.generation == generation + 1 and not job.incidents and job.attempt is None
        assert self.stood_at is not None
        move.cpu_s = (self.cpu_ns - cpu_ns) / 1e9
        move.inputs, move.commands = self.inputs - inputs, self.commands - commands
        move.pause_ms = (self.went_on_at - self.stood_at) / 1e6
        self.later(61 * SECOND)  # the breaker's minute
        return move

    def heartbeats(self, nodes: Iterable[Node]) -> list[float]:
        """CPU of the core for each, in microseconds."""
        taken: list[float] = []
        for node in nodes:
            event = AgentSaid(job="scale", node=node.name, message=node.progress())
            before = self.cpu_ns
            self.handle(event)
            taken.append((self.cpu_ns - before) / 1e3)
        return taken
