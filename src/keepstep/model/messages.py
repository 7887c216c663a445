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
    """A spare reached the script's first question about its rank, at `where`."""

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


PROTOCOL = 2
