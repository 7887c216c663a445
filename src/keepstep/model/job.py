"""A job as it is submitted, and what operators can ask of it (inputs of the core)."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.agent_messages import AgentMessage, Hello
from keepstep.model.schedule import Policy, Provision

POINTS = (
    "before_forward",
    "in_backward",
    "before_fence",
    "in_fence",
    "in_optimizer",
    "after_step",
    "in_section",
)


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    slots: int  # places where a rank or a spare can run


class InjectSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault to inject. Without `step` it happens at once; with it the worker does it itself."""

    id: str
    action: Literal["kill", "stop", "kill-node", "device-error"]
    rank: int = -1
    node: str = ""
    step: int = -1  # version
    point: str = "before_forward"
    seconds: float = 0.0  # stop only: continue after that time (0: never)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: str
    world: int
    local_world: int  # --nproc-per-node
    nodes: list[NodeSpec]  # the first world/local_world of them get the ranks, in order
    spares: int  # warm spares to keep, where free slots exist
    understudies: int = 0  # beside each spare, processes that are built as presumed ranks
    # of tensors that no other rank has
    redundancy: Literal["auto", "buddy", "parity", "off"] = "auto"
    # "transparent": scripts that know nothing of Keepstep; ranks move as images of their processes
    mode: Literal["aware", "transparent"] = "aware"
    stall_timeout_ns: int
    script: list[str]
    env: dict[str, str] = {}
    directory: str  # logs and just-in-time checkpoints of this job
    resume: str = ""  # checkpoint to start from
    checkpoints: str = ""  # directory of this job's periodic checkpoints; "": none are written
    checkpoint_interval_ns: int = 0  # 0: from what one costs, and mttf_ns
    mttf_ns: int = 0  # of the job; 0: from the number of its nodes
    inject: list[InjectSpec] = []
    provision: Provision | None = None  # its nodes are a scheduler's
    policy: Policy = Policy()


# --------------------------------------------------------------------------- inputs of the core


class Input(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    pass


class Submit(Input, frozen=True):
    """A new job."""

    spec: JobSpec


class AgentJoined(Input, frozen=True):
    """A node's stream was accepted; the Hello says what is there."""

    job: str
    node: str
    hello: Hello


class AgentSaid(Input, frozen=True):
    """Anything an agent says after that."""

    job: str
    node: str
    message: AgentMessage


class AgentsSaid(Input, frozen=True):
    """What several agents have said, in the order it came."""

    job: str
    said: list[AgentSaid]


class AgentGone(Input, frozen=True):
    """The stream broke. Not yet a death: training may go on without it."""

    job: str
    node: str


class NodeDead(Input, frozen=True):
    """Positive knowledge (its launcher reaped it and swept its session): fenced already."""

    job: str
    node: str


class SpareGranted(Input, frozen=True):
    """The scheduler has given a place for the node that was wanted; its agent is being started."""

    job: str
    op: str
    place: str


class SpareRefused(Input, frozen=True):
    """The scheduler has none, for now."""

    job: str
    op: str
    why: str


class PlaceHealthy(Input, frozen=True):
    """A place that a spare has replaced could be had again, and has been well for long enough."""

    job: str
    place: str


class PlaceReturned(Input, frozen=True):
    """The scheduler has a node's place back; nothing of the job runs there any more."""

    job: str
    node: str


class Wake(Input, frozen=True):
    """The time given by `deadline()` has come."""


class Migrate(Input, frozen=True):
    """Move these ranks somewhere else."""

    job: str
    ranks: list[int]
    reason: str = "requested"


class Rebalance(Input, frozen=True):
    """Move ranks to spares in better places (see balance.py)."""

    job: str


class Drain(Input, frozen=True):
    """Move everything away from a node, and keep it empty."""

    job: str
    node: str
    reason: str = "drain"


class Taint(Input, frozen=True):
    """`target` is a node ("n1") or a slot ("n1/0")."""

    job: str
    target: str
    reason: str


class Note(Input, frozen=True):
    """A detector's reading from which nothing follows; `target` as in Taint."""

    job: str
    target: str
    signal: str
    reason: str


class Untaint(Input, frozen=True):
    """The node or slot may be used again."""

    job: str
    target: str


class InjectNow(Input, frozen=True):
    """Injection: a fault on request."""

    job: str
    inject: InjectSpec


class ProceedAnyway(Input, frozen=True):
    """Numbers differ, and the job is to go on with them."""

    job: str
    by: str = "an operator"


class Cancel(Input, frozen=True):
    """End the job; everything is stopped."""

    job: str
    reason: str
    exit_code: int
    checkpoint: bool = False  # write one first, if the job writes checkpoints and can


CoreInput = (
    Submit
    | AgentJoined
    | AgentSaid
    | AgentsSaid
    | AgentGone
    | NodeDead
    | SpareGranted
    | SpareRefused
    | PlaceReturned
    | PlaceHealthy
    | Wake
    | Migrate
    | Rebalance
    | Drain
    | Taint
    | Note
    | Untaint
    | InjectNow
    | ProceedAnyway
    | Cancel
)
