"""One seed, one history: the parts of a world, and what they do together.

Everything random comes from the clock's generator, and nothing is iterated in an order that depends
on hashes of strings, so the same seed and the same code give the same digest everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from keepstep.core.control import Outcome
from keepstep.core.state import Job
from keepstep.model import messages as m
from keepstep.model.job import CoreInput, NodeDead, Submit
from keepstep.sim.ground import training
from keepstep.sim.ground.clock import Clock
from keepstep.sim.ground.connections import Net
from keepstep.sim.ground.disk import SharedDisk
from keepstep.sim.ground.ills import Ills
from keepstep.sim.ground.world_view import Rules
from keepstep.sim.plans.world_plan import Plan
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import MS, SECOND
from keepstep.sim.world.book import Book
from keepstep.sim.world.history import History, line
from keepstep.sim.world.node import SimNode
from keepstep.sim.world.orchestrator import SimOrchestrator


class World:
    def __init__(
        self,
        plan: Plan,
        rules: Callable[[World], Rules],
        tracing: Callable[[str], None] | None = None,
        beside: World | None = None,
    ) -> None:
        """`beside`: the world of another job of the same orchestrator."""
        self.plan = plan
        self.clock: Clock = beside.clock if beside is not None else Clock(plan.seed)
        self.history: History = History(tracing, beside.history if beside is not None else None)
        self.net = Net(self.clock, plan.jitter_ns)
        self.ills = Ills()
        self.shared_disk = SharedDisk(plan.spoiled)
        self.truth = training.undisturbed(plan.ranks, 64)
        self.target = 1 << 40  # the tick at which the script ends, once that is known
        self.book = Book(resume_tick=plan.resume_tick)
        self.rules = rules(self)
        self.ranks: dict[str, Rank] = {}
        self.nodes: dict[str, SimNode] = {}
        if beside is None:
            self.orchestrator = SimOrchestrator(self)
        else:
            self.orchestrator = beside.orchestrator
            self.orchestrator.worlds[plan.job] = self
        self.fired_faults: list[str] = []
        self.over = False
        self.watchers: list[Callable[[], None]] = []
        self.on_decided: Callable[[Outcome], None] = lambda _: None
        self.on_commit: Callable[[], None] = lambda: None
        self._pid = 1000

    # ------------------------------------------------------------------ clock

    @property
    def now(self) -> int:
        return self.clock.now

    @property
    def random(self) -> random.Random:
        return self.clock.random

    def at(self, time: int, work: Callable[..., None], *args: Any) -> None:
        self.clock.at(time, work, *args)

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        self.clock.after(ns, work, *args)

    def run(self, until: Callable[[], bool], limit_ns: int, *, ended: bool = False) -> bool:
        """True when `until` came true, or the job ended, before the virtual time was over.
        `ended`: it has ended already."""
        if ended:
            return self.clock.run(until, limit_ns)
        return self.clock.run(lambda: self.over or until(), limit_ns)

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

    def blobs_at(self, address: m.Address) -> SimNode:
        return self.nodes[address.host]

    def store_at(self, address: m.Address) -> SimNode:
        return self.nodes[address.host] if address.host in self.nodes else self.nodes["n0"]

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def node_died(self, node: str) -> None:
        """The launcher reaps it and says so, sooner or later; a lost machine says nothing."""
        wait = 50 * MS + self.random.randrange(self.plan.notice_ns)
        self.after(wait, self._notice, node)

    def _notice(self, node: str) -> None:
        if self.orchestrator.alive:
            self.orchestrator.submit(NodeDead(job=self.plan.job, node=node))
        else:
            self.after(SECOND, self._notice, node)

    # ------------------------------------------------------------------ facts

    def facts(self) -> Job | None:
        """What the orchestrator knows of the job; None while it is away."""
        return self.orchestrator.core.state(self.plan.job) if self.orchestrator.alive else None

    def owners(self) -> list[Rank]:
        """Processes that own a rank and live, by rank."""
        names = self.book.owners
        found = [self.ranks[names[rank]] for rank in sorted(names) if names[rank] in self.ranks]
        return [process for process in found if process.alive]

    # ------------------------------------------------------------------ history

    def fired(self, what: str) -> None:
        self.fired_faults.append(what)
        self.trace(f"FAULT {what}")

    def handled(self, given: CoreInput, outcome: Outcome) -> None:
        core = self.orchestrator.core
        self.history.hear(outcome.records, core.state(self.plan.job))
        self.rules.handled(core, given, outcome)
        self.trace(line(given, outcome))
        self.on_decided(outcome)

    def acted(self) -> None:
        self.rules.acted(self.orchestrator.core.state(self.plan.job))
        for watcher in list(self.watchers):
            watcher()

    def trace(self, what: str) -> None:
        self.history.add(self.now, what, self._columns)

    def _columns(self) -> str:
        owners = self.book.owners
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
