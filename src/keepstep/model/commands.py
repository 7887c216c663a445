"""What a rank is told by the orchestrator, through its agent. See messages.py."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.messages import Address, Message, TlsFiles


class Parity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Who keeps the XOR of what these ranks have in the vaults of their own agents."""

    holder: Address
    members: list[int]


class Buddy(Message, frozen=True):
    """Where this rank publishes its side state besides its own agent; None: nowhere."""

    address: Address | None
    parity: Parity | None = None


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is set for a job, or for its nodes, and concerns its workers alone. Words are as they
    were said: who uses them refuses what they cannot be."""

    redundancy: Literal["auto", "buddy", "parity", "off"] = "auto"
    vault_lanes: str = "auto"  # KEEPSTEP_VAULT_LANES
    vault_slice: str = "auto"  # KEEPSTEP_VAULT_SLICE
    trace: str = ""  # model/trace.py: FOLDER, "": no trace
    steps_max: int = 0  # STEPS_MAX, 0: no end


class Welcome(Message, frozen=True):
    """First frame an agent writes on a new worker's socket (the agent itself makes it)."""

    job: str
    node: str
    worker: str
    token: str  # for blob and state channels of this job
    blobs: Address  # of the own agent
    stall_timeout_ns: int
    interface: str  # address to bind state servers to
    tls: TlsFiles | None = None  # of the node; None: everything is on loopback
    checkpoints: str = ""  # directory of the job's periodic checkpoints; "": there are none
    settings: WorkerSettings = WorkerSettings()


class Assign(Message, frozen=True):
    """A spare becomes the newcomer for `rank`. `presumed`: only as far as Ready, in case that it
    will be needed; a later Assign for the same rank is answered with what was said already."""

    rank: int
    generation: int
    master: Address
    buddy: Address | None
    holders: list[Address] = []  # blob servers that may hold the rank's init record (tick -1)
    checkpoint: str = ""  # or the directory that does
    presumed: bool = False


class Position(Message, frozen=True):
    """Which side state tells a newcomer where to re-enter. tick 0: start naturally.

    tick -2 is the newest there is; tick -3 is the one in the checkpoint directory of Assign.

    `final` is False while the job still trains (planned moves): the newest blob of the rank is
    used to warm up, and Copy names the real one.
    """

    generation: int
    tick: int
    final: bool
    holders: list[Address]  # blob servers to ask, in order


class Abort(Message, frozen=True):
    """Stop using the current groups now, whatever they are doing, and Report."""

    generation: int
    reason: str


class Hold(Message, frozen=True):
    """Planned: raise the hold word in the next fence; all ranks stop at the same boundary."""

    generation: int


class Stage(Message, frozen=True):
    """Build the backends of `generation` in a background thread, answer Staged."""

    generation: int
    store: Address


class Decide(Message, frozen=True):
    """Unplanned: go to `tick` (apply if waiting in the fence before it, else roll back to
    its begin), then answer Held."""

    generation: int
    tick: int


class Source(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    rank: int
    pid: int
    node: str
    serve: Address
    classes: list[str] = []


class Copy(Message, frozen=True):
    """A newcomer pulls the state of `tick` from `sources` (several in parallel) and its side
    state from `holders`; or, when `checkpoint` is set, both from that directory."""

    generation: int
    tick: int
    sources: list[Source]
    holders: list[Address]
    checkpoint: str = ""
    everybody: bool = False  # no other node than the rank's own was ever lost


class Swap(Message, frozen=True):
    """Committed: put the staged backends of `generation` in place and go on training.

    `solo` keeps a newcomer without peers: everyone else has already finished. `same_buddy`: the
    buddy stays who it was, whatever `buddy` says; and so does the parity."""

    generation: int
    buddy: Address | None
    solo: bool = False
    same_buddy: bool = False
    parity: Parity | None = None


class Release(Message, frozen=True):
    """Planned attempts up to this generation are over without a swap: drop what was staged and go
    on as before. Up to: a restarted orchestrator may not know for which of them a rank holds."""

    generation: int


class Checkpoint(Message, frozen=True):
    """Held with no spare: write the state of the held tick to `path` (just-in-time checkpoint).

    Every held rank writes its own side state, and its shards if it is the first that has them of
    those that are not `gone`; `lead` also writes the replicated state, the side state of the dead
    (rank -> blob servers) and what vaults have of those whose shards were `kept` there."""

    generation: int
    path: str
    lead: bool
    tick: int
    world: int
    dead: dict[int, list[Address]] = {}
    gone: list[int] = []
    kept: list[int] = []


class Snapshot(Message, frozen=True):
    """Raise the snapshot word in the next fence: all ranks take their part of the periodic
    checkpoint `number` at the boundary behind it, write it beside training and say Saved."""

    generation: int
    number: int


class Seal(Message, frozen=True):
    """Every part of the periodic checkpoint `number` is there: complete it, and remove all others
    but those in `keep`."""

    number: int
    tick: int
    world: int
    keep: list[str] = []


class Proceed(Message, frozen=True):
    """Numbers differ, as this rank said in its Diverged `number`, and it goes on all the same."""

    generation: int
    number: int


class Leave(Message, frozen=True):
    """The rank has moved elsewhere: exit quietly."""

    generation: int


class Inspect(Message, frozen=True):
    """Transparent: what of this process could not be moved? Sent by the agent."""

    number: int


class Offload(Message, frozen=True):
    """Transparent: this rank, which holds, is about to be dumped. It gives back what it does not
    need on the GPU, and if `move`, and if it can, it moves the rest into files where its agent
    finds them (keepstep.model.image). Sent by the agent."""

    number: int
    generation: int
    move: bool


class Finish(Message, frozen=True):
    """All ranks are done: exit now."""


class Arm(Message, frozen=True):
    """Fault injection: kill or stop yourself at `point` of step `step` (a version)."""

    inject: str
    action: Literal["kill", "stop", "device-error"]
    step: int
    point: str


WorkerCommand = (
    Buddy
    | Welcome
    | Assign
    | Position
    | Abort
    | Hold
    | Stage
    | Decide
    | Copy
    | Swap
    | Release
    | Checkpoint
    | Snapshot
    | Seal
    | Proceed
    | Leave
    | Inspect
    | Offload
    | Finish
    | Arm
)
