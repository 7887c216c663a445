"""What the processes say to each other.

    orchestrator <-> agent    one authenticated stream per node        AgentMessage / AgentCommand
    agent <-> worker          one inherited socketpair per process     WorkerMessage / WorkerCommand
    worker <-> agent (blobs)  TCP, side state of other nodes' ranks    BlobRequest / BlobReply
    worker <-> agent (vault)  the same port, state without replicas    keepstep.model.vault

The agent relays worker messages and commands without looking at most of them. Everything that
belongs to a migration carries the *generation* of the attempt it belongs to; a receiver ignores
whatever is older than the newest generation it has seen.

A *tick* counts finished transactions (steps and sections) of the job; it is equal on all ranks at
a boundary. A *version* counts finished steps only (what users call the committed step).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.network import PathView


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Messages are trees, and an orchestrator of many ranks holds many: the collector of cycles
    has no business with them."""


class Address(msgspec.Struct, frozen=True, gc=False):
    host: str
    port: int


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node keeps what it shows to others and what it believes them by."""

    certificate: str
    key: str
    ca: str
    peers: str  # the name that every certificate of the same job bears


# --------------------------------------------------------------------------- worker -> orchestrator


class Parked(Message, frozen=True):
    """A standby reached the script's first question about its rank, at `where`."""

    where: str
    warm_ns: int  # process start to parked


class Attached(Message, frozen=True):
    """`keepstep.attach` was called; the rank has finished its set-up."""

    generation: int
    groups: list[str]  # names of the process groups that this rank is in, sorted
    parameters: int
    bytes_state: int
    redundant: bool  # every tensor has a replica on another rank, or is kept in a vault
    warnings: list[str] = []
    members: dict[str, list[int]] = {}  # of each group: must be the same for all of them
    kept_bytes: int = 0  # of tensors that no other rank has, and that a vault keeps


class Arrived(Message, frozen=True):
    """A newcomer reached its first ks.epochs/batches/step/section and needs a Position."""

    generation: int


class Ready(Message, frozen=True):
    """A newcomer has warmed up in solo mode and waits for Copy."""

    generation: int
    arrived_ns: int  # assigned -> arrived (script's construction)
    warm_ns: int  # arrived -> warmed up
    classes: list[str] = []  # of the tensors it must get (worker/state/shards.py)


class Staged(Message, frozen=True):
    """New backends for all groups of `generation` are built, beside the old ones."""

    generation: int


class StageFailed(Message, frozen=True):
    """They could not be built: a peer or the store did not answer in time."""

    generation: int
    error: str


class Report(Message, frozen=True):
    """Where a rank stands after Abort(generation), or after an error that interrupted it.

    `error_kind` is what this rank's own exception looked like: "" (none), "comm", "device" or
    "user". A rank reports again for every newer generation.
    """

    generation: int
    tick: int
    version: int
    in_fence: bool  # it reached fence `tick`: side state tick+1 is published and acknowledged
    computing: bool  # it was interrupted inside a transaction, so a retry recomputes
    error_kind: Literal["", "comm", "device", "user"] = ""
    error: str = ""
    done: bool = False  # the script has ended; the process lingers as a source of state


class Failure(Message, frozen=True):
    """A rank's main thread raised outside any known incident. Reports follow after Abort."""

    generation: int
    # usage: the script broke a rule of Keepstep's before its first step; undone: it held for a move
    # that was undone, and has no connections any more
    error_kind: Literal["comm", "device", "user", "usage", "undone"]
    error: str
    version: int


class Held(Message, frozen=True):
    """The rank stands at boundary `tick`, holds, and serves its state at `serve`."""

    generation: int
    tick: int
    version: int
    serve: Address
    pid: int
    done: bool = False
    classes: list[str] = []  # of the tensors it has: equal on two ranks, equal bytes


class Copied(Message, frozen=True):
    """A newcomer has all state of `tick`; digests were equal on both ends."""

    generation: int
    tick: int
    bytes_copied: int
    copy_ns: int
    sources: list[int]  # ranks that served tensors
    side_state: Literal["own-agent", "buddy", "checkpoint", "natural", "self"]
    restored: str = ""  # what came from a vault instead of a rank, and how


class CopyFailed(Message, frozen=True):
    """A newcomer could not get all of it; the reason decides what is tried next."""

    generation: int
    reason: Literal[
        "source-lost",
        "digest",
        "side-state-missing",  # everybody who might have it was asked
        "side-state-unreachable",  # somebody who might have it did not answer
        "shards-missing",  # no rank and no vault has them
        "checkpoint",  # it is damaged, or cannot be read from here
        "position",
        "refused",  # transparent: this process, or this place, cannot be moved like that
        "error",
    ]
    error: str
    source: int = -1  # rank, for source-lost and digest


