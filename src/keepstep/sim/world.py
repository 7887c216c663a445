"""One seed, one history: clock, events, trace and digest, and the end of the story.

Everything random comes from the world's own generator, and nothing is iterated in an order that
depends on hashes of strings, so the same seed and the same code give the same digest everywhere.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from keepstep.core.orchestrator import Outcome
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import AgentGone, AgentJoined, AgentSaid, CoreInput, NodeDead, Submit
from keepstep.sim import training
from keepstep.sim.check import Checker, Violation
from keepstep.sim.net import MS, SECOND, Net
from keepstep.sim.node import SimNode
from keepstep.sim.orchestrator import SimOrchestrator
from keepstep.sim.pace import Stragglers
from keepstep.sim.plan import Plan
from keepstep.sim.rank import Rank
from keepstep.sim.saver import Saved
from keepstep.sim.scheduler import SimScheduler
from keepstep.sim.witness import Finding

EVENTS_MAX = 150_000  # a standby that hangs is given up after 300 virtual seconds
Event = tuple[int, int, Callable[..., None], tuple[Any, ...]]
SAYING = ("reason", "why", "message", "detail")  # fields of records that carry words


class World:
    def __init__(
        self,
        plan: Plan,
        tracing: Callable[[str], None] | None = None,
        beside: World | None = None,
    ) -> None:
        """`beside`: the world of another job of the same orchestrator, which has the clock."""
        self.plan = plan
        self._first = first = beside if beside is not None else self
        own = first is self
        self.random: random.Random = random.Random(plan.seed) if own else first.random
        self.now = 0
        self.events = 0
        self._heap: list[Event] = [] if own else first._heap
        self._sequence = 0
        self._others: list[World] = []
        self._pid = 1000
        self._digest: blake2b = blake2b(digest_size=8) if own else first._digest
        self._tracing = tracing
        self._cells: list[str] = []
        self.truth = training.undisturbed(plan.ranks, 64)
        self.target = 1 << 40  # the tick at which the script ends, once that is known
        self.checker = Checker(self)
        self.stragglers = Stragglers(self.checker)
        self.net = Net(self)
        self.ranks: dict[str, Rank] = {}
        self.nodes: dict[str, SimNode] = {}
        self.orchestrator: SimOrchestrator = SimOrchestrator(self) if own else first.orchestrator
        if not own:
            self.orchestrator.worlds[plan.job] = self
            first._others.append(self)
        self.fired_faults: list[str] = []
        self.over = False
        self.watchers: list[Callable[[], None]] = []
        self.on_decided: Callable[[Outcome], None] = lambda _: None
        self.on_commit: Callable[[], None] = lambda: None
        self.said: set[str] = set()  # reasons of decisions
        self.spawn_failures = 0
        self.echoes = False  # old answers arrive once more in the next attempt
        self.dragged: dict[str, int] = {}  # place -> how much slower a rank is there
        self.were_dragged: set[str] = set()
        self.bad_slots: dict[str, int] = {}  # place -> how many have been started there
        self.parts: dict[int, dict[int, Saved]] = {}  # on a shared disk: tick -> rank -> part
        self.saved: dict[str, dict[int, Saved]] = {}  # complete ones, by path
        self.spoiled: str | None = None  # the one of them that is damaged; None: not chosen yet
        self.differs_at: int | None = None  # witnesses find a difference in the fence of this tick
        self.finding = Finding()
        self.store_failure = ""  # of the next store to be opened: "refuse" or "mute"

    # ------------------------------------------------------------------ clock

    def at(self, time: int, work: Callable[..., None], *args: Any) -> None:
        self._first._sequence += 1
        heapq.heappush(self._heap, (time, self._first._sequence, work, args))

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        self._first._sequence += 1
        heapq.heappush(self._heap, (self.now + ns, self._first._sequence, work, args))

    def run(self, until: Callable[[], bool], limit_ns: int, *, ended: bool = False) -> bool:
        """True when `until` came true, or the job ended, before the virtual time was over.
        `ended`: it has ended already."""
        heap = self._heap
        while heap:
            if (self.over and not ended) or until():
                return True
            time, _, work, args = heapq.heappop(heap)
            if time > limit_ns:
                heapq.heappush(heap, (time, 0, work, args))
                self._set_clock(limit_ns)
                return False
            self.now = time
            if self._others:
                self._set_clock(time)
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Violation(f"{EVENTS_MAX} events and no end")
            work(*args)
        return (self.over and not ended) or until()

    def _set_clock(self, now: int) -> None:
        self.now = now
        for other in self._others:
            other.now = now

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    # ------------------------------------------------------------------ nodes

    def add_node(self, name: str, slots: int, labels: dict[str, str] | None = None) -> SimNode:
        index, racks = len(self.nodes), self.plan.racks
        if labels is None:
            labels = {"rack": f"r{index % racks}"} if racks else {}
        node = SimNode(self, name, index, slots, labels)
        self.nodes[name] = node
        return node

    def join_node(self, name: str, slots: int) -> None:
        self.add_node(name, slots)

    def submit(self) -> None:
        self.orchestrator.submit(Submit(spec=self.plan.spec()))
        if self.plan.answers and self.plan.job == "j":
            SimScheduler(self, self.plan.answers).tour()

    def blobs_at(self, address: m.Address) -> SimNode:
        return self.nodes[address.host]

    def is_spoiled(self, path: str) -> bool:
        if self.plan.spoiled and self.spoiled is None and len(self.saved) > 1:
            self.spoiled = path if path == next(reversed(self.saved)) else None
        return path == self.spoiled

    def store_at(self, address: m.Address) -> SimNode:
        return self.nodes[address.host] if address.host in self.nodes else self.nodes["n0"]

    def store_fails(self, node: SimNode) -> str:
        failure, self.store_failure = self.store_failure, ""
        return failure

    def spawn_fails(self, node: SimNode, start: m.StartWorker) -> bool:
        if self.spawn_failures > 0:
            self.spawn_failures -= 1
            return True
        return False

    def node_died(self, node: SimNode, silently: bool) -> None:
        """The launcher reaps it and says so, sooner or later; a lost machine says nothing."""
        if not silently:
            wait = 50 * MS + self.random.randrange(self.plan.notice_ns)
            self.after(wait, self._notice, node.name)

    def _notice(self, node: str) -> None:
        if self.orchestrator.alive:
            self.orchestrator.submit(NodeDead(job=self.plan.job, node=node))
        else:
            self.after(SECOND, self._notice, node)

    # ------------------------------------------------------------------ story

    def fired(self, what: str) -> None:
        self.fired_faults.append(what)
        self.trace(f"FAULT {what}")

    def handled(self, given: CoreInput, outcome: Outcome) -> None:
        line = _short(given)
        for record in outcome.records:
            line += f" | {type(record).__name__}"
            self.stragglers.decided(record)
            for field in SAYING:
                said = getattr(record, field, "")
                if said:
                    self.said.add(said)
            view = getattr(record, "view", None)
            if view is not None:
                self.said.add(view.reason)
        self._listen()
        progress = isinstance(given, AgentSaid) and isinstance(given.message, m.Progress)
        self.checker.handled(self.orchestrator.core, progress and not outcome.records)
        for send in outcome.sends:
            line += f" > {_command(send.command)}"
        self.trace(line)
        self.on_decided(outcome)

    def _listen(self) -> None:
        """Reasons for waiting stand in no record; operators see them."""
        job = self.orchestrator.core.state(self.plan.job)
        if job.reason:
            self.said.add(job.reason)
        if job.attempt is not None and job.attempt.no_spare:
            self.said.add(job.attempt.no_spare)
        for incident in job.incidents:
            self.said.add(incident.reason)

    def acted(self) -> None:
        job = self.orchestrator.core.state(self.plan.job)
        self.checker.beliefs.look(job)
        if not self.orchestrator.cut_short:
            self.checker.prompt.acted(job)
        for watcher in list(self.watchers):
            watcher()

    def job_ended(self, record: r.JobEnded) -> None:
        self.over = True

    def trace(self, what: str) -> None:
        line = f"{self.now} {what}\n"
        self._digest.update(line.encode())
        if self._tracing is not None:
            self._tracing(f"{self.now / 1e9:9.3f}  {self._columns()}  {what}")

    def _columns(self) -> str:
        owners = self.checker.owners
        cells = []
        for number in range(self.plan.ranks):
            process = self.ranks.get(owners.get(number, ""))
            if process is None:
                cells.append("-")
            elif not process.alive:
                cells.append("dead")
            else:
                flag = "!" if process.hung else "z" if process.stopped else ""
                cells.append(f"{process.mode[:4]}{flag}{process.tick}")
        return " ".join(f"{cell:<8}" for cell in cells)

    def digest(self) -> str:
        return self._digest.hexdigest()


def _short(given: CoreInput) -> str:
    if isinstance(given, AgentSaid):
        message = given.message
        if isinstance(message, m.WorkersSaid):
            return "; ".join(
                f"{one.worker} {type(one.said).__name__} {getattr(one.said, 'generation', '')}"
                for one in message.said
            )
        if isinstance(message, m.WorkerSaid):
            generation = getattr(message.said, "generation", "")
            return f"{message.worker} {type(message.said).__name__} {generation}"
        return f"{given.node} {type(message).__name__} {getattr(message, 'worker', '')}"
    if isinstance(given, AgentJoined | AgentGone | NodeDead):
        return f"{given.node} {type(given).__name__}"
    return type(given).__name__ + str(msgspec.structs.astuple(given)[1:])[:60] * (
        not isinstance(given, Submit)
    )


def _command(command: m.AgentCommand) -> str:
    if isinstance(command, m.Tell):
        told = command.command
        return f"{command.worker}:{type(told).__name__} {getattr(told, 'generation', '')}"
    if isinstance(command, m.TellRanks):
        told = command.command
        return f"ranks:{type(told).__name__} {getattr(told, 'generation', '')}"
    return f"{type(command).__name__} {getattr(command, 'worker', '')}"
