"""Facts about nodes, processes, incidents and attempts: tables that state.py puts together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from keepstep.core.ranks import Ranks, Tally, Told
from keepstep.core.timeline import Timeline
from keepstep.model.agent_messages import Stalled, StartWorker
from keepstep.model.commands import Swap
from keepstep.model.messages import Address, Copied, Held, Ready, Report, Resumed
from keepstep.model.network import PathView
from keepstep.model.records import Trigger

SECOND = 1_000_000_000


Role = Literal["spare", "understudy", "newcomer", "rank", "leaver", "unwanted"]


Kind = Literal["planned", "unplanned", "resume"]


@dataclass(slots=True)
class Node:
    name: str
    index: int
    slots: int
    # "unreachable": given up, but its ranks may still run until they must have ended themselves
    state: Literal["absent", "connected", "disconnected", "unreachable", "dead"] = "absent"
    blobs: Address | None = None
    pid: int = 0
    session: int = 0
    gone_at: int = 0
    fenced_at: int = 0  # unreachable: from then on nothing of it runs any more
    copied_until: int = 0  # others were told then to put their copies elsewhere
    taints: list[str] = field(default_factory=list)
    slot_taints: dict[int, list[str]] = field(default_factory=dict)
    crashes: dict[int, int] = field(default_factory=dict)  # slot -> without training in between
    stores: set[int] = field(default_factory=set)  # generations whose store was opened here
    paths: list[PathView] = field(default_factory=list)  # as its agent has seen them last
    labels: dict[str, str] = field(default_factory=dict)  # rack, switch, nvlink

    def healthy(self, slot: int) -> bool:
        return not self.taints and not self.slot_taints.get(slot)


@dataclass(slots=True)
class WorkerFacts:
    """A table of all facts about one process: hence so many."""

    id: str
    node: str
    slot: int
    role: Role
    rank: int = -1
    start: StartWorker | None = None  # to be sent again until it is known to run
    running: bool = False
    started_at: int = 0
    pid: int = 0
    alive: bool = True
    killed_at: int | None = None  # KillWorker sent: it counts as dead, but it may still run
    injected: bool = False  # its death was asked for and says nothing about the slot
    raised: str = ""  # traceback of its script's own exception; if it dies now, that is why
    refused: bool = False  # which was Keepstep's refusal, before the first step
    # progress
    version: int = 0
    tick: int = 0
    generation: int = 0
    where: str = ""
    steps_per_s: float = 0.0
    own_ns: int = 0  # of its last steps: what it does alone
    own_steps: int = 0  # how many were measured
    stalled: Stalled | None = None
    # spare, understudy and newcomer
    parked: str = ""
    presumed: int = -1  # the rank that an understudy was built for
    assigned_at: int = 0
    arrived: bool = False
    positioned_at: int | None = None
    ready: Ready | None = None
    bad_sources: set[int] = field(default_factory=set)
    missing: int = 0  # times that nobody had its side state and nobody was out of reach
    lacks_holders: bool = False  # nobody in reach has its side state, but somebody is out of reach
    # rank
    attached: bool = False
    redundant: bool = True
    kept_bytes: int = 0  # in a vault, because no other rank has it
    groups: dict[str, list[int]] | None = None  # process group -> ranks in it, as it said
    done: bool = False
    buddy: str = ""  # node
    buddy_due: bool = False  # was told by a command of its own, which its agent may have missed
    buddy_heard: bool = True  # False: its agent was away, it may have missed who it is
    parity: str = ""  # node that it was told to write its parity to
    leave_at: int = 0
    release_due: int | None = None  # generation of a planned attempt it may still hold for
    # answers in an attempt, each with its generation
    report: Report | None = None
    staged: int = -1
    held: Held | None = None
    copied: Copied | None = None
    swap: Swap | None = None
    swapped: int = -1
    swapped_at: int = 0
    resumed: Resumed | None = None
    checkpointed: int = -1
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)  # what -> (generation, when)
    synced: int = 0  # how often ranks had been told something at once when its agent joined
    resync: bool = False  # its agent came back, and it may never have heard of its Swap
    watched: dict[str, Worker] | None = None  # of its job, once it belongs to one


class Worker(WorkerFacts):
    """Facts about a process; those that make it special are watched."""

    __slots__ = ()

    @property
    def usable(self) -> bool:
        return self.alive and self.killed_at is None

    @property
    def ordinary(self) -> bool:
        if self.role != "rank" or not self.alive or self.killed_at is not None or self.done:
            return False
        return self.stalled is None and self.release_due is None and not self.resync

    def sort_in(self) -> None:
        if self.watched is None:
            return
        if not self.ordinary:
            self.watched[self.id] = self
        else:
            self.watched.pop(self.id, None)

    @property
    def place(self) -> str:
        return f"{self.node}/{self.slot}"


def _watched(name: str) -> Any:
    slot = getattr(WorkerFacts, name)
    write = slot.__set__

    def change(worker: Worker, value: object) -> None:
        write(worker, value)
        if hasattr(worker, "watched"):  # else it is still being made
            worker.sort_in()

    return property(slot.__get__, change)


if not TYPE_CHECKING:
    for _name in ("role", "alive", "killed_at", "done", "stalled", "release_due", "resync"):
        setattr(Worker, _name, _watched(_name))


@dataclass(slots=True)
class Incident:
    """A table of what is known of one, from its opening to its outcome: hence so many."""

    id: str
    trigger: Trigger
    cause: str
    opened_at: int
    victims: list[int]
    reason: str
    timeline: Timeline
    pending: list[int] = field(default_factory=list)  # planned: ranks still to be moved
    target: str = ""  # planned: node or slot being emptied
    toward: dict[int, str] = field(default_factory=dict)  # rank -> slot: there, or not at all
    moves: list[str] = field(default_factory=list)
    generation: int = 0
    attempts: int = 0
    failures: int = 0  # planned attempts undone; unplanned: newcomers that failed
    stage_failures: int = 0
    stage_failed_at: int = 0  # the first of them
    decision: str = ""
    steps_recomputed: int = 0
    fell_back: bool = False  # all ranks start again from a checkpoint
    diverged: bool = False  # numbers differed in it: it is never resolved
    steps_lost: int = 0
    source: str = ""
    sticky_tick: int | None = None  # a decision stays valid until it is committed
    give_up: str = ""  # set: write a checkpoint, then end
    give_up_at: int = 0
    moving: list[int] = field(default_factory=list)  # of the last attempt (after a replay)
    attempt_generation: int = -1  # likewise
    no_understudies: bool = False  # one could not be led on to where the job is
    interrupted: bool = False  # by a restart of the orchestrator
    committed: int | None = None  # generation

    @property
    def wants_spares(self) -> bool:
        """Any will do for it."""
        return self.cause != "resume" and not self.toward

    def also(self, reason: str, joint: str = "; ") -> None:
        """Goes on with the story; what was told already is not told again."""
        told = [part.removeprefix("then ") for part in self.reason.split("; ")]
        new = "; ".join(part for part in reason.split("; ") if part not in told)
        if new:
            self.reason = f"{self.reason}{joint}{new}" if self.reason else new


@dataclass(slots=True)
class Attempt:
    """One try to reach a new generation. Its members never change: that takes a new attempt.

    A table of who was asked what, and of the answers: hence so many."""

    kind: Kind
    incident: Incident
    generation: int
    started_at: int
    members: Ranks  # ranks whose owners are alive
    moving: tuple[int, ...]  # ranks that newcomers take over: victims, or leavers if planned
    newcomers: dict[int, str] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)  # ranks, in order of arrival
    store_node: str = ""
    store_asked_at: int = 0
    store: Address | None = None
    staged_at: int = 0  # when Stage was last sent
    retry_at: int | None = None  # its groups could not be built: when to try again
    retry_why: str = ""
    tick: int | None = None
    decided_at: int = 0
    holding: bool = False  # planned: Hold was sent
    hold_at: int = 0
    committed_at: int | None = None
    phase: str = "RESERVE"
    no_spare: str = ""  # why the job is held
    no_checkpoint: str = ""  # why the state is not on disk meanwhile
    checkpoint_failed_at: int = 0
    solo: bool = False
    told: dict[str, Told] = field(default_factory=dict)
    alone: dict[str, Worker] = field(default_factory=dict)  # asked one by one
    having: dict[str, list[int]] = field(default_factory=dict)  # class of tensors -> ranks
    # Whose answers are missing. Members; those who stay; from COMMIT on all ranks.
    reports: Tally = field(init=False)
    holds: Tally = field(init=False)
    stages: Tally = field(init=False)
    swaps: Tally = field(init=False)
    resumes: Tally = field(init=False)
    held_ticks: set[int] = field(default_factory=set)
    held_version: int = -1  # the newest

    def __post_init__(self) -> None:
        self.reports, self.holds = self.members.tally(), self.members.tally()
        self.stages = self.members.tally(self.moving)

    @property
    def committed(self) -> bool:
        return self.committed_at is not None

    def rewiring(self, world: int) -> None:
        self.swaps, self.resumes = Tally(world), Tally(world)
