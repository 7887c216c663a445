"""What is known about a job's periodic checkpoints: the facts of checkpoints.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from keepstep.core.interval import FIRST_NS, interval_ns, job_mttf_ns, smoothed
from keepstep.core.ranks import Tally
from keepstep.model.job import JobSpec


@dataclass(slots=True)
class Saving:
    """One that was asked for. It is complete when it was sealed."""

    number: int
    asked_at: int
    worker: str  # who was told to raise the word
    parts: Tally  # whose part is missing
    tick: int | None = None
    version: int = 0
    snapshot_ns: int = 0  # the slowest rank's
    write_ns: int = 0
    sealer: str = ""  # worker
    late: bool = False  # it was said that it takes long
    back: list[str] = field(default_factory=list)  # nodes that joined before its tick was known


@dataclass(frozen=True, slots=True)
class Complete:
    path: str
    tick: int
    version: int
    at: int


@dataclass(slots=True)
class Stopping:
    """The job is to end with a checkpoint (stopping.py)."""

    reason: str
    exit_code: int
    since: int
    generation: int = -1  # of the Hold; -1: nobody was asked yet
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> tick, version
    written: set[int] = field(default_factory=set)
    failed: str = ""


@dataclass(slots=True)
class Saves:
    spec: JobSpec
    now: Saving | None = None
    due_at: int | None = None  # the next one
    newest: Complete | None = None
    older: Complete | None = None  # the one before it, which is kept, too
    unreadable: Counter[int] = field(default_factory=Counter)  # rank -> who could not read it
    cost_ns: int = 0  # smoothed
    write_ns: int = 0
    number: int = 0  # the last one used
    put_off: int = 0
    # After a fall-back: what was put for ranks of earlier generations is of no use any more.
    fallen_before: int = 0
    fallen: tuple[int, int] = (-1, 0)  # tick, times that the job went back to it

    @property
    def mttf_ns(self) -> int:
        nodes = max(1, self.spec.world // self.spec.local_world)
        return job_mttf_ns(nodes, self.spec.mttf_ns)

    @property
    def interval_ns(self) -> int:
        if self.spec.checkpoint_interval_ns:
            return self.spec.checkpoint_interval_ns
        if not self.cost_ns:
            return FIRST_NS
        return interval_ns(self.cost_ns, self.write_ns, self.mttf_ns)

    def back_to(self, path: str) -> Complete:
        """The newest that can be read is this one."""
        if self.older is not None and self.older.path == path:
            self.newest, self.older = self.older, None
        assert self.newest is not None, "a job falls back to what is on record"
        return self.newest

    def sealed(self, complete: Complete, snapshot_ns: int, write_ns: int) -> None:
        self.older, self.newest = self.newest, complete
        self.cost_ns = smoothed(self.cost_ns, max(1, snapshot_ns))
        self.write_ns = smoothed(self.write_ns, write_ns)
