"""Ledger records: what the core wrote down before it acted on it.

The ledger is the only truth after a crash of the orchestrator, so a record exists for everything
that later decisions depend on and that no agent could tell again (who was started under which id,
which generations were used up, what was decided and committed), and for everything an operator
may ask about afterwards. Facts that agents repeat in their Hello (pids, steps) are not recorded.

New kinds may be added and fields with defaults too; neither may be renamed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.job import JobSpec
from keepstep.model.schedule import Kind
from keepstep.model.views import IncidentView, JobView

Trigger = Literal["planned", "pre-emptive", "unplanned"]


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job: str
    at_ns: int


class JobSubmitted(BaseRecord, frozen=True, kw_only=True):
    """The job exists from here on."""

    spec: JobSpec


class StartBegun(BaseRecord, frozen=True, kw_only=True):
    """All ranks are about to be started from scratch, with this generation's store."""

    generation: int
    reason: str


class JobStarted(BaseRecord, frozen=True, kw_only=True):
    """Every rank has attached (or ended): from here on a death is migrated, not restarted."""

    generation: int


class Placed(BaseRecord, frozen=True, kw_only=True):
    """A process is started in a slot. `rank` -1 is a spare, or with `presumed` an understudy of
    that rank. Worker ids are never used again."""

    worker: str
    node: str
    slot: int
    rank: int
    generation: int
    presumed: int = -1


class WorkerEnded(BaseRecord, frozen=True, kw_only=True):
    """The process is known to be gone."""

    worker: str
    rank: int
    code: int
    why: str


class NodeLost(BaseRecord, frozen=True, kw_only=True):
    """The node is given up: its processes count as gone."""

    node: str
    why: str


class NodeJoined(BaseRecord, frozen=True, kw_only=True):
    """An agent joined: a new one, one that was started anew, or one that was away."""

    node: str
    slots: int
    labels: dict[str, str] = {}


class SpareWanted(BaseRecord, frozen=True, kw_only=True):
    """The job has no spare for a victim: the scheduler is asked for a place for `node`."""

    op: str
    node: str
    instead_of: str  # the victim's place
    avoid: list[str]  # places
    reason: str
    only: str = ""  # the place to move back to
    kinds: list[Kind] = []  # empty: all that the job allows
    near: dict[str, str] = {}  # labels that the place must have
    apart: dict[str, str] = {}  # and those that it had better not have
    pool: bool = False  # nobody needs it now


class SpareGiven(BaseRecord, frozen=True, kw_only=True):
    """It gave one. What follows is the agent's NodeJoined, or SpareDenied."""

    op: str
    node: str
    place: str


class SpareDenied(BaseRecord, frozen=True, kw_only=True):
    """It gave none, or its agent did not come, or none is needed any more: whatever was acquired
    goes back."""

    op: str
    why: str


class NodeReturned(BaseRecord, frozen=True, kw_only=True):
    """The scheduler has the place of a node that was left."""

    node: str
    place: str


class NodeYielded(BaseRecord, frozen=True, kw_only=True):
    """A node is drained because a job of higher priority needs one."""

    node: str
    to: str  # that job
    reason: str


class IncidentOpened(BaseRecord, frozen=True, kw_only=True):
    """A cause with its victims; from here on somebody looks after it."""

    incident: str
    trigger: Trigger
    cause: str
    victims: list[int]
    reason: str
    target: str = ""  # node or slot to be emptied
    toward: dict[int, str] = {}  # rank -> slot: there, or not at all


class IncidentWidened(BaseRecord, frozen=True, kw_only=True):
    """More victims before it was over."""

    incident: str
    cause: str
    victims: list[int]  # those added
    reason: str


class AttemptStarted(BaseRecord, frozen=True, kw_only=True):
    """The generation is used up, whatever becomes of the attempt."""

    incident: str
    generation: int
    kind: Literal["planned", "unplanned", "resume"]
    ranks: list[int]  # to be given to newcomers
    reason: str


