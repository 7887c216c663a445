"""What the protocol of a rank asks of whoever drives it, and what it is answered.

A driver runs a generator of `recovering` or `joining`: it does what is asked, sends the answer in,
and so on until the generator returns. Where no answer is named it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from typing import Protocol as Interface

from keepstep.model import commands
from keepstep.model import messages as m


class Standing(Interface):
    """Where a rank stands: the driver keeps these up to date."""

    @property
    def tick(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def done(self) -> bool:
        """Its script is over."""
        ...


@dataclass(frozen=True, slots=True)
class Say:
    message: m.WorkerMessage


@dataclass(frozen=True, slots=True)
class Await:
    """The first command that `accept` takes. Answered with None if no such command waits and an
    Abort newer than `newer_than` has come, or `seconds` are over."""

    accept: Callable[[commands.WorkerCommand], bool]
    newer_than: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ShowWaiting:
    """To the agent: this rank does nothing but wait for a command, so it is no hang. `asking`: it
    has asked for it itself, just now."""

    asking: bool = False


@dataclass(frozen=True, slots=True)
class ShowBusy:
    """To the agent: it waits no more."""


@dataclass(frozen=True, slots=True)
class LeaveGroups:
    """Behind it nothing of the old generation can touch memory."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """To the last boundary, if the rank has gone on from it."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Begin to serve state. Answered with the Held to say."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopServing:
    pass


@dataclass(frozen=True, slots=True)
class Write:
    """A just-in-time checkpoint. Answered with what came of it."""

    command: commands.Checkpoint


@dataclass(frozen=True, slots=True)
class Enter:
    """Put the staged groups in place, unless the Swap is `solo` or the script is over, and belong
    to its generation from here on. Answered with Entered."""

    command: commands.Swap


class Entered(NamedTuple):
    staged: bool  # there were groups, or none were needed
    ns: int


@dataclass(frozen=True, slots=True)
class Republish:
    """To the buddy, who may be another one, what it would need now. An Abort ends it."""


@dataclass(frozen=True, slots=True)
class DropStaged:
    """Groups that were built for generations below this one."""

    below: int


@dataclass(frozen=True, slots=True)
class Take:
    """Copy and install the state. Answered with Copied or CopyFailed."""

    command: commands.Copy


@dataclass(frozen=True, slots=True)
class Settle:
    """Put in place again what the code on the way to this entry has changed. Answered with
    CopyFailed, if that takes another copy, which fails."""

    command: commands.Copy


@dataclass(frozen=True, slots=True)
class LeaveJob:
    """This process is not the rank any more, or the job is over. It is not answered."""


Ask = (
    Say
    | Await
    | ShowWaiting
    | ShowBusy
    | LeaveGroups
    | RollBack
    | Serve
    | StopServing
    | Write
    | Enter
    | Republish
    | DropStaged
    | Take
    | Settle
    | LeaveJob
)

Result = TypeVar("Result")
Protocol = Generator[Ask, Any, Result]
