"""Who gives machines to jobs.

Calls block, and may be repeated: whoever was killed in the middle of one asks again with the same
job and op. Everything that is made carries the job and the op, so that `leases` finds it again.

`acquire` and `commit_swap` are apart on purpose: between them both places are held, because the
old one is what the new one is copied from.

Raises, besides what is said below, TransientError if the scheduler does not answer.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.model.schedule import (
    AgentStart,
    Ask,
    Capabilities,
    Constraints,
    Kind,
    Lease,
    Level,
    Place,
    Spare,
)


class Scheduler(Protocol):
    @property
    def name(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    def check(self, constraints: Constraints, kinds: list[Kind], count: int = 1) -> None:
        """Raises UsageError for what does not exist or can never be had; changes nothing."""

    def places(self) -> list[Place]: ...

    def leases(self, job: str = "") -> list[Lease]:
        """Ours, of one job or of all."""

    def spares(self, ask: Ask) -> list[Spare]:
        """What `acquire` would look at, cheapest first, save the queue."""

    def acquire(self, ask: Ask, timeout_s: float) -> Lease:
        """Returns when processes can be started there. Raises NoSpare: nothing is held then."""

    def start_agent(self, place: str, agent: AgentStart) -> None:
        """In a place of a lease of that job. One that runs under the same name is left alone."""

    def stop_agent(self, job: str, node: str) -> None: ...

    def taint(self, place: str, level: Level, reason: str) -> None:
        """Fenced: nothing of ours runs there when it returns, as far as the scheduler can tell.
        Raises NoRight. A place that somebody else has tainted keeps their reason."""

    def untaint(self, place: str) -> bool:
        """Only if the taint is ours; else False."""

    def commit_swap(self, job: str, place: str, op: str = "") -> None:
        """`place` is left: it goes out of the job's leases. `op` is what took its place."""

    def abort_swap(self, job: str, op: str) -> None:
        """Whatever was acquired for `op` goes back."""

    def release(self, lease: Lease) -> None: ...

    def show(self, job: str, ranks: dict[str, list[int]]) -> None:
        """For whoever looks there: which ranks are in which place."""

    def watch(self) -> list[Place]:
        """Places that have changed since the last call; at first all."""
