"""The orchestrator's process: the production core, a disk, and the rule of runtime/driver.py.

Inputs are handled one at a time: decide, make durable, act. What agents say waits for a moment, and
the core looks once at all that has come by then. An append takes time during which nothing else
happens; a crash in it leaves the batch on the disk or not, a crash behind it loses some of the
effects. A disk that is full ends the process, because a decision that is not durable
must not be acted on.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from keepstep.core.control import EVERY_NODE, Core, Outcome
from keepstep.errors import UsageError
from keepstep.model import agent_messages
from keepstep.model.job import (
    AgentGone,
    AgentJoined,
    AgentSaid,
    AgentsSaid,
    CoreInput,
    Submit,
    Wake,
)
from keepstep.model.records import Record
from keepstep.sim.ground.connections import Connection
from keepstep.sim.ground.world_view import SimSurroundings
from keepstep.sim.times import MS, SECOND

TURN_NS = MS // 2  # for so long what agents say waits for more of it

Given = tuple[CoreInput, Connection | None]
Addressed = tuple[str, str, agent_messages.AgentCommand]  # job, node


class JobSurroundings(SimSurroundings, Protocol):
    """The world of a job, as the orchestrator sees it."""

    def handled(self, given: CoreInput, outcome: Outcome) -> None: ...

    def acted(self) -> None: ...


class SimOrchestrator:
    def __init__(self, world: JobSurroundings) -> None:
        self.world = world
        self.worlds = {world.plan.job: world}  # one for each job
        self.disk: list[Record] = []
        self.core = Core()
        self.alive = True
        self.paused = False
        self.epoch = 0
        self.append_ns = MS // 2
        self.disk_full = False
        self.clock_ns = 1_000_000 * SECOND  # wall clock minus virtual time; a restart may change it
        self.restarted_ns = 0
        self.resumed_ns = -(1 << 60)  # it was stopped until then
        self.inputs = 0
        self.crash_at: str = ""  # fault: "record" or "effect", at the next batch
        self.cut_short = False  # it is crashing, and some of its commands never left
        self.peers: dict[tuple[str, str], Connection] = {}  # by job and node
        self._queue: deque[Given] = deque()
        self._writing: list[Record] | None = None
        self._wake_at = -1

    # ------------------------------------------------------------------ process

    def crash(self) -> None:
        """kill -9. What was being written may be there or not."""
        if not self.alive:
            return
        self.alive = False
        self.epoch += 1
        if self._writing is not None and self.world.random.random() < 0.5:
            self._durable(self._writing)
        self._writing = None
        self._queue.clear()
        self.peers.clear()
        self.paused = False
        for world in self.worlds.values():
            for connection in list(world.net.connections):
                connection.server_open = False
                world.after(2 * MS, connection.close, "agent")
        self.world.trace("orchestrator crashed")

    def restart(self) -> None:
        if self.alive:
            return
        self.alive = True
        self.restarted_ns = self.world.now
        self.disk_full = False
        self.core = Core()
        self.core.replay(self.disk)
        for job, world in self.worlds.items():
            mine = [record for record in self.disk if record.job == job]
            if mine:
                world.rules.replayed(self.core.state(job), mine)
        newest = max((record.at_ns for record in self.disk), default=0)
        # The wall clock may have been set back; the driver never starts before its ledger's end.
        self.clock_ns += self.world.random.choice((0, 0, -30 * SECOND, 5 * SECOND))
        self.clock_ns += max(0, newest - self._now())
        self.world.trace("orchestrator restarted")
        self._arm()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.resumed_ns = self.world.now
            self._next()

    # ------------------------------------------------------------------ streams, as server.py

    def receive(self, connection: Connection, message: agent_messages.AgentMessage) -> None:
        if not self.alive or connection.epoch != self.epoch:
            return
        job, node = at = _address(connection)
        given: CoreInput
        if isinstance(message, agent_messages.Hello):
            old = self.peers.pop(at, None)
            if old is not None:
                old.server_open = False
                old.close("agent")
            self.peers[at] = connection
            given = AgentJoined(job=job, node=node, hello=message)
        elif self.peers.get(at) is connection:
            given = AgentSaid(job=job, node=node, message=message)
        else:
            return
        self.submit(given, connection)

    def stream_lost(self, connection: Connection) -> None:
        job, node = at = _address(connection)
        if self.alive and self.peers.get(at) is connection:
            del self.peers[at]
            self.submit(AgentGone(job=job, node=node))

    # ------------------------------------------------------------------ driver

    def submit(self, given: CoreInput, connection: Connection | None = None) -> None:
        if not self.alive:
            return
        waits = all(isinstance(one, AgentSaid) for one, _ in self._queue)
        if isinstance(given, AgentSaid) and waits:
            if not self._queue:
                self.world.after(TURN_NS, self._look, self.epoch)
            self._queue.append((given, connection))
            return
        self._queue.append((given, connection))
        self._next()

    def _look(self, epoch: int) -> None:
        if epoch == self.epoch:
            self._next()

    def _next(self) -> None:
        while self._queue and self.alive and not self.paused and self._writing is None:
            given, connection = self._queue.popleft()
            if isinstance(given, AgentSaid):
                given = self._with_more(given)
            self._handle(given, connection)

    def _with_more(self, first: AgentSaid) -> AgentSaid | AgentsSaid:
        """What was said before anything else happened, as driver.py hands it in."""
        said = [first]
        for given, _ in list(self._queue):
            if not isinstance(given, AgentSaid) or given.job != first.job:
                break
            said.append(given)
            self._queue.popleft()
        return first if len(said) == 1 else AgentsSaid(job=first.job, said=said)

    def _handle(self, given: CoreInput, connection: Connection | None) -> None:
        self.inputs += 1
        try:
            outcome = self.core.handle(self._now(), given)
        except UsageError as error:
            self.world.trace(f"refused: {error.message}")
            return
        self._show(given, outcome)
        if not outcome.records:
            self._act(self._addressed(outcome), outcome, given, connection)
            return
        if self.disk_full:
            self._writing = None
            self.crash()
            self.world.after(3 * SECOND, self.restart)
            return
        self._writing = outcome.records
        if self.crash_at == "record":
            self.crash_at = ""
            self.world.fired("orchestrator crashed while writing")
            self.world.after(self.append_ns // 2, self._crash_now, self.epoch)
        wait = self.append_ns + self.world.random.randrange(self.append_ns)
        self.world.after(wait, self._written, self.epoch, outcome, given, connection)

    def _show(self, given: CoreInput, outcome: Outcome) -> None:
        """To everybody whose business it is."""
        if len(self.worlds) == 1:
            self.world.handled(given, outcome)
            return
        for job, world in self.worlds.items():
            records = [record for record in outcome.records if record.job == job]
            sends = [send for send in outcome.sends if send.job == job]
            if records or sends or isinstance(given, Wake) or _job_of(given) == job:
                world.handled(given, Outcome(records=records, sends=sends))

    def _crash_now(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.crash()
            self.world.after(SECOND, self.restart)

    def _written(
        self, epoch: int, outcome: Outcome, given: CoreInput, connection: Connection | None
    ) -> None:
        if epoch != self.epoch or not self.alive:
            return
        self._writing = None
        self._durable(outcome.records)
        if self.crash_at == "effect":
            self.crash_at = ""
            self.world.fired("orchestrator crashed between a record and its effect")
            sends = self._addressed(outcome)
            del sends[self.world.random.randrange(len(sends) + 1) :]
            self.cut_short = True
            self._act(sends, outcome, given, connection)
            self.cut_short = False
            self.crash()
            self.world.after(SECOND, self.restart)
            return
        self._act(self._addressed(outcome), outcome, given, connection)
        self._next()

    def _durable(self, records: list[Record]) -> None:
        self.disk.extend(records)
        for job, world in self.worlds.items():
            world.rules.durable([record for record in records if record.job == job])

    def _addressed(self, outcome: Outcome) -> list[Addressed]:
        """One for each node: what goes to all of them may be cut off in the middle."""
        found: list[Addressed] = []
        for send in outcome.sends:
            if send.node == EVERY_NODE:
                connected = self.core.state(send.job).connected()
                found += [(send.job, node.name, send.command) for node in connected]
            else:
                found.append((send.job, send.node, send.command))
        return found

    def _act(
        self,
        sends: list[Addressed],
        outcome: Outcome,
        given: CoreInput,
        connection: Connection | None,
    ) -> None:
        if isinstance(given, AgentJoined) and connection is not None:
            connection.down(agent_messages.Accepted())
        for job, node, command in sends:
            self.worlds[job].rules.sent(node, command)
            peer = self.peers.get((job, node))
            if peer is not None:
                peer.down(command)
        for job, world in self.worlds.items():
            if self.core.knows(job):
                world.acted()
        self._arm()

    def _now(self) -> int:
        return self.clock_ns + self.world.now

    def virtual(self, at_ns: int) -> int:
        """A time of the core as a time of the world."""
        return at_ns - self.clock_ns

    def _arm(self) -> None:
        deadline = self.core.deadline()
        if deadline is None:
            return
        wake = max(deadline - self.clock_ns, self.world.now + MS)
        if self.world.now < self._wake_at <= wake:
            return  # one is on its way, and will arm the next
        self._wake_at = wake
        self.world.at(wake, self._wake, self.epoch, wake)

    def _wake(self, epoch: int, wake: int) -> None:
        if epoch != self.epoch or not self.alive or wake != self._wake_at:
            return
        self._wake_at = -1
        deadline = self.core.deadline(self._now())
        if deadline is not None and deadline <= self._now():
            self.submit(Wake())
        else:
            self._arm()


def _address(connection: Connection) -> tuple[str, str]:
    return connection.job, connection.node.name


def _job_of(given: CoreInput) -> str:
    return given.spec.job if isinstance(given, Submit) else getattr(given, "job", "")
