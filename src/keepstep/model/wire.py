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