class Swapped(Message, frozen=True):
    """The new backends are in place, and training goes on in them."""

    generation: int
    swap_ns: int


class Resumed(Message, frozen=True):
    """The first fence of `generation` was passed on this rank. Times on this rank's clock."""

    generation: int
    tick: int
    version: int
    last_commit_ns: int  # 0 for a newcomer
    first_commit_ns: int
    median_step_ns: int
    abort_ns: int = 0  # exception or Abort -> report sent


class Checkpointed(Message, frozen=True):
    """This rank's part of the just-in-time checkpoint is written."""

    generation: int
    path: str
    bytes_written: int


class CheckpointFailed(Message, frozen=True):
    """This rank's part of the checkpoint could not be written; the state is held all the same."""

    generation: int
    path: str
    error: str


class Saved(Message, frozen=True):
    """This rank's part of the periodic checkpoint `number` is on disk. It was taken at `tick`."""

    number: int
    tick: int
    version: int
    snapshot_ns: int  # how long it held training up
    write_ns: int
    bytes_written: int


class SaveFailed(Message, frozen=True):
    """This rank's part of it could not be written, or it could not be completed."""

    number: int
    error: str


class Sealed(Message, frozen=True):
    """The periodic checkpoint `number` is complete in `path`."""

    number: int
    path: str


class BuddyLost(Message, frozen=True):
    """Publishing to the buddy failed; the rank waits inside its fence for another Buddy. Or the
    parity that `parity` holds could not be written, and it goes on without."""

    generation: int
    error: str
    parity: Address | None = None


Witness = Literal[
    "inputs", "update", "collectives", "learning-rate", "replicas", "results", "script"
]
TABLE_ENTRIES_MAX = 4096
TABLE_NAME_CHARS_MAX = 256
TABLE_VALUE_CHARS_MAX = 64


class Diverged(Message, frozen=True):
    """A witness of this rank found that numbers differ which must be equal. The rank stands where
    it found it, before anything of it is committed, and waits for Proceed. Every rank that takes
    part in the comparison says so; a newcomer that finds it before it joins says it alone.

    `table` has what this rank has, as "class|name" -> a short value or a digest: of two ranks the
    entries of the same class are compared. `number` counts what this process has found, and is
    said again with every repetition."""

    generation: int
    tick: int
    version: int
    agreed: int  # last version at which all ranks are known to have agreed; -1: not known
    witness: Witness
    site: str  # step or section
    words: str = ""  # a whole sentence, if the finder knows by itself what differs
    table: dict[str, str] = {}
    number: int = 0


class Done(Message, frozen=True):
    """The user's script ended. The process stays until Finish."""

    tick: int
    version: int


class Inspected(Message, frozen=True):
    """Answer to Inspect; taken by the agent."""

    number: int
    foreign: list[str]  # connections that are the script's own, in words
    control: int  # inode of the control socket
    page: int  # descriptor of the progress page
    device: Literal["", "cuda", "hip"] = ""  # what kind of GPU it has in use
    gpu: str = ""  # which: its UUID
    gpu_bytes: int = 0
    offloads: bool = False  # it can move what is on the GPU itself


class Offloaded(Message, frozen=True):
    """Answer to Offload; taken by the agent. `error`: everything is where it was."""

    number: int
    moved: bool  # else the driver must
    areas: bool  # it can move what the driver takes for that
    took_ns: int
    error: str = ""


class Restored(Message, frozen=True):
    """A process image has come to life in this place; it holds. Said for it by whoever did that.
    The agent takes over its page and welcomes it, and passes the rest on."""

    generation: int
    page: int  # descriptor of the progress page in it
    image_bytes: int
    dump_ns: int
    stream_ns: int
    restore_ns: int
    gpu_ns: dict[str, int] = {}  # what its GPU took, by name


class InjectFired(Message, frozen=True):
    """Said by a rank right before an armed fault strikes it."""

    inject: str
    point: str
    version: int


WorkerMessage = (
    Parked
    | Attached
    | Arrived
    | Ready
    | Staged
    | StageFailed
    | Report
    | Failure
    | Held
    | Copied
    | CopyFailed
    | Swapped
    | Resumed
    | Checkpointed
    | CheckpointFailed
    | Saved
    | SaveFailed
    | Sealed
    | BuddyLost
    | Diverged
    | Done
    | Inspected
    | Offloaded
    | Restored
    | InjectFired
)


