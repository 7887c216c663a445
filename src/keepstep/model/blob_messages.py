"""What a worker says to another node's agent about side state, and what that answers."""

from __future__ import annotations

from keepstep.model.messages import Message

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
