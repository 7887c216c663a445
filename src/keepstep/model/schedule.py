"""What the orchestrator and a scheduler say to each other about machines.

A *place* is a machine as the scheduler names it; a node of a job is an agent in a place. A *lease*
is the right to use places for one job, given for one *operation* (`op`): asking again with the
same job and op gives the same lease, also after a restart of whoever asked.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Where a spare may come from, cheapest first: a reservation for spares, a machine that nobody
# uses, one that a job of lower priority is using, or the end of the queue.
Kind = Literal["reserved", "idle", "preempt", "queue"]
Level = Literal["degraded", "fenced"]  # nothing new may start there; nothing may run there
START = "start"  # the operation that a job's first places belong to


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which places will do. Empty or 0: any."""

    partition: str = ""
    reservation: str = ""  # whose places are spares
    account: str = ""
    qos: str = ""
    features: str = ""
    gpus: int = 0  # on each place
    gpu_type: str = ""
    owner: str = ""  # whose pods are the places, as long as there are any: KIND/NAME


class Provision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a job whose nodes a scheduler gives: those it has, and which ones it may ask for."""

    scheduler: str
    places: dict[str, str]  # node -> place
    constraints: Constraints = Constraints()
    kinds: list[Kind] = []  # of spares; none: it never asks
    patience_ns: int = 120_000_000_000  # how long one request may take
    back_after_ns: int = 0  # a lost place has been well for so long: move back; 0: never


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which spares a job keeps and takes, and what jobs of higher priority may take from it."""

    priority: int = 0
    dedicated: int = 0  # nodes without ranks to keep; one that was used is replaced
    within: list[str] = []  # labels of nodes: a spare is in the domain of the node it replaces
    yields: bool = True  # it gives nodes up to jobs of higher priority
    grace_ns: int = 30_000_000_000  # and may look that long for others before it does
    # When a lost place is well again: at once, when nothing has happened for a while, or not at all
    back: Literal["immediately", "quiet", "never"] = "immediately"
    quiet_ns: int = 600_000_000_000
    # Ranks that are not where they belong move when nothing has happened for quiet_ns (balance.py)
    rebalance: Literal["never", "when-free"] = "never"
    # A rank whose own work takes `straggler_factor` times the median of all, for so long: nothing,
    # a line for people, or a planned move to a spare
    stragglers: Literal["off", "report", "move"] = "report"
    straggler_factor: float = 1.5
    straggler_after_ns: int = 60_000_000_000
    # Numbers differ that must be equal: stand, go back to a checkpoint at which they were, or go on
    on_divergence: Literal["hold", "fall-back", "continue"] = "hold"
    hold_ns: int = 0  # a job that stands for it ends after so long; 0: when somebody says so


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    op: str
    constraints: Constraints
    kinds: list[Kind]  # tried in this order
    avoid: list[str] = []  # places
    only: str = ""  # this place
    count: int = 1
    near: dict[str, str] = {}  # labels that a place must have
    apart: dict[str, str] = {}  # and those that it had better not have


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # the scheduler's own
    job: str
    op: str
    kind: Kind
    places: list[str]
    instead_of: str = ""  # the place that it has replaced, once that is committed
    adopted: bool = False  # somebody else has made it, and will end it


class Place(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: Literal["free", "used", "degraded", "down"]
    reason: str = ""
    ours: bool = False  # it is degraded or down because Keepstep said so
    gpu_type: str = ""
    labels: dict[str, str] = {}  # rack, switch, nvlink: where it stands


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """A place that could be had now."""

    place: str
    kind: Kind


class AgentStart(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    node: str
    command: list[str]
    env: dict[str, str]  # added to that of whoever starts it
    directory: str  # where it runs
    log: str


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    taint: bool  # degrade and fence places
    preempt: bool
    shrink: bool  # give single places of a lease back
    lacks: list[str] = []  # sentences: what cannot be done, and what follows from it
