"""What operators see: `keepstep status --json` and `keepstep incidents --json`, word for word."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.network import PathView

JobState = Literal[
    "starting",
    "running",
    "recovering",
    "held",
    "done",
    "failed",
    "fell_back",
    "diverged",
    "cancelled",
]
Outcome = Literal["OPEN", "RESOLVED", "ABORTED", "FELL_BACK", "FAILED", "DIVERGED"]


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    pid: int
    node: str
    slot: str
    worker: str
    generation: int
    committed_step: int
    state: str  # starting, running, holding, joining, dead, done
    own_ms: float = 0.0  # of a step, what it does before it meets other ranks; 0: not known


class UnderstudyView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int  # presumed
    worker: str
    pid: int
    state: str  # building, ready


class SpareView(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    pid: int
    node: str
    slot: str
    state: str  # starting, parked, assigned
    parked_at: str = ""
    understudies: list[UnderstudyView] = []  # in the same slot


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    state: str  # connected, disconnected, dead
    pid: int
    session: int
    slots: int
    taints: list[str]
    paths: list[PathView] = []  # where the network plugin is in use
    place: str = ""  # its machine as a scheduler names it
    labels: dict[str, str] = {}  # where it stands


class NoteView(msgspec.Struct, frozen=True, kw_only=True):
    """A warning, or a detector's reading: nothing may have followed from it."""

    at_ns: int  # wall clock
    text: str


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    phase: str  # RESERVE, HOLD, COPY, COMMIT, REWIRE, RESUME, RETIRE
    start_ns: int  # since the incident was opened
    duration_ms: float


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    job: str
    trigger: Literal["planned", "pre-emptive", "unplanned"]
    # process-exit, node-lost, hang, device-error, connection, user, preempted; drain, migrate,
    # rebalance, straggler, taint, resume;
    # start; divergence
    cause: str
    victims: list[int]
    moves: list[str]  # "rank 2: n0/1 -> n1/0"
    generation: int  # after it
    opened_at_ns: int  # wall clock
    phases: list[PhaseView]
    # The slowest rank's: abort (a survivor, until it reports), report (until all have and it is
    # decided), newcomer_build, warm_up, copy, rewire, first_step
    timings_ms: dict[str, float]
    source: str  # "rank 0, rank 1 + side state from own-agent"
    decision: str  # "", RETRY or COMMIT
    pause_ms: float
    steps_lost: int
    steps_recomputed: int
    outcome: Outcome
    reason: str
    attempts: int = 1


class MoveView(msgspec.Struct, frozen=True, kw_only=True):
    """One move of a plan."""

    rank: int
    origin: str  # slot
    to: str  # slot; "": none of the job's own nodes
    # understudy, spare, process (one is started in a free slot), scheduler (it is asked for a
    # node), wait (until something changes)
    cost: str
    reason: str


class RejectedView(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    why: str


class OfferView(msgspec.Struct, frozen=True, kw_only=True):
    """A place that the scheduler could give at the moment, cheapest first."""

    place: str
    kind: str  # reserved, idle, yield, preempt
    reason: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would lead to now; nothing was changed. Word for word `--plan-only --json`."""

    job: str
    asked: str  # "migrate rank 2", "drain n1", "rebalance"
    moves: list[MoveView]
    rejected: list[RejectedView]  # alternatives, and why they are not used
    offers: list[OfferView] = []  # for moves that need the scheduler
    then: list[str] = []  # what else follows, in order


class CheckpointsView(msgspec.Struct, frozen=True, kw_only=True):
    """Periodic checkpoints."""

    directory: str
    interval_s: float
    mttf_h: float
    cost_ms: float  # how long one holds training up, smoothed; 0: none was taken yet
    write_s: float  # likewise, beside training
    saving: bool  # one is being written
    put_off: int  # because the one before was still being written
    newest: str = ""  # the newest complete one
    step: int = 0
    written_at_ns: int = 0  # wall clock


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """All that operators see of one job, as a table: hence so many."""

    job: str
    state: JobState
    reason: str
    exit_code: int | None
    generation: int
    world: int
    committed_step: int
    steps_per_s: float
    script: str
    directory: str
    node_loss_protected: bool
    protection: str  # a sentence
    ranks: list[RankView]
    spares: list[SpareView]
    nodes: list[NodeView]
    last_incident: str  # id, or ""
    injects_fired: list[str]
    traceback: str = ""
    checkpoint: str = ""  # just-in-time checkpoint, when held
    notes: list[NoteView] = []  # the newest, in order
    control: str = ""  # why nothing is decided at the moment; this is the last state known
    stall_timeout_ns: int = 0
    checkpoints: CheckpointsView | None = None
    priority: int = 0  # among the jobs of one orchestrator
    stragglers: list[str] = []  # a sentence for each
    divergence: str = ""  # it stands because numbers differ between ranks: which