# --------------------------------------------------------------------------- orchestrator -> worker


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
    """A standby becomes the newcomer for `rank`. `presumed`: only as far as Ready, in case that it
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


# --------------------------------------------------------------------------- agent -> orchestrator


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of an agent's inventory, and of its progress messages."""

    worker: str
    slot: int
    pid: int
    rank: int = -1  # -1: standby
    generation: int = 0  # from the progress page, as the three below
    version: int = 0
    tick: int = 0
    where: str = ""
    steps_per_s: float = 0.0
    own_ns: int = 0  # of the last steps, what the rank does alone; from the page, as the next
    own_steps: int = 0


class Hello(Message, frozen=True):
    """First frame on an agent's stream. `workers` lets a restarted orchestrator catch up."""

    protocol: int
    token: str
    job: str
    node: str
    pid: int
    session: int
    blobs: Address
    slots: int
    workers: list[WorkerState] = []
    retained: list[
        tuple[str, int]
    ] = []  # dead workers whose side state is still held: (worker, rank)
    stores: list[int] = []  # generations whose store is hosted here
    labels: dict[str, str] = {}  # where the node stands: rack, switch, nvlink


class WorkerStarted(Message, frozen=True):
    """The process runs."""

    worker: str
    slot: int
    pid: int


class WorkerExited(Message, frozen=True):
    """`code` as in subprocess: negative is the signal. Its side state is kept until Forget."""

    worker: str
    rank: int
    code: int
    tail: str  # last lines it wrote
    version: int = 0  # as its page says, which outlives it
    tick: int = 0


class WorkerSaid(Message, frozen=True):
    """A worker's own words, relayed."""

    worker: str
    rank: int
    said: WorkerMessage


class WorkersSaid(Message, frozen=True):
    """The same of several workers, in order."""

    said: list[WorkerSaid]


class Progress(Message, frozen=True):
    """What the pages of the node's workers say, whenever it has changed."""

    workers: list[WorkerState]


class Stalled(Message, frozen=True):
    """No progress for stall_timeout. What triage needs to find the culprit among the ranks."""

    worker: str
    rank: int
    version: int
    tick: int
    marks: int  # progress marks since the tick began (collectives, forwards, fences, ...)
    where: str
    heartbeat_age_ns: int  # the daemon thread's: large means stopped or stuck holding the GIL
    stopped: bool  # process state T
    cpu_busy: bool  # its main thread burnt CPU during the stall


class Unstalled(Message, frozen=True):
    """It gets on again: an earlier Stalled is taken back."""

    worker: str


class StoreOpened(Message, frozen=True):
    """The store of `generation` listens there."""

    generation: int
    store: Address


class StoreFailed(Message, frozen=True):
    """It could not be opened, or it was open and has ended."""

    generation: int
    error: str


class PathNoticed(Message, frozen=True):
    """The network of this node: a line for the record, or a reason to leave it (`taint`)."""

    kind: str
    reason: str
    taint: bool = False


class PathsSeen(Message, frozen=True):
    """What the network plugins of the node's processes count, whenever it has changed."""

    paths: list[PathView]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """As its driver names it."""

    uuid: str
    name: str
    memory: int  # bytes


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What must be alike where the image of a process is taken and where it is woken."""

    kernel: str
    machine: str
    features: list[str]  # of the processor
    criu: str
    trouble: list[str] = []  # why nothing can be dumped or restored here at all
    gpus: list[Gpu] = []
    cuda: int = 0  # the driver's version of CUDA, as 13000
    gpu_trouble: str = ""  # why processes that use a GPU cannot be moved here


class Examined(Message, frozen=True):
    """Answer to Examine: how the node stands to images of processes."""

    number: int
    host: Host
    memory: int  # bytes that are free
    room: int  # bytes that are free where images land


class StopDone(Message, frozen=True):
    """Answer to Stop: every worker of the node is gone and reaped."""


AgentMessage = (
    Hello
    | WorkerStarted
    | WorkerExited
    | WorkerSaid
    | WorkersSaid
    | Progress
    | Stalled
    | Unstalled
    | StoreOpened
    | StoreFailed
    | PathNoticed
    | PathsSeen
    | Examined
    | StopDone
)


# --------------------------------------------------------------------------- orchestrator -> agent


class Accepted(Message, frozen=True):
    """Answer to Hello. A refused Hello is answered by Refused and a closed stream."""

    # Not 0: the orchestrator holds a lease and says Alive more often than that. Whoever hears
    # nothing for so long must look for the one that took over.
    silence_ns_max: int = 0


class Alive(Message, frozen=True):
    """The orchestrator has renewed its lease."""


class Refused(Message, frozen=True):
    """The Hello was not accepted, and why; the stream is closed."""

    error: str
    hint: str = ""
    retry: bool = False  # not the active orchestrator (now): try the next address


class StartWorker(Message, frozen=True):
    """Start a process in `slot`; rank -1 is a standby. Idempotent by `worker`."""

    worker: str
    slot: int
    rank: int
    generation: int
    world: int
    local_world: int
    master: Address
    buddy: Address | None
    script: list[str]  # script or -m module, and its arguments
    env: dict[str, str] = {}
    parity: Parity | None = None
    checkpoints: str = ""  # as in Welcome
    transparent: bool = False  # it runs in namespaces of its own, and can be moved as a whole
    redundancy: Literal["auto", "buddy", "parity", "off"] = "auto"  # as in JobSpec


class KillWorker(Message, frozen=True):
    """SIGKILL the worker's whole process group (fence), then WorkerExited. Idempotent."""

    worker: str


