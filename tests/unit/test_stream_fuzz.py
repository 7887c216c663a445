"""Every parser of frames, fed with anything: a message, or one clean error; never a surprise.

The parsers are all there are: the streams of agents and blob servers, the agent's end of a
worker's socket, and the channels between workers. Besides arbitrary bytes they get what is hard to
tell from the real thing: true messages with a byte changed, cut or repeated, and documents of the
right shape with values of the wrong type or size.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.adapters.transport.stream import Stream, StreamClosed
from keepstep.adapters.transport.threads import ThreadServer
from keepstep.agent.blobs import BlobServer
from keepstep.agent.channel import WorkerChannel
from keepstep.errors import RemoteProtocolError
from keepstep.model import agent_messages, blob_messages, commands
from keepstep.model import messages as m
from keepstep.model import vault as v
from keepstep.model.wire import HEADER, decode, frame
from tests.support.fuzz import of, values

UNIONS: dict[str, Any] = {
    "agent": agent_messages.AgentMessage,
    "command": agent_messages.AgentCommand,
    "worker": m.WorkerMessage,
    "told": commands.WorkerCommand,
    "blob": blob_messages.BlobRequest,
    "reply": blob_messages.BlobReply,
    "vault": v.VaultRequest,
    "vault reply": v.VaultReply,
}
LIMIT = 1 << 16
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def kinds(union: Any) -> list[Any]:
    return list(get_args(union))


@st.composite
def damaged(draw: st.DrawFn, union: Any) -> bytes:
    """The bytes of a true frame with something done to them."""
    data = bytearray(frame(draw(st.sampled_from(kinds(union)).flatmap(of))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "double", "insert"]))
        if what == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del data[at : at + draw(st.integers(1, 9))]
        elif what == "double":
            data[at:at] = data[at : at + 9]
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=5))
    return bytes(data)


@st.composite
def lookalike(draw: st.DrawFn, union: Any) -> bytes:
    """A document with a known tag and a few of its fields, whatever their values."""
    kind = draw(st.sampled_from(kinds(union)))
    fields = draw(st.dictionaries(st.sampled_from(kind.__struct_fields__ or ("x",)), values))
    return frame({"type": kind.__name__, **fields})


def anything(union: Any) -> st.SearchStrategy[bytes]:
    loose = values.map(frame)
    return st.one_of(st.binary(max_size=80), damaged(union), lookalike(union), loose)


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
@fuzz
def test_messages_come_back_as_they_were(name: str, data: st.DataObject) -> None:
    union = UNIONS[name]
    message = data.draw(st.sampled_from(kinds(union)).flatmap(of))
    body = frame(message)[HEADER.size :]
    assert decode(msgspec.msgpack.Decoder(union), body) == message


@pytest.mark.parametrize("name", UNIONS)
@given(data=st.data())
@fuzz
def test_a_stream_gives_messages_or_one_of_two_errors(name: str, data: st.DataObject) -> None:
    union = UNIONS[name]
    sent = b"".join(data.draw(st.lists(anything(union), min_size=1, max_size=3)))

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        stream: Stream[Any] = Stream(reader, writer, msgspec.msgpack.Decoder(union), limit=LIMIT)
        theirs.sendall(sent)
        theirs.close()
        with contextlib.suppress(StreamClosed, RemoteProtocolError):
            while True:
                assert isinstance(await stream.receive(), m.Message)
        assert stream.closed

    asyncio.run(asyncio.wait_for(scenario(), 10))


@given(chunks=st.lists(anything(m.WorkerMessage), min_size=1, max_size=4))
@fuzz
def test_a_worker_that_says_anything_is_heard_or_reported_broken(chunks: list[bytes]) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ends: list[str] = []
        channel = WorkerChannel(
            asyncio.get_running_loop(),
            ours,
            on_message=lambda said: None,
            on_broken=ends.append,
            on_end=lambda: ends.append("end"),
        )
        for chunk in chunks:
            with contextlib.suppress(OSError):
                theirs.sendall(chunk)
            await asyncio.sleep(0)
        theirs.close()
        channel.drain()
        assert len(ends) == 1

    asyncio.run(asyncio.wait_for(scenario(), 10))


@given(request=st.sampled_from(kinds(blob_messages.BlobRequest)).flatmap(of), right=st.booleans())
@fuzz
def test_a_blob_server_answers_every_request_and_only_with_the_token(
    request: blob_messages.BlobRequest, right: bool
) -> None:
    server = BlobServer("the-token", lambda rank: [])
    given_token = "the-token" if right else f"x{request.token}"
    reply = server.answer(msgspec.structs.replace(request, token=given_token))
    assert isinstance(reply, get_args(blob_messages.BlobReply))
    assert right or isinstance(reply, blob_messages.BlobRefused)


def served(parts: Iterable[bytes]) -> bytes:
    """What a rank's state server says to a peer that sends `parts`."""
    serving = pytest.importorskip("keepstep.worker.state.serving")
    server = object.__new__(serving.StateServer)
    server._token, server._tick = "the-token", 3
    here = socket.create_server(("127.0.0.1", 0))
    threads = ThreadServer("state", here, server._serve, pending_max=4, connections_max=4)
    with socket.create_connection(here.getsockname(), 10) as theirs:
        with contextlib.suppress(OSError):
            for part in parts:
                theirs.sendall(part)
            theirs.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(OSError):
            while data := theirs.recv(1 << 16):
                said += data
    threads.close(10)
    assert threads.connections == 0
    return said


@given(parts=st.lists(st.binary(max_size=60) | values.map(frame), max_size=3))
@fuzz
def test_a_state_server_shows_nothing_to_a_peer_without_the_token(parts: list[bytes]) -> None:
    said = served(parts)
    if said:
        assert b"Refused" in said and b"Opened" not in said
