"""What an agent and its orchestrator say to each other. See messages.py."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.model.commands import Parity, WorkerCommand
from keepstep.model.messages import Address, Message, WorkerMessage
from keepstep.model.network import PathView


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of an agent's inventory, and of its progress messages."""

    worker: str
    slot: int
    pid: int
    rank: int = -1  # -1: spare
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
    """Start a process in `slot`; rank -1 is a spare. Idempotent by `worker`."""

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
    """Relay to one worker. An Assign tells the agent as well which rank a spare has now."""

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
