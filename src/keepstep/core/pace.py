"""What is known about how fast the ranks are (see stragglers.py)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Slow:
    """A rank that has taken longer than the others at every look since then."""

    worker: str
    since: int
    steps: int  # that it had measured by then
    ratio: float
    said: str = ""  # to people; "": not yet
    stays: str = ""  # why it is not moved, as said last


@dataclass(slots=True)
class Pace:
    look_at: int = 0  # not before
    seen: int = 0  # steps measured at the last look, the most of any rank
    slow: dict[int, Slow] = field(default_factory=dict)  # by rank