class SendSignal(Message, frozen=True, tag="Signal"):
    """Send SIGSTOP (and SIGCONT after `resume_after_ns`, 0: never) or SIGKILL: injection."""

    worker: str
    signal: int
    resume_after_ns: int = 0


class KillNode(Message, frozen=True):
    """Injection: the agent ends its whole session with SIGKILL, itself included."""


class Tell(Message, frozen=True):
    """Relay to one worker. An Assign tells the agent as well which rank a standby has now."""

    worker: str
    command: WorkerCommand


class TellRanks(Message, frozen=True):
    """Relay to every process of the node that has a rank, except these workers and whoever was to
    be killed. What is equal for all ranks of a job is written once and sent to all nodes."""

    command: WorkerCommand
    besides: list[str] = []


class OpenStore(Message, frozen=True):
    """Host a fresh c10d TCPStore for `generation`; answer StoreOpened. Idempotent."""

    generation: int


class CloseStore(Message, frozen=True):
    """Close it: ranks blocked in its rendezvous fail at once."""

    generation: int


class Forget(Message, frozen=True):
    """Drop the side state kept for these dead workers, and all copies for other nodes' ranks that
    were put in generations before `before`: the job went back behind them."""

    workers: list[str]
    before: int = 0


class Examine(Message, frozen=True):
    """Look at the node ahead of time, for an operator."""

    number: int


class Stop(Message, frozen=True):
    """End every worker, close stores, answer StopDone and exit.

    `finished`: the workers were told Finish and end by themselves; only stragglers are killed."""

    grace_ns: int
    finished: bool = False


AgentCommand = (
    Accepted
    | Alive
    | Refused
    | StartWorker
    | KillWorker
    | SendSignal
    | KillNode
    | Tell
    | TellRanks
    | OpenStore
    | CloseStore
    | Forget
    | Examine
    | Stop
)


# --------------------------------------------------------------------------- blobs (side state)


SERIAL_BITS = 40  # of a serial; above them stands the generation


class BlobPut(Message, frozen=True):
    """Keep `data` as `rank`'s side state of `tick`; the newest ticks are kept.

    tick -1 is the record of the rank's init-time collectives; it is kept for good.

    `ahead`: sent before the rank has reached its fence. It is what the rank will publish, or will
    be put again, maybe elsewhere: of several copies the one with the greatest `serial` counts."""

    token: str
    rank: int
    tick: int
    data: bytes
    ahead: bool = False
    serial: int = 0


class BlobGet(Message, frozen=True):
    """tick -2 asks for the newest."""

    token: str
    rank: int
    tick: int


class BlobConfirm(Message, frozen=True):
    """What was sent ahead for `tick` is what the rank has published. Not answered."""

    token: str
    rank: int
    tick: int


BlobRequest = BlobPut | BlobGet | BlobConfirm


class BlobOk(Message, frozen=True):
    """Kept."""


class BlobData(Message, frozen=True):
    """The side state that was asked for."""

    tick: int
    data: bytes
    own: bool  # read from the rank's own node, not a buddy copy
    ahead: bool = False  # as it was put
    serial: int = 0


class BlobMissing(Message, frozen=True):
    """It is not here; these ticks are."""

    held: list[int]


class BlobRefused(Message, frozen=True):
    """A wrong token, or a request that makes no sense."""

    error: str


BlobReply = BlobOk | BlobData | BlobMissing | BlobRefused

PROTOCOL = 2
