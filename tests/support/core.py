"""A fake world around the core: agents and workers that answer as real ones would.

Nothing runs and nothing sleeps. Commands are carried out at once; answers queue up and are handed
to the core in order, one event each, so a test can stop in front of any answer, break something,
and go on. The world checks after every outcome what must never happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from keepstep.core.control import Core, Outcome
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import (
    AgentGone,
    AgentJoined,
    AgentSaid,
    CoreInput,
    InjectSpec,
    JobSpec,
    NodeDead,
    NodeSpec,
    Submit,
    Wake,
)
from keepstep.model.views import IncidentView, JobView
from tests.support.fake_rank import FakeWorker

SECOND = 1_000_000_000
STALL = 20 * SECOND
ENDED = ("done", "failed", "fell_back", "cancelled")


@dataclass
class FakeNode:
    name: str
    index: int
    slots: int
    alive: bool = True
    joined: bool = False
    stores: set[int] = field(default_factory=set)
    agents: int = 0  # started before this one
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def blobs(self) -> m.Address:
        return m.Address("10.0.0.1", 7000 + self.index + 100 * self.agents)


def job_spec(
    nodes: str = "n0:2 n1:2 n2:2",
    world: int = 4,
    local_world: int = 2,
    spares: int = 1,
    understudies: int = 0,
    resume: str = "",
    inject: list[InjectSpec] | None = None,
    checkpoints: str = "",
    interval_s: int = 0,
) -> JobSpec:
    return JobSpec(
        job="j",
        world=world,
        local_world=local_world,
        nodes=[
            NodeSpec(name=name, slots=int(slots))
            for name, _, slots in (node.partition(":") for node in nodes.split())
        ],
        spares=spares,
        understudies=understudies,
        stall_timeout_ns=STALL,
        script=["train.py"],
        directory="/jobs/j",
        resume=resume,
        inject=inject or [],
        checkpoints=checkpoints,
        checkpoint_interval_ns=interval_s * SECOND,
    )


class World:
    def __init__(
        self, spec: JobSpec | None = None, join: bool = True, beside: World | None = None
    ) -> None:
        """`beside`: the world of another job of the same orchestrator."""
        self.spec = spec or job_spec()
        self.core = beside.core if beside is not None else Core()
        self.worlds = beside.worlds if beside is not None else {}
        self.worlds[self.spec.job] = self
        self.now = 1_000 * SECOND
        self.nodes = {
            node.name: FakeNode(node.name, index, node.slots)
            for index, node in enumerate(self.spec.nodes)
        }
        self.workers: dict[str, FakeWorker] = {}
        self.queue: deque[AgentSaid] = deque()
        self.records: list[r.Record] = []
        self.sent: list[tuple[str, agent_messages.AgentCommand]] = []
        self.generation_max = -1
        self.decided: set[int] = set()
        self.known_dead: set[str] = set()
        self.snapshots: set[int] = set()
        self.attach = True
        self.refuse: Callable[[FakeWorker, m.Message], m.Message | None] | None = None
        self.handle(Submit(spec=self.spec))
        if join:
            for name in self.nodes:
                self.join(name)

    # -------------------------------------------------------------- what tests do

    def handle(self, event: CoreInput) -> Outcome:
        self.now = max(world.now for world in self.worlds.values()) + 1_000_000
        outcome = self.core.handle(self.now, event)
        for world in self.worlds.values():
            world.records += (mine := [one for one in outcome.records if one.job == world.spec.job])
            world._check_records(mine)
        for send in outcome.sends:
            self.worlds[send.job]._deliver(send.node, send.command)
        return outcome

    def _deliver(self, node: str, command: agent_messages.AgentCommand) -> None:
        if isinstance(command, agent_messages.TellRanks):
            self._tell_ranks(command)
            return
        assert self.nodes[node].joined, f"{command} to {node}, which is away"
        self.sent.append((node, command))
        self._carry_out(self.nodes[node], command)

    def _tell_ranks(self, command: agent_messages.TellRanks) -> None:
        """As agents do, and noted as if each rank had been told alone."""
        for worker in list(self.workers.values()):
            if not self.nodes[worker.node].joined or not worker.alive or worker.rank < 0:
                continue
            if worker.id not in command.besides and not worker.presumed:
                tell = agent_messages.Tell(worker=worker.id, command=command.command)
                self.sent.append((worker.node, tell))
                self._carry_out(self.nodes[worker.node], tell)

    def pump(self, until: Callable[[AgentSaid], bool] | None = None) -> bool:
        """Hand in answers; stop in front of the first that `until` names."""
        for _ in range(100_000):
            if not self.queue:
                return False
            if until is not None and until(self.queue[0]):
                return True
            event = self.queue.popleft()
            if self.nodes[event.node].joined:
                self.handle(event)
        raise AssertionError("the world does not come to rest")

    def before(self, kind: type[m.Message], rank: int | None = None) -> bool:
        return self.pump(lambda event: says(event, kind, rank))

    def run(self, limit_s: float = 2_000) -> None:
        """Until nothing is in flight and no deadline is left within the limit."""
        end = self.now + int(limit_s * SECOND)
        for _ in range(10_000):
            self.pump()
            deadline = self.core.deadline()
            if deadline is None or deadline > end:
                return
            self.now = max(self.now, deadline)
            self.handle(Wake())
        raise AssertionError("deadlines never end")

    def start(self) -> World:
        self.run(5)
        assert self.view.state == "running", self.view
        return self

    def step(self, count: int = 1) -> None:
        """All ranks train, if they can."""
        for _ in range(count):
            ranks = self.owners()
            if len(ranks) == self.spec.world and all(w.state == "running" for w in ranks):
                for worker in ranks:
                    worker.tick += 1
                    worker.in_fence = False

    def progress(self) -> None:
        for worker in self.workers.values():
            if worker.alive and self.nodes[worker.node].joined:
                state = agent_messages.WorkerState(
                    worker=worker.id,
                    slot=worker.slot,
                    pid=9,
                    rank=worker.rank,
                    generation=worker.generation,
                    version=worker.tick,
                    tick=worker.tick,
                    steps_per_s=2.0,
                )
                self.agent_says(worker.node, agent_messages.Progress(workers=[state]))

    def say(self, worker: FakeWorker, message: m.WorkerMessage) -> None:
        said = agent_messages.WorkerSaid(worker=worker.id, rank=worker.rank, said=message)
        self.queue.append(AgentSaid(job=self.spec.job, node=worker.node, message=said))

    def agent_says(self, node: str, message: agent_messages.AgentMessage) -> None:
        self.queue.append(AgentSaid(job=self.spec.job, node=node, message=message))

    def kill(self, rank: int) -> FakeWorker:
        worker = self.rank(rank)
        self.exit(worker, -9)
        return worker

    def exit(self, worker: FakeWorker, code: int, tail: str = "") -> None:
        if worker.alive:
            worker.alive = False
            exited = agent_messages.WorkerExited(
                worker=worker.id, rank=worker.rank, code=code, tail=tail
            )
            self.agent_says(worker.node, exited)

    def die_silently(self, worker: FakeWorker) -> None:
        """Whatever it was about to say dies with it."""
        self.queue = deque(
            event
            for event in self.queue
            if not isinstance(event.message, agent_messages.WorkerSaid)
            or event.message.worker != worker.id
        )
        self.exit(worker, -9)

    def kill_node(self, name: str) -> None:
        node = self.nodes[name]
        node.alive = node.joined = False
        for worker in self.workers.values():
            worker.alive = worker.alive and worker.node != name
        self.queue = deque(event for event in self.queue if event.node != name)
        self.handle(NodeDead(job=self.spec.job, node=name))

    def lose_agent(self, name: str, lose_answers: bool = False) -> None:
        self.nodes[name].joined = False
        if lose_answers:
            self.queue = deque(event for event in self.queue if event.node != name)
        self.handle(AgentGone(job=self.spec.job, node=name))

    def join(self, name: str, slots: int = 2, labels: dict[str, str] | None = None) -> None:
        node = self.nodes.setdefault(name, FakeNode(name, len(self.nodes), slots))
        node.alive = node.joined = True
        node.labels = labels or node.labels
        states = {"starting": "starting", "parked": "parked", "done": "done", "held": "held"}
        hello = agent_messages.Hello(
            protocol=m.PROTOCOL,
            token="t",
            job=self.spec.job,
            node=name,
            pid=100 + node.index,
            session=100 + node.index,
            blobs=node.blobs,
            slots=node.slots,
            labels=node.labels,
            workers=[
                agent_messages.WorkerState(
                    worker=w.id,
                    slot=w.slot,
                    pid=9,
                    rank=-1 if w.presumed else w.rank,
                    generation=w.generation,
                    tick=w.tick,
                    version=w.tick,
                    where=states.get(w.state, "compute"),
                )
                for w in self.workers.values()
                if w.alive and w.node == name
            ],
            retained=[
                (w.id, w.rank)
                for w in self.workers.values()
                if not w.alive and w.node == name and w.rank >= 0
            ],
        )
        self.handle(AgentJoined(job=self.spec.job, node=name, hello=hello))

    def restart_core(self) -> None:
        """Everything in memory and in flight is lost; the ledger is not."""
        encoded = msgspec.msgpack.encode(self.records)
        self.core = Core()
        self.core.replay(msgspec.msgpack.decode(encoded, type=list[r.Record]))
        self.queue.clear()
        for node in self.nodes.values():
            node.joined = False

    def rejoin(self) -> None:
        for node in self.nodes.values():
            if node.alive and not node.joined:
                self.join(node.name, node.slots)

    # -------------------------------------------------------------- what tests ask

    @property
    def view(self) -> JobView:
        return self.core.job(self.spec.job)

    @property
    def incidents(self) -> list[IncidentView]:
        return self.core.incidents(self.spec.job)

    @property
    def last(self) -> IncidentView:
        return self.incidents[-1]

    def rank(self, rank: int) -> FakeWorker:
        return self.workers[self.view.ranks[rank].worker]

    def owners(self) -> list[FakeWorker]:
        views = self.view.ranks
        found = [self.workers[view.worker] for view in views if view.worker]
        return [worker for worker in found if worker.alive]

    def told(self, kind: type[m.Message]) -> list[tuple[str, m.Message]]:
        """(worker, command) of every Tell of that kind."""
        return [
            (command.worker, command.command)
            for _, command in self.sent
            if isinstance(command, agent_messages.Tell) and isinstance(command.command, kind)
        ]

    def commands(self, kind: type[m.Message]) -> list[tuple[str, m.Message]]:
        return [(node, command) for node, command in self.sent if isinstance(command, kind)]

    def recorded(self, kind: type[r.BaseRecord]) -> list[r.Record]:
        return [record for record in self.records if isinstance(record, kind)]

    def assert_training(self) -> None:
        """All ranks are owned by exactly one live process, of one generation and tick."""
        view = self.view
        assert view.state == "running", (view.state, view.reason)
        owners = self.owners()
        assert [w.rank for w in owners] == list(range(self.spec.world))
        assert {w.state for w in owners} == {"running"}, [(w.id, w.state) for w in owners]
        assert len({w.generation for w in owners}) == 1
        assert len({w.tick for w in owners}) == 1
        assert owners[0].generation == view.generation
        for worker in self.workers.values():
            if worker.alive and worker.state not in ("starting", "parked", "joining"):
                assert worker in owners, f"{worker} is alive beside its rank's owner"
        open_ones = [i for i in self.incidents if i.outcome == "OPEN" and i.trigger == "unplanned"]
        assert not open_ones

    # -------------------------------------------------------------- how the world answers

    def _check_records(self, records: list[r.Record]) -> None:
        for record in records:
            if isinstance(record, r.AttemptStarted | r.StartBegun):
                assert record.generation > self.generation_max, "generations strictly grow"
                self.generation_max = record.generation
            if isinstance(record, r.Decided):
                assert record.generation not in self.decided, "one decision per attempt"
                assert record.generation == self.generation_max
                self.decided.add(record.generation)
            if isinstance(record, r.WorkerEnded):
                self.known_dead.add(record.worker)
            if isinstance(record, r.Committed):
                assert record.generation == self.generation_max
                ids = list(record.placement.values())
                assert len(set(ids)) == len(ids)
                for rank, worker_id in record.placement.items():
                    twins = [
                        w.id
                        for w in self.workers.values()
                        if w.rank == rank and w.alive and w.id != worker_id and not w.presumed
                    ]
                    leaving = {w for w in twins if self.workers[w].state == "held"}
                    assert set(twins) <= leaving, f"rank {rank} has two owners: {twins}"

    def _carry_out(self, node: FakeNode, command: agent_messages.AgentCommand) -> None:
        if isinstance(command, agent_messages.StartWorker):
            self._start(node, command)
        elif isinstance(command, agent_messages.KillWorker):
            if command.worker in self.workers:
                self.exit(self.workers[command.worker], -9)
        elif isinstance(command, agent_messages.SendSignal):
            if command.signal == 9:
                self.exit(self.workers[command.worker], -9)
        elif isinstance(command, agent_messages.KillNode):
            node.alive = False
        elif isinstance(command, agent_messages.OpenStore):
            node.stores.add(command.generation)
            store = m.Address("10.0.0.1", 9000 + command.generation)
            self.agent_says(
                node.name, agent_messages.StoreOpened(generation=command.generation, store=store)
            )
        elif isinstance(command, agent_messages.CloseStore):
            node.stores.discard(command.generation)
        elif isinstance(command, agent_messages.Tell):
            worker = self.workers[command.worker]
            known_dead = worker.id in self.known_dead
            assert not known_dead, f"{command.command} to {worker.id}, known to be dead"
            if worker.alive and not worker.mute:
                self._tell(worker, command.command)
        elif isinstance(command, agent_messages.Stop):
            for worker in self.workers.values():
                if worker.node == node.name:
                    worker.alive = False
            self.agent_says(node.name, agent_messages.StopDone())

    def _start(self, node: FakeNode, command: agent_messages.StartWorker) -> None:
        if command.worker in self.workers:
            return
        worker = FakeWorker(
            command.worker, node.name, command.slot, command.rank, command.generation
        )
        taken = [w.id for w in self.workers.values() if w.alive and w.node == node.name]
        there = [w for w in taken if self.workers[w].slot == command.slot]
        known = self.core.state(self.spec.job).workers
        shared = [w for w in (*there, command.worker) if known[w].presumed >= 0]
        assert not there or shared, "slot is taken"
        self.workers[worker.id] = worker
        self.agent_says(
            node.name, agent_messages.WorkerStarted(worker=worker.id, slot=worker.slot, pid=9)
        )
        if command.rank < 0:
            for said in worker.park():
                self.say(worker, said)
        elif self.attach:
            worker.state = "running"
            self.say(worker, attached(command.generation))

    def _tell(self, worker: FakeWorker, command: commands.WorkerCommand) -> None:
        if self.refuse is not None:
            answer = self.refuse(worker, command)
            if answer is not None:
                self.say(worker, answer)  # type: ignore[arg-type]
                return
        for said in worker.hears(command):
            self.say(worker, said)
        if worker.left:
            self.exit(worker, 0)
        elif isinstance(command, commands.Snapshot):
            self._snapshot(worker, command)
        elif isinstance(command, commands.Seal):
            path = f"{self.spec.checkpoints}/checkpoint-{command.tick}"
            self.say(worker, m.Sealed(number=command.number, path=path))

    def _snapshot(self, worker: FakeWorker, command: commands.Snapshot) -> None:
        """The word is heard by all. Whoever is told once more only says again what it has done."""
        again = command.number in self.snapshots
        self.snapshots.add(command.number)
        for one in [worker] if again else self.owners():
            saved = m.Saved(
                number=command.number,
                tick=one.tick,
                version=one.tick,
                snapshot_ns=2_000_000 + one.rank,
                write_ns=SECOND + one.rank,
                bytes_written=1,
            )
            self.say(one, saved)


def attached(generation: int) -> m.Attached:
    return m.Attached(
        generation=generation, groups=["0"], parameters=1, bytes_state=4, redundant=True
    )


def says(event: AgentSaid, kind: type[m.Message], rank: int | None = None) -> bool:
    message = event.message
    if not isinstance(message, agent_messages.WorkerSaid):
        return isinstance(message, kind)
    return isinstance(message.said, kind) and rank in (None, message.rank)
