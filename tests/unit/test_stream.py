"""Streams over loopback: order, limits, and what a peer can not do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest

from keepstep.adapters.transport.blocking import relay
from keepstep.adapters.transport.stream import (
    Stream,
    StreamClosed,
    connect,
    listening_address,
    read_message,
    serve,
)
from keepstep.errors import RemoteProtocolError, TransientError
from keepstep.model.blob_messages import BlobData, BlobGet, BlobOk, BlobReply
from keepstep.model.messages import Address
from keepstep.model.wire import HEADER, frame

DEADLINE_S = 10.0
decoder: msgspec.msgpack.Decoder[BlobReply] = msgspec.msgpack.Decoder(BlobReply)


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, DEADLINE_S)

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def pair(limit: int = 1 << 20, **options: Any) -> AsyncIterator[tuple[Stream[Any], Any]]:
    """A stream and the bare socket at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    theirs.setblocking(False)
    stream = Stream(reader, writer, decoder, limit=limit, **options)
    try:
        yield stream, theirs
    finally:
        stream.abort()
        theirs.close()


def test_messages_arrive_whole_and_in_order() -> None:
    async def scenario() -> None:
        async def echo(stream: Stream[BlobReply]) -> None:
            while True:
                stream.send(await stream.receive())

        server = await serve(echo, decoder, "127.0.0.1")
        stream = await connect(listening_address(server), decoder)
        raw = stream._writer.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        sent = [BlobData(tick=n, data=b"x" * (n * 50_000), own=True) for n in range(20)]
        for message in sent:
            stream.send(message)
        assert [await stream.receive() for _ in sent] == sent
        stream.close()
        server.close()

    run(scenario())


def test_a_cancelled_receive_keeps_the_frame_border() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with pair() as (stream, theirs):
            data = frame(BlobData(tick=1, data=b"abc", own=True)) + frame(BlobOk())
            for cut in (2, 4, 9):
                await loop.sock_sendall(theirs, data[:cut])
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(stream.receive(), 0.01)
                data = data[cut:]
            await loop.sock_sendall(theirs, data)
            assert await stream.receive() == BlobData(tick=1, data=b"abc", own=True)
            assert await stream.receive() == BlobOk()

    run(scenario())


@pytest.mark.parametrize(
    "bad",
    [
        HEADER.pack((1 << 20) + 1),
        HEADER.pack(0xFFFFFFFF),
        HEADER.pack(2) + b"\xc1\xc1",  # not msgpack
        frame(BlobGet(token="", rank=0, tick=0)),  # not of the union
        frame({"type": "BlobData", "tick": "one"}),  # not of the type
        HEADER.pack(0),
    ],
)
def test_what_is_not_our_protocol_is_an_error_and_closes(bad: bytes) -> None:
    async def scenario() -> None:
        async with pair() as (stream, theirs):
            theirs.send(bad)
            with pytest.raises(RemoteProtocolError):
                await stream.receive()
            assert stream.closed
            with pytest.raises(StreamClosed):
                stream.send(BlobOk())

    run(scenario())


@pytest.mark.parametrize("partial", [b"", b"\0", frame(BlobOk())[:-1]])
def test_the_end_of_the_stream_is_transient(partial: bytes) -> None:
    async def scenario() -> None:
        async with pair() as (stream, theirs):
            theirs.send(partial) if partial else None
            theirs.close()
            with pytest.raises(TransientError, match="inside a frame" if partial else "closed"):
                await stream.receive()
            assert stream.closed

    run(scenario())


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    async def scenario() -> None:
        async with pair(unsent_bytes_max=1 << 20) as (stream, _):
            message = BlobData(tick=0, data=bytes(100_000), own=True)
            with pytest.raises(StreamClosed):
                for _ in range(100):
                    stream.send(message)
            assert stream.closed

    run(scenario())


def test_one_bad_connection_does_not_disturb_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def handler(stream: Stream[BlobReply]) -> None:
            while True:
                message = await stream.receive()
                if isinstance(message, BlobData):
                    raise ValueError("a bug")
                stream.send(message)

        server = await serve(handler, decoder, "127.0.0.1")
        address = listening_address(server)
        good = await connect(address, decoder)
        for bad in (HEADER.pack(1 << 31), frame(BlobData(tick=0, data=b"", own=True)), b"\0"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(bad)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        good.send(BlobOk())
        assert await good.receive() == BlobOk()
        good.close()
        server.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "over the limit" in caplog.text and "a bug" in caplog.text


def test_connections_are_limited() -> None:
    async def scenario() -> None:
        async def handler(stream: Stream[BlobReply]) -> None:
            stream.send(await stream.receive())
            await stream.receive()

        server = await serve(handler, decoder, "127.0.0.1", connections_max=1)
        address = listening_address(server)
        first = await connect(address, decoder)
        first.send(BlobOk())
        await first.receive()
        second = await connect(address, decoder)
        with pytest.raises(StreamClosed):
            await second.receive()
        first.close()
        server.close()

    run(scenario())


def test_nobody_listening_is_transient() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with pytest.raises(StreamClosed, match="cannot connect"):
            await connect(Address("127.0.0.1", port), decoder)

    run(scenario())


def test_read_message_from_a_bare_reader() -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(BlobOk()) + HEADER.pack(100))
        assert await read_message(reader, decoder, 99) == BlobOk()
        with pytest.raises(RemoteProtocolError):
            await read_message(reader, decoder, 99)

    run(scenario())


def test_a_relay_passes_bytes_on_both_ways_until_one_side_ends() -> None:
    line, far = socket.socketpair()
    local, near = socket.socketpair()
    passing = threading.Thread(target=relay, args=(line, local))
    passing.start()
    far.sendall(b"pages")
    assert near.recv(16) == b"pages"
    near.sendall(b"heard")
    assert far.recv(16) == b"heard"
    near.close()
    passing.join(10)
    assert not passing.is_alive() and far.recv(16) == b""
    for sock in (line, far, local):
        sock.close()
