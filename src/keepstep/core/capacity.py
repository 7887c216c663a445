"""What is known about the places of a job whose nodes a scheduler gives (see provision.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Kind


@dataclass(slots=True)
class Want:
    """A place that the scheduler was asked for. Its answer is an agent that joins as `node`."""

    op: str
    node: str
    instead_of: str
    avoid: list[str]
    at: int
    only: str = ""  # nothing is lacking: the place to move back to
    kinds: list[Kind] = field(default_factory=list)  # none: all that the job allows
    near: dict[str, str] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    pool: bool = False  # nobody needs it now
    place: str = ""  # given; the agent is awaited


@dataclass(slots=True)
class Yielded:
    """A node that is given up to another job."""

    to: str
    until: int  # its ranks may look for another place
    over: bool = False


@dataclass(slots=True)
class Capacity:
    places: dict[str, str]  # node -> place, of those that the scheduler has not back
    ops: dict[str, str]  # node -> what its place was acquired for
    want: Want | None = None
    late: dict[str, tuple[str, str]] = field(default_factory=dict)  # node -> place and op, given up
    origins: dict[str, str] = field(default_factory=dict)  # node -> the place it stands in for
    retiring: set[str] = field(default_factory=set)  # nodes that are well and will be left
    swaps: dict[str, str] = field(default_factory=dict)  # place -> op of what took its place
    asked: int = 0  # how often
    again_at: int = 0  # not before
    denied: str = ""  # why, the last time
    cheap: bool = False  # that was for the pool: whoever is in need asks again at once
    given: int = 0  # places since it began to lack some
    yields: dict[str, Yielded] = field(default_factory=dict)  # nodes given up to other jobs
    sharing: bool = False  # others here may yield a node (turns.py)
    forced: bool = False  # none of them can: the scheduler may preempt
    awaiting: bool = False  # one is being given up for this job

    @classmethod
    def of(cls, spec: JobSpec) -> Capacity:
        places = dict(spec.provision.places) if spec.provision is not None else {}
        return cls(places=places, ops=dict.fromkeys(places, START))


class CapacityView(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever talks to the scheduler has to see to. Each line stays until it is done."""

    want: Want | None  # to be acquired, unless its place is known
    start: dict[str, str]  # node -> place: an agent is to run there
    connected: set[str]  # nodes
    away: dict[str, str]  # node -> place: without a stream
    fence: dict[str, str]  # node -> place: given up, but it may still run
    taint: dict[str, tuple[str, str]]  # node -> place and why nothing new may start there
    leave: dict[str, tuple[str, str]]  # node -> place and the op that took its place, "" for none
    places: dict[str, str]  # node -> place
    origins: set[str]  # places that would be moved back to
    ops: set[str]  # what was acquired for anything else goes back
    turn: bool = True  # False: others are served first
