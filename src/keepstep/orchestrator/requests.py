"""Bodies of the REST requests. Unknown fields are refused: a typing error must not be obeyed."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.messages import Address
from keepstep.model.views import IncidentView, JobView, UnderstudyView


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class MigrateRequest(Request, frozen=True, kw_only=True):
    ranks: list[int]
    reason: str = "requested"


class DrainRequest(Request, frozen=True, kw_only=True):
    node: str
    reason: str = "drain"


class RebalanceRequest(Request, frozen=True, kw_only=True):
    pass


class TaintRequest(Request, frozen=True, kw_only=True):
    target: str  # a node ("n1") or a slot ("n1/0")
    reason: str


class UntaintRequest(Request, frozen=True, kw_only=True):
    target: str


class CancelRequest(Request, frozen=True, kw_only=True):
    reason: str = "cancelled by an operator"
    exit_code: int = 3
    checkpoint: bool = False  # write one first, if the job writes checkpoints


class ProceedRequest(Request, frozen=True, kw_only=True):
    """Numbers differ between ranks, and the job is to go on with them."""

    by: str = "an operator"


class SignalRequest(Request, frozen=True, kw_only=True):
    """A detector's reading about one node, slot or rank (name exactly one)."""

    job: str
    kind: str
    reason: str
    severity: Literal["info", "taint"] = "taint"
    node: str = ""
    slot: str = ""
    rank: int = -1


class JoinRequest(Request, frozen=True, kw_only=True):
    """Of an agent that has no certificate yet. `token` is a join token or an operator's; empty
    where the request itself is an operator's."""

    request: str  # PEM certificate signing request
    token: str = ""
    job: str = ""  # needed where several jobs are live
    node: str = ""  # "": the first node of the job that has not joined, else a new one
    place: str = ""  # the node that is to run here, as the job's scheduler names this machine


# --------------------------------------------------------------------------- answers


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    url: str
    stream: Address


class JoinedBody(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    node: str
    certificate: str  # PEM, for that node of that job
    ca: str  # PEM
    token: str  # the node's own
    job_token: str  # common to the nodes of the job
    stream: Address  # host "": the one that was asked
    directory: str
    stall_timeout_ns: int
    slots: int = 0  # of that node, where the job's spec says so
    peers: list[Peer] = []  # all orchestrators that share the store


class Ok(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool = True


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A move was asked for; `incident` tells how it goes, and its outcome."""

    ok: bool = True
    incident: str


class SignalTaken(msgspec.Struct, frozen=True, kw_only=True):
    action: Literal["noted", "tainted"]
    target: str


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """`change` grows with every durable record about the job; ask again with it."""

    change: int
    job: JobView
    incidents: list[IncidentView]


class SpareLine(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    worker: str
    pid: int
    node: str
    slot: str
    state: str
    parked_at: str = ""
    understudies: list[UnderstudyView] = []


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """One job at a glance; `/v1/jobs/{job}` has the rest."""

    job: str
    state: str
    priority: int
    step: int
    steps_per_s: float
    generation: int
    ranks: int
    spares: int  # parked
    nodes: int  # connected
    protected: bool  # any one node may be lost without losing a step
    last_incident: str
    reason: str


class NodeLine(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    node: str
    place: str  # as the scheduler names it
    labels: dict[str, str]
    state: str
    slots: int
    ranks: list[int]
    spares: int
    taints: list[str]


class Info(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    pid: int
    stream: Address
    protocol: int
    role: Literal["active", "standby", "suspended"] = "active"
    reason: str = ""  # why it is not active
    active: str = ""  # address of the active one, as far as it is known
    peers: list[Peer] = []  # all that share the store, this one included
    scheduler: str = ""  # that gives nodes to its jobs


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: str
    hint: str = ""


class StandbyBody(ErrorBody, frozen=True, kw_only=True):
    """Another orchestrator decides."""

    standby: bool
    active: str  # its address, "" if it is not known
