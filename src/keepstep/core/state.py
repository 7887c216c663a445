"""What the core knows about a job, and the outbox its decisions go to.

Theory of operation. The core is *level-triggered*: an event only changes facts in these objects
("rank 2's worker is gone", "n1.w4 has staged generation 7"), and then one function, `settle` in
job.py, looks at all facts and asks for whatever the current phase still lacks. There is no
continuation to lose: a second fault in any phase is just another fact, after which the same
look leads somewhere else.

`Worker.asked` remembers what was already sent, so that looking again sends nothing twice. It is
emptied when the worker's agent joins anew, so commands lost with a broken stream are sent again;
commands are idempotent, and rows whose answer is already known are skipped.

A look takes time in proportion to the ranks. So whatever agents have said while the core was busy
is one input (`AgentsSaid`), looked at once, and mere progress is not looked at.

What is equal for all ranks is told to all of them at once (together.py).

An *ordinary* worker owns a rank, lives and trains, and there is nothing else to say about it. The
others are in `Job.watched`, which every change of such a fact keeps true: a look begins with them,
and does not walk over all ranks to find the one that is dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from keepstep.core.capacity import Capacity
from keepstep.core.differences import Divergence
from keepstep.core.facts import SECOND, Attempt, Incident, Node, Worker
from keepstep.core.pace import Pace
from keepstep.core.ranks import Ranks
from keepstep.core.saves import Saves, Stopping
from keepstep.model.agent_messages import AgentCommand, KillWorker, Tell
from keepstep.model.commands import WorkerCommand
from keepstep.model.job import InjectSpec, JobSpec
from keepstep.model.messages import Address
from keepstep.model.records import Record, SignalSeen, Warned
from keepstep.model.views import IncidentView, JobView, NoteView

NOTES_MAX = 20
EVERY_NODE = "*"  # in Send: all that are connected


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    job: str
    node: str
    command: AgentCommand


class Outcome(msgspec.Struct, kw_only=True):
    """Append `records` durably first, then carry out `sends` in order."""

    records: list[Record] = []
    sends: list[Send] = []


@dataclass(slots=True)
class Job:
    """A table of all facts about one job, and what can be read off them: hence so many."""

    spec: JobSpec
    submitted_at: int
    nodes: dict[str, Node]
    order: list[Node]  # the same, by index
    mode: Literal["waiting", "opening", "starting", "running"] = "waiting"
    workers: dict[str, Worker] = field(default_factory=dict)
    watched: dict[str, Worker] = field(default_factory=dict)  # those that are not ordinary
    owners: dict[int, str] = field(default_factory=dict)  # rank -> worker
    placed_on: dict[str, list[Worker]] = field(
        default_factory=dict
    )  # node -> workers ever placed there
    generation: int = 0
    generation_max: int = -1  # highest one ever used
    worker_next: int = 0
    incident_next: int = 1
    incidents: list[Incident] = field(default_factory=list)  # open ones
    closed: list[IncidentView] = field(default_factory=list)
    notes: deque[NoteView] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    attempt: Attempt | None = None
    tellings: int = 0  # how often all ranks were told something at once
    master: Address | None = None
    reason: str = ""
    ended: JobView | None = None
    traceback: str = ""
    checkpoint: str = ""
    checkpoint_tick: int | None = None
    resume: str = ""  # checkpoint that all ranks are to be started from
    stopping: Stopping | None = None  # it is to end with a checkpoint
    saves: Saves = field(init=False)
    capacity: Capacity = field(init=False)
    causes: dict[int, tuple[str, str]] = field(default_factory=dict)  # dead rank -> (cause, why)
    divergence: Divergence | None = None  # numbers differ: nothing else is decided meanwhile
    accepted: dict[tuple[str, str, int], None] = field(default_factory=dict)  # see divergence.py
    alarm: tuple[str, str] | None = None  # a rank's exception: (cause, why), until an attempt
    deaths: dict[int, tuple[int, set[str]]] = field(default_factory=dict)  # rank -> tick, workers
    reconnects: tuple[int, int] = (-1, 0)  # tick, losses without any victim at it
    hang_warned: bool = False
    injects: dict[str, InjectSpec] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    understudies_failed: int = 0  # since one was ready
    parities: dict[int, str] = field(default_factory=dict)  # first rank of a group -> its holder
    places: dict[int, str] = field(default_factory=dict)  # rank -> node it was last started on
    lonely: bool = False  # somebody has no buddy, or no parity: there was no node for it
    forget_due: bool = False  # a Forget may have been lost
    preempted: list[tuple[int, int]] = field(default_factory=list)  # when, ranks told to leave
    deferred: dict[str, str] = field(default_factory=dict)  # tainted target -> reason
    release_due: int | None = None  # to be told to all ordinary ranks
    released: int | None = None  # generation of the last planned attempt that was undone
    # start-up
    start_failures: int = 0
    start_fault: tuple[int, str, str, str] | None = None  # when, kind, why, traceback
    store_node: str = ""
    bad_store: str = ""  # the node that failed last to open one
    store_failures: int = 0  # in a row, at the start
    store_asked_at: int = 0
    ranks_joined_at: int | None = None
    ranks_started_at: int = 0
    attach_since: int | None = None  # some ranks wait in attach for others
    late_starts: int = 0  # starts given up because they waited too long
    start_warned: bool = False
    progress_at: int = 0  # when a rank was last seen to get on
    passed_at: int = 0  # a rank was last heard to hold for a move, or to have ended
    judge_at: int | None = None  # stalls from before that are looked at again
    # after a restart of the orchestrator
    replayed: bool = False
    rejoin_until: int | None = None
    rest: bool = False  # the last look asked for nothing
    due: int | None = None  # no timer before that
    due_known: bool = False
    balance_at: int = 0  # not before that, if ranks are moved to better places
    pace: Pace = field(default_factory=Pace)  # who is slower than the others

    def __post_init__(self) -> None:
        self.resume, self.saves = self.spec.resume, Saves(self.spec)
        self.capacity = Capacity.of(self.spec)

    @property
    def id(self) -> str:
        return self.spec.job

    @property
    def fallen(self) -> bool:
        """It goes back to a checkpoint, and waits until nothing of before is left."""
        return self.mode == "waiting" and self.saves.fallen_before > 0

    @property
    def asks(self) -> bool:
        """A scheduler may be asked for nodes."""
        return self.spec.provision is not None and bool(self.spec.provision.kinds)

    @property
    def transparent(self) -> bool:
        """Ranks move as images of their processes."""
        return self.spec.mode == "transparent"

    @property
    def stall_ns(self) -> int:
        return self.spec.stall_timeout_ns

    @property
    def reply_ns(self) -> int:
        """How long a live rank may take to answer. A transparent one hears nothing in a step."""
        if self.transparent:
            return max(4 * self.stall_ns, 60 * SECOND)
        return max(self.stall_ns, 10 * SECOND)

    @property
    def build_ns(self) -> int:
        """How long a newcomer may take for one stage of joining."""
        return max(self.stall_ns, 60 * SECOND)

    def add_worker(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self.placed_on.setdefault(worker.node, []).append(worker)
        worker.watched = self.watched
        worker.sort_in()

    def waits_for_nodes(self) -> bool:
        """Backwards, because most join in order: 16,384 nodes ask 16,384 times."""
        return any(node.state == "absent" for node in reversed(self.nodes.values()))

    def owners_on(self, node: str) -> list[Worker]:
        """In order of ranks."""
        found = [w for w in self.placed_on.get(node, ()) if self.owners.get(w.rank) == w.id]
        return sorted(found, key=lambda w: w.rank)

    def owner(self, rank: int) -> Worker | None:
        worker = self.owners.get(rank)
        return self.workers[worker] if worker is not None else None

    def rank_owners(self) -> Iterator[Worker]:
        """Owners in order of ranks. A look begins with it, so it neither sorts nor builds."""
        owners, workers = self.owners, self.workers
        whole = len(owners) == self.spec.world
        ranks: Iterable[int] = range(self.spec.world) if whole else sorted(owners)
        return map(workers.__getitem__, map(owners.__getitem__, ranks))

    def owning(self) -> list[tuple[int, Worker]]:
        """In order of ranks."""
        return [(worker.rank, worker) for worker in self.rank_owners()]

    def watched_owners(self) -> list[Worker]:
        """Owners that are not ordinary, in order of ranks."""
        owners = self.owners
        found = [w for w in self.watched.values() if owners.get(w.rank) == w.id]
        return sorted(found, key=lambda w: w.rank)

    def live(self) -> Ranks:
        world = self.spec.world
        gone = [w.rank for w in self.watched_owners() if not w.usable]
        if len(self.owners) < world:
            gone += [rank for rank in range(world) if rank not in self.owners]
        return Ranks(world, gone)

    def dead(self) -> list[int]:
        """Ranks without a living owner. One whose script has ended needs none."""
        return [w.rank for w in self.watched_owners() if not w.usable and not w.done]

    def somebody_done(self) -> bool:
        return any(w.done for w in self.watched_owners())

    def attaching(self) -> tuple[list[int], list[int]]:
        """Ranks that are in attach or through it, and ranks that are not."""
        there: list[int] = []
        missing: list[int] = []
        for rank, w in self.owning():
            (there if w.attached or w.where == "attaching" else missing).append(rank)
        return there, missing

    def spares(self) -> list[Worker]:
        """One for each place. A place whose understudy is taking a rank over is used up."""
        found = [w for w in self.watched.values() if w.role == "spare" and w.usable]
        return [w for w in found if not self.is_taken(w)] if self.spec.understudies else found

    def is_taken(self, spare: Worker) -> bool:
        """Somebody has, or is being given, a rank in the same place."""
        return any(
            w.role in ("newcomer", "rank") and w.alive and w.slot == spare.slot
            for w in self.placed_on[spare.node]
        )

    def understudies(self) -> list[Worker]:
        if not self.spec.understudies:
            return []
        return [w for w in self.watched.values() if w.role == "understudy" and w.usable]

    def connected(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.state == "connected"]

    def asked_at(self, worker: Worker, what: str, generation: int) -> int | None:
        """When it was asked, alone or with all others; None: not, or that may be lost."""
        asked = worker.asked.get(what)
        if asked is not None and asked[0] == generation:
            return asked[1]
        attempt = self.attempt
        told = attempt.told.get(what) if attempt is not None else None
        if attempt is None or told is None or attempt.generation != generation:
            return None
        lost = told.number <= worker.synced or worker.id in told.besides
        return told.at if worker.role == "rank" and not lost else None

    def unplanned(self) -> Incident | None:
        for incident in self.incidents:
            if incident.trigger == "unplanned" or incident.cause == "resume":
                return incident
        return None

    def note(self, record: Record) -> None:
        """Some records are for people only, and are shown beside the job."""
        if isinstance(record, Warned):
            self.notes.append(NoteView(at_ns=record.at_ns, text=record.message))
        elif isinstance(record, SignalSeen):
            text = f"signal {record.signal}: {record.detail}"
            self.notes.append(NoteView(at_ns=record.at_ns, text=text))

    def new_generation(self) -> int:
        self.generation_max += 1
        return self.generation_max


class Out:
    """Collects one outcome; the only way anything leaves the core."""

    def __init__(self, now: int, job: Job, outcome: Outcome) -> None:
        self.now = now
        self.job = job
        self._outcome = outcome

    @property
    def said(self) -> int:
        """How much has been decided so far."""
        return len(self._outcome.records) + len(self._outcome.sends)

    def record(self, record: Record) -> None:
        self._outcome.records.append(record)
        self.job.note(record)

    def send(self, node: str, command: AgentCommand) -> bool:
        """False: not connected, the caller's fact stays open until the agent is back."""
        if self.job.nodes[node].state != "connected":
            return False
        self._outcome.sends.append(Send(job=self.job.id, node=node, command=command))
        return True

    def tell(self, worker: Worker, command: WorkerCommand) -> bool:
        if not worker.usable:
            return False
        return self.send(worker.node, Tell(worker=worker.id, command=command))

    def ask(self, worker: Worker, what: str, generation: int, command: WorkerCommand) -> bool:
        """Tell once per generation, and once more after the agent was away. True: told now."""
        if self.job.asked_at(worker, what, generation) is not None:
            return False
        if not self.tell(worker, command):
            return False
        worker.asked[what] = (generation, self.now)
        if self.job.attempt is not None:
            self.job.attempt.alone[worker.id] = worker
        return True

    def send_all(self, command: AgentCommand) -> None:
        self._outcome.sends.append(Send(job=self.job.id, node=EVERY_NODE, command=command))

    def kill(self, worker: Worker) -> None:
        """Fence: from now on it counts as dead; COMMIT still waits for the agent's word."""
        if worker.alive and worker.killed_at is None:
            worker.killed_at = self.now
            self.send(worker.node, KillWorker(worker=worker.id))
