"""Frames: a 4-byte big-endian length, then one msgpack document. No pickle, ever.

The same framing is used on the agents' streams, on the worker's control socket and on the blob
and state channels. Decoding is strict about size and about the message union, so a malformed or
oversized frame is one `RemoteProtocolError` and never an allocation of the peer's choosing.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec

from keepstep.errors import RemoteProtocolError

FRAME_BYTES_MAX = 64 << 20
HEADER = struct.Struct("!I")

# What a decoder of msgspec raises on foreign bytes: text that is no UTF-8 and documents nested
# deeper than the stack come as Python's own errors, not as a DecodeError.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, limit: int = FRAME_BYTES_MAX) -> int:
    (length,) = HEADER.unpack(header)
    if length > limit:
        raise RemoteProtocolError(
            f"frame of {length} bytes is over the limit of {limit}",
            hint="the peer does not speak this protocol, or another version of it",
        )
    return int(length)


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed frame: {error}") from error


def leading_token(beginning: bytes) -> str | None:
    """The token of a message of which only the beginning has come: its first field, behind the
    tag. None: these bytes have none there."""
    try:
        at = _map(beginning)
        for expected in ("type", None, "token"):
            text, at = _text(beginning, at)
            if expected is not None and text != expected:
                return None
        return _text(beginning, at)[0]
    except (ValueError, IndexError):  # UnicodeDecodeError is a ValueError
        return None


def _map(data: bytes) -> int:
    """Where the first key of a msgpack map stands."""
    if 0x80 <= data[0] <= 0x8F:
        return 1
    if data[0] == 0xDE:
        return 3
    raise ValueError("no map")


def _text(data: bytes, at: int) -> tuple[str, int]:
    """A msgpack string, and where the next value stands."""
    kind = data[at]
    if 0xA0 <= kind <= 0xBF:
        start, size = at + 1, kind & 0x1F
    elif kind in (0xD9, 0xDA):
        start = at + 1 + (kind - 0xD8)
        size = int.from_bytes(data[at + 1 : start])
    else:
        raise ValueError("no string")
    if start + size > len(data):
        raise ValueError("cut off")
    return data[start : start + size].decode(), start + size