class Decided(BaseRecord, frozen=True, kw_only=True):
    """Unplanned: the tick from which all go on. It stays the same until it is committed."""

    incident: str
    generation: int
    tick: int
    decision: Literal["RETRY", "COMMIT"]
    reason: str


class Committed(BaseRecord, frozen=True, kw_only=True):
    """The point of no return: from here on `placement` (rank -> worker) holds. Ranks that are not
    in it stay where they are."""

    incident: str
    generation: int
    tick: int
    placement: dict[int, str]
    moves: list[str]


class IncidentClosed(BaseRecord, frozen=True, kw_only=True):
    """How it ended, as operators see it."""

    view: IncidentView


class Tainted(BaseRecord, frozen=True, kw_only=True):
    """A node or slot that no rank is to be moved to any more."""

    target: str
    reason: str


class Deferred(BaseRecord, frozen=True, kw_only=True):
    """A taint that nobody acts on yet, because too many came at once."""

    target: str
    reason: str
    why: str


class Untainted(BaseRecord, frozen=True, kw_only=True):
    """The node or slot may be used again."""

    target: str


class SignalSeen(BaseRecord, frozen=True, kw_only=True):
    """A detector's reading that was looked at, whether or not anything followed from it."""

    node: str
    worker: str
    signal: str
    detail: str


class Warned(BaseRecord, frozen=True, kw_only=True):
    """Something that an operator should know of."""

    message: str


class CheckpointWritten(BaseRecord, frozen=True, kw_only=True):
    """The just-in-time checkpoint of a held job is complete."""

    path: str
    tick: int


class CheckpointSealed(BaseRecord, frozen=True, kw_only=True):
    """A periodic checkpoint is complete: a loss that nothing else covers goes back to it."""

    path: str
    tick: int
    version: int
    snapshot_ns: int  # how long the slowest rank was held up
    write_ns: int


class StopBegun(BaseRecord, frozen=True, kw_only=True):
    """The ranks are asked to hold, under this generation, to write a checkpoint and to end."""

    generation: int
    reason: str
    exit_code: int


class FellBack(BaseRecord, frozen=True, kw_only=True):
    """State is lost that nobody holds any more: all ranks are ended and will be started from this
    checkpoint."""

    incident: str
    path: str
    tick: int
    steps_lost: int
    generation: int  # whatever was put for ranks of a lower one is of no use
    reason: str


class DivergenceFound(BaseRecord, frozen=True, kw_only=True):
    """Numbers differ between ranks that must be equal. The ranks that found it wait."""

    incident: str
    witness: str
    site: str
    tick: int
    version: int
    agreed: int  # last step at which all are known to have agreed; -1: not known
    text: str
    checkpoint: str = ""  # newest one of a step at which all agreed
    move: str = ""  # incident of a planned move that was in progress


class DivergenceAccepted(BaseRecord, frozen=True, kw_only=True):
    """They go on all the same: an exception to the guarantee. tick -1: also at later ticks."""

    incident: str
    witness: str
    site: str
    tick: int
    by: str


class InjectDone(BaseRecord, frozen=True, kw_only=True):
    """An injected fault has struck."""

    inject: str
    detail: str


class JobEnded(BaseRecord, frozen=True, kw_only=True):
    """How it ended, as operators see it."""

    view: JobView


Record = (
    JobSubmitted
    | StartBegun
    | JobStarted
    | Placed
    | WorkerEnded
    | NodeLost
    | NodeJoined
    | SpareWanted
    | SpareGiven
    | SpareDenied
    | NodeReturned
    | NodeYielded
    | IncidentOpened
    | IncidentWidened
    | AttemptStarted
    | Decided
    | Committed
    | IncidentClosed
    | Tainted
    | Deferred
    | Untainted
    | SignalSeen
    | Warned
    | CheckpointWritten
    | CheckpointSealed
    | StopBegun
    | FellBack
    | DivergenceFound
    | DivergenceAccepted
    | InjectDone
    | JobEnded
)
