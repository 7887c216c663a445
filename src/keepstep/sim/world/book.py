"""What is known of a job to somebody who sees its ledger and every commit of every rank.

The rules write it down (rules/), event by event; whoever disturbs or judges a world reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.model import records as r


@dataclass(slots=True)
class Book:
    # on record
    resume_tick: int  # of the checkpoint that ranks start from
    placed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)  # processes
    generation: int = -1
    attempts: dict[int, r.AttemptStarted] = field(default_factory=dict)
    decided: dict[int, int] = field(default_factory=dict)  # generation -> tick
    commits: dict[int, r.Committed] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    stops: set[int] = field(default_factory=set)  # generations in which ranks hold to end
    victims: dict[str, set[int]] = field(default_factory=dict)  # with those added later
    open_incidents: dict[str, r.IncidentOpened] = field(default_factory=dict)
    tainted: set[str] = field(default_factory=set)
    stands: str = ""  # numbers differ, and nobody has said what is to be done
    sealed: r.CheckpointSealed | None = None
    job_ended: r.JobEnded | None = None
    # what was sent and done
    killed: set[str] = field(default_factory=set)
    best: dict[int, int] = field(default_factory=dict)  # rank -> highest tick that was committed
    gave: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(node, rank) -> ticks of side states that the node acknowledged"""
