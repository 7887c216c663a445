"""A rank and its buddy's blob server: what a buddy that is new gets to know, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.adapters.identity.authority import Authority, new_node_key
from keepstep.adapters.transport import tls
from keepstep.agent import blobs as server_module
from keepstep.agent.blobs import BlobServer
from keepstep.errors import PermanentError
from keepstep.model.blob_messages import BlobData, BlobGet, BlobOk, BlobPut, BlobReply
from keepstep.model.messages import Address, TlsFiles
from keepstep.model.wire import HEADER, frame
from keepstep.worker.line import peers
from keepstep.worker.line.ahead import PAUSE, Ahead
from keepstep.worker.line.blobs import BuddyLine, HoldersUnreachable, fetch, fetch_surely


@contextmanager
def buddy(files: TlsFiles | None = None) -> Iterator[tuple[Address, BlobServer]]:
    server = BlobServer("t", lambda rank: [], files)
    loop = asyncio.new_event_loop()
    address = loop.run_until_complete(server.start("127.0.0.1"))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield address, server
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def said(line: socket.socket) -> bytes:
    """All that the server says until it ends the connection, which may show as a reset."""
    line.settimeout(10)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := line.recv(1 << 16):
            data += part
    return data


def test_a_new_buddy_gets_the_init_record_first() -> None:
    line = BuddyLine("t")
    with buddy() as (first, _), buddy() as (second, _):
        line.put(first, 2, -1, b"init", lambda: False)
        line.put(first, 2, 7, b"seven", lambda: False, b"init")
        line.put(second, 2, 8, b"eight", lambda: False, b"init")
        found = fetch([second], "t", 2, -1)
        assert isinstance(found, BlobData) and found.data == b"init"
        newest = fetch([second], "t", 2, -2)
        assert isinstance(newest, BlobData) and newest.tick == 8
        line.close()


def test_one_that_knows_the_rank_is_not_told_again() -> None:
    line = BuddyLine("t")
    with buddy() as (address, server):
        line.put(address, 2, 0, b"zero", lambda: False, b"init")
        line.put(address, 2, 1, b"one", lambda: False, b"another")
        kept = server.answer(BlobGet(token="t", rank=2, tick=-1))
        assert isinstance(kept, BlobData) and kept.data == b"init"
        line.close()


def test_what_comes_late_over_a_connection_given_up_is_refused() -> None:
    with buddy() as (address, server):
        old, new = BuddyLine("t"), BuddyLine("t")
        old.put(address, 2, 7, b"seven", lambda: False)
        new.put(address, 2, 8, b"new", lambda: False)
        with pytest.raises(PermanentError, match="another connection"):
            old.put(address, 2, 8, b"old", lambda: False)
        assert server.answer(BlobGet(token="t", rank=2, tick=8)) == BlobData(
            tick=8, data=b"new", own=False, serial=1
        )
        old.close()
        new.close()


def test_over_tls_only_nodes_of_the_job_are_served(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority")
    files = []
    for name in ("n0", "n1"):
        key, request = new_node_key(name)
        given = {
            "ca": authority.certificate.encode(),
            "certificate": authority.sign_node(request, "job", name).encode(),
            "key": key,
        }
        paths = {what: tmp_path / f"{name}.{what}" for what in given}
        for what, data in given.items():
            paths[what].write_bytes(data)
        texts = {what: str(path) for what, path in paths.items()}
        files.append(TlsFiles(**texts, peers=tls.job_name("job")))
    with buddy(files[0]) as (address, _):
        with socket.create_connection((address.host, address.port), 10) as plain:
            plain.sendall(frame(BlobGet(token="t", rank=0, tick=1)))
            with contextlib.suppress(OSError):  # it has hung up already
                plain.shutdown(socket.SHUT_WR)
            assert b"Blob" not in said(plain)  # at most that this is no TLS
        peers.use(files[1])
        try:
            line = BuddyLine("t")
            line.put(address, 0, 1, b"x" * 300_000, lambda: False)
            found = fetch([address], "t", 0, 1)
            assert found is not None and found.data == b"x" * 300_000
            line.close()
        finally:
            peers.use(None)


def test_too_many_connections_are_refused_and_a_closed_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 1)
    with buddy() as (address, server):
        line = BuddyLine("t")
        line.put(address, 0, 0, b"x", lambda: False)
        with socket.create_connection((address.host, address.port)) as refused:
            assert said(refused) == b""
        line.close()
        while server.connections:
            threading.Event().wait(0.01)
        line.put(address, 0, 1, b"y", lambda: False)
        line.close()


def test_a_first_request_that_trickles_in_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_REQUEST_S", 0.2)
    with buddy() as (address, _), socket.create_connection((address.host, address.port)) as line:
        line.settimeout(0.05)
        line.sendall(HEADER.pack(1000))
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                line.sendall(b"x")
                try:
                    assert line.recv(1) == b""
                    break
                except TimeoutError:
                    continue
            else:
                pytest.fail("it was waited for again and again")


def test_close_ends_every_connection() -> None:
    with buddy() as (address, server):
        with socket.create_connection((address.host, address.port)) as line:
            line.sendall(frame(BlobPut(token="t", rank=0, tick=0, data=b"")))
            assert line.recv(100) == frame(BlobOk())
            server.close()
            assert said(line) == b""
        with pytest.raises(OSError):
            socket.create_connection((address.host, address.port), 1)


@given(parts=st.lists(st.binary(max_size=60), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_stranger_that_sends_anything_is_dropped_without_a_word(parts: list[bytes]) -> None:
    with buddy() as (address, _), socket.create_connection((address.host, address.port)) as line:
        with contextlib.suppress(OSError):
            line.sendall(b"".join(parts))
            line.shutdown(socket.SHUT_WR)
        assert said(line) == b""


def test_what_was_sent_ahead_is_not_sent_again_unless_it_was_wrong() -> None:
    with buddy() as (address, server):
        sent: list[int] = []
        answer = server.answer

        def counted(request: BlobPut | BlobGet, connection: int = 0) -> BlobReply:
            if isinstance(request, BlobPut):
                sent.append(request.tick)
            return answer(request, connection)

        server.answer = counted  # type: ignore[method-assign]
        line = BuddyLine("t")
        line.send_ahead(address, 2, 6, b"no connection yet")
        line.put(address, 2, 6, b"six", lambda: False)
        line.send_ahead(address, 2, 7, b"seven")
        line.put(address, 2, 7, b"seven", lambda: False)
        assert sent == [6, 7]
        line.send_ahead(address, 2, 8, b"wrong")
        line.put(address, 2, 8, b"right", lambda: False)
        line.put(address, 2, 9, b"nine", lambda: False)
        assert sent == [6, 7, 8, 8, 9]
        for tick, data in ((7, b"seven"), (8, b"right"), (9, b"nine")):  # one more than needed
            kept = server.answer(BlobGet(token="t", rank=2, tick=tick))
            assert isinstance(kept, BlobData) and kept.data == data
        line.close()


def test_a_guess_is_only_believed_when_nobody_has_a_later_copy() -> None:
    """One that went to a former buddy was never published; the truth went to the next one."""
    with buddy() as (former, _), buddy() as (latter, server):
        line = BuddyLine("t")
        line.generation = 3
        line.put(former, 2, 7, b"seven", lambda: False)
        line.send_ahead(former, 2, 8, b"guess")
        line.interrupt()
        line.generation = 4
        line.put(latter, 2, 8, b"truth", lambda: False)
        for holders in ([former, latter], [latter, former]):
            found = fetch_surely(holders, "t", 2, 8)
            assert found is not None and found.data == b"truth"
        assert line._connection is not None
        line.send_ahead(latter, 2, 9, b"nine")
        wait_for_tick(server, 9)
        found = fetch_surely([former, latter], "t", 2, 9, everybody=True)
        assert found is not None and found.ahead  # nobody has another
        assert fetch_surely([former, latter], "t", 2, 9) is None  # somebody might have had one
        line.put(latter, 2, 9, b"nine", lambda: False)
        line.put(latter, 2, 10, b"ten", lambda: False)  # so the confirmation has been read
        found = fetch_surely([former, latter], "t", 2, 9)
        assert found is not None and not found.ahead
        silent = Address("127.0.0.1", free_port())
        line.send_ahead(latter, 2, 11, b"eleven")
        wait_for_tick(server, 11)
        with pytest.raises(HoldersUnreachable):  # who does not answer might have the truth
            fetch_surely([silent, latter], "t", 2, 11, patience_s=0.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for_tick(server: BlobServer, tick: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if isinstance(server.answer(BlobGet(token="t", rank=2, tick=tick)), BlobData):
            return
        time.sleep(0.01)
    raise AssertionError(f"tick {tick} never came")


def test_after_an_interruption_the_next_put_takes_a_new_connection() -> None:
    with buddy() as (address, _):
        line = BuddyLine("t")
        line.put(address, 2, 7, b"seven", lambda: False)
        line.send_ahead(address, 2, 8, b"eight")
        line.interrupt()
        line.put(address, 2, 8, b"eight", lambda: False)
        newest = fetch([address], "t", 2, -2)
        assert newest is not None and newest.data == b"eight"
        line.close()


def test_a_wrong_guess_stops_guessing_for_a_while() -> None:
    ahead = Ahead()
    assert ahead.worthwhile()
    ahead.begin(lambda: b"guess")
    ahead.wait()
    ahead.judge(b"guess")
    assert ahead.worthwhile()
    ahead.begin(lambda: b"guess")
    ahead.wait()
    ahead.judge(b"truth")
    assert [ahead.worthwhile() for _ in range(PAUSE)] == [False] * (PAUSE - 1) + [True]
