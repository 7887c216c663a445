"""What a stranger can cost: the count of those who have not shown a token, and every server's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch.distributed as dist
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from keepstep.adapters.identity.authority import Authority
from keepstep.adapters.transport import tls
from keepstep.adapters.transport.pending import PENDING_MIN, Pending, share_of_descriptors
from keepstep.adapters.transport.reception import Reception, Visitor
from keepstep.adapters.transport.threads import Caller, ThreadServer
from keepstep.agent.blobs import BlobServer
from keepstep.model import blob_messages, image, vault
from keepstep.model import messages as m
from keepstep.model.wire import frame, leading_token
from keepstep.orchestrator import web as web_module
from keepstep.orchestrator.web import Web, admit
from keepstep.worker.groups import fence as fences
from keepstep.worker.groups.fence import WORDS, Fence

DEADLINE_S = 20.0


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def closed(sock: socket.socket) -> bool:
    """The server has ended it."""
    sock.settimeout(DEADLINE_S)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def still_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# ------------------------------------------------------------------------------------ the count


def test_the_oldest_of_the_address_that_has_most_goes() -> None:
    pending: Pending[int] = Pending(3)
    assert [pending.enter(1, "a"), pending.enter(2, "b"), pending.enter(3, "b")] == [None] * 3
    assert pending.enter(4, "c") == 2
    assert pending.enter(5, "b") == 1  # one each: whose address came first
    assert len(pending) == 3 and 3 in pending and 2 not in pending
    assert not pending.leave(2) and pending.leave(3)
    assert pending.enter(6, "d") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_a_flood_from_one_address_never_costs_another_its_place(
    moves: list[tuple[str, bool]],
) -> None:
    pending: Pending[int] = Pending(8)
    pending.enter(-1, "quiet")
    for number, (address, leaves) in enumerate(moves):
        gone = pending.enter(number, address)
        assert gone != -1 and len(pending) <= 8
        if leaves:
            pending.leave(number)
    assert -1 in pending
    half = (len(pending) + 1) // 2
    assert len(pending.pick_half()) == half


def test_strangers_get_a_share_of_what_the_process_may_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, expected in ((1024, 256), (20, PENDING_MIN), (1 << 30, 4096), (-1, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert share_of_descriptors(4) == expected


# ------------------------------------------------------------------------------------ the token


def first_requests() -> list[type[m.Message]]:
    unions = (blob_messages.BlobRequest, vault.VaultRequest, image.ImageRequest)
    kinds = [kind for union in unions for kind in get_args(union)]
    return [kind for kind in kinds if "token" in kind.__struct_fields__]


@pytest.mark.parametrize("kind", first_requests())
@pytest.mark.parametrize("token", ["", "t", "x" * 43, "y" * 300, "\u00e4" * 20])
def test_every_first_request_begins_with_its_token(kind: type[m.Message], token: str) -> None:
    given = dict.fromkeys(kind.__struct_fields__, 0) | {"token": token}
    body = msgspec.msgpack.encode(kind(**given))
    assert leading_token(body[:1000]) == token
    encoded = len(token.encode())
    for cut in range(len(body)):
        assert leading_token(body[:cut]) in (None, token)
    assert leading_token(body[: 20 + encoded // 2]) is None or encoded < 20


@given(st.binary(max_size=40))
def test_bytes_that_are_no_request_have_no_token(data: bytes) -> None:
    assert leading_token(data) is None or b"token" in data


# ------------------------------------------------------------------------- servers with threads


@contextlib.contextmanager
def thread_server(serve: Callable[[Caller], None], pending: int) -> Iterator[tuple[Any, Any]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    server = ThreadServer("test", listener, serve, pending_max=pending, connections_max=64)
    try:
        yield server, listener.getsockname()
    finally:
        server.close(DEADLINE_S)
    assert server.connections == 0


def knock(caller: Caller) -> None:
    """Admits whoever says k, and then echoes."""
    caller.sock.settimeout(DEADLINE_S)
    if caller.sock.recv(1) == b"k":
        caller.admit()
        while data := caller.sock.recv(100):
            caller.sock.sendall(data)


def test_a_thread_is_freed_when_its_stranger_goes_and_known_peers_stay() -> None:
    with thread_server(knock, pending=4) as (server, address):
        known = []
        for _ in range(6):  # more than there may be strangers
            known.append(socket.create_connection(address))
            known[-1].sendall(b"kx")
            assert known[-1].recv(1) == b"x"
        strangers = [socket.create_connection(address) for _ in range(20)]
        assert all(closed(sock) for sock in strangers[:16])
        wait_until(lambda: server.connections == 10)
        late = socket.create_connection(address)
        late.sendall(b"ky")
        assert late.recv(1) == b"y", "a peer of ours gets in at once"
        for sock in known:
            sock.sendall(b"z")
            assert sock.recv(1) == b"z"
        for sock in (*known, *strangers, late):
            sock.close()


def test_a_server_without_descriptors_drops_strangers_and_goes_on() -> None:
    with thread_server(knock, pending=16) as (server, address):
        strangers = [socket.create_connection(address) for _ in range(8)]
        wait_until(lambda: server.connections == 8)
        peers = [socket.socket() for _ in range(2)]  # an accept() that waits has its number already
        fill: list[socket.socket] = []
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (peers[-1].fileno() + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fill.append(socket.socket())
            for peer in peers:
                peer.settimeout(DEADLINE_S / 2)
                peer.connect(address)
                peer.sendall(b"kx")
                assert peer.recv(1) == b"x"
            assert closed(strangers[0]) and still_open(strangers[-1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in (*strangers, *fill, *peers):
            sock.close()


# ---------------------------------------------------------------------- servers on an event loop


class Knocking(asyncio.Protocol):
    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data[:1] == b"k":
            self._visitor.admit()
            self._transport.write(data[1:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitor.leave()


@contextlib.contextmanager
def on_a_loop(
    begin: Callable[[socket.socket], Any], end: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
    """`begin` and `end` are coroutine functions, run in another thread's loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    address = listener.getsockname()
    made = asyncio.run_coroutine_threadsafe(begin(listener), loop).result(DEADLINE_S)
    try:
        yield made, address
    finally:
        asyncio.run_coroutine_threadsafe(end(made), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def reception(
    limit: int, shown_s_max: float = 10.0, context: Any = None
) -> Iterator[tuple[Any, Any]]:
    async def begin(listener: socket.socket) -> Reception:
        return Reception(
            "test", listener, Knocking, limit=limit, shown_s_max=shown_s_max, tls=context
        )

    async def end(made: Reception) -> None:
        made.close()
        await made.wait_closed()

    with on_a_loop(begin, end) as both:
        yield both


def test_a_reception_drops_the_oldest_stranger_and_no_known_peer() -> None:
    with reception(limit=4) as (_, address):
        known = socket.create_connection(address)
        known.sendall(b"kx")
        assert known.recv(1) == b"x"
        strangers = [socket.create_connection(address) for _ in range(40)]
        assert all(closed(sock) for sock in strangers[:36])
        late = socket.create_connection(address)
        late.sendall(b"ky")
        assert late.recv(1) == b"y"
        assert still_open(known)
        for sock in (known, late, *strangers):
            sock.close()


def test_the_deadline_counts_from_the_connection_and_ends_with_the_token() -> None:
    with reception(limit=40, shown_s_max=0.3) as (made, address):
        known = socket.create_connection(address)
        known.sendall(b"kx")
        assert known.recv(1) == b"x"
        slow = socket.create_connection(address)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while still_open(slow) and time.monotonic() < began + DEADLINE_S:
                slow.sendall(b"s")
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - began < 5.0
        assert still_open(known) and len(made.pending) == 0
        for sock in (known, slow):
            sock.close()


def test_a_stranger_inside_the_handshake_is_counted_too() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with reception(limit=4, context=context) as (made, address):
        strangers = [socket.create_connection(address) for _ in range(20)]
        assert all(closed(sock) for sock in strangers[:16])
        wait_until(lambda: len(made.pending) == 4)
        wait_until(lambda: len(made._greetings) == 4)
        for sock in strangers:
            sock.close()
        wait_until(lambda: len(made.pending) == 0)


def test_a_reception_without_descriptors_drops_strangers_and_accepts_again() -> None:
    with reception(limit=40) as (made, address):
        strangers = [socket.create_connection(address) for _ in range(8)]
        wait_until(lambda: len(made.pending) == 8)
        real, failed = made._listener, []

        class Exhausted:
            def accept(self) -> Any:
                if len(failed) < 6:  # twice with strangers to drop, then with none
                    failed.append(1)
                    raise OSError(errno.EMFILE, "too many open files")
                return real.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        made._listener = Exhausted()
        late = socket.create_connection(address)
        late.sendall(b"kx")
        late.settimeout(DEADLINE_S)
        assert late.recv(1) == b"x"
        assert len(failed) == 6 and all(closed(sock) for sock in strangers)
        made._listener = real
        for sock in (late, *strangers):
            sock.close()


# ------------------------------------------------------------------------------------------ REST


@contextlib.contextmanager
def rest(context: ssl.SSLContext | None = None) -> Iterator[tuple[Web, Any]]:
    app = FastAPI()

    @app.get("/known")
    async def known(request: Request, wait_s: float = 0.0) -> str:
        admit(request.scope)
        await asyncio.sleep(wait_s)
        return "known"

    @app.get("/healthz")
    async def healthz() -> str:
        return "ok"

    async def begin(listener: socket.socket) -> Web:
        web = Web(app, context)
        await web.start(listener)
        return web

    with on_a_loop(begin, lambda web: web.stop()) as both:
        yield both


def http(sock: socket.socket, path: str) -> bytes:
    sock.settimeout(DEADLINE_S)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return answer(sock)


def answer(sock: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b'"'):
        said += (part := sock.recv(1 << 16))
        assert part, said
    return said


def test_half_a_request_has_a_deadline_and_a_long_answer_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = web_module.Reception
    monkeypatch.setattr(web_module, "Reception", lambda *a, **k: real(*a, **k, shown_s_max=0.3))
    with rest() as (web, address):
        half, idle = (socket.create_connection(address) for _ in range(2))
        half.sendall(b"GET /known HTTP/1.1\r\nHost: ")
        long = socket.create_connection(address)
        long.settimeout(DEADLINE_S)
        long.sendall(b"GET /known?wait_s=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        health = socket.create_connection(address)
        assert b"200 OK" in http(health, "/healthz")
        assert closed(half) and closed(idle) and closed(health)
        assert b"200 OK" in answer(long), "longer than a stranger's deadline"
        assert web.reception is not None and len(web.reception.pending) == 0
        for sock in (half, idle, long, health):
            sock.close()


def test_over_tls_too_who_shows_a_token_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_module, "share_of_descriptors", lambda part: 8)
    authority = Authority.open(tmp_path)
    context = tls.server_context(authority.serve_as(["localhost"]), clients=False)
    believing = tls.trusting(cadata=authority.certificate)
    with rest(context) as (web, address):
        strangers = [socket.create_connection(address) for _ in range(30)]
        with believing.wrap_socket(
            socket.create_connection(address), server_hostname=tls.ORCHESTRATOR_NAME
        ) as known:
            assert b"200 OK" in http(known, "/known")
            strangers += [socket.create_connection(address) for _ in range(30)]
            assert b"200 OK" in http(known, "/known")
        for sock in strangers:
            sock.close()
        wait_until(lambda: web.reception is not None and len(web.reception.pending) == 0)


def test_a_head_without_end_is_refused() -> None:
    with rest() as (_, address), socket.create_connection(address) as sock:
        sock.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\n" + b"x-long: " + b"x" * (64 << 10))
        said = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(1 << 16):
                said += part
        assert b"400" in said or said == b""  # a reset may overtake it


def test_who_shows_a_token_gets_in_whatever_stands_at_the_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_module, "share_of_descriptors", lambda part: 8)
    with rest() as (_, address):
        known = socket.create_connection(address)
        assert b"200 OK" in http(known, "/known")
        strangers = [socket.create_connection(address) for _ in range(60)]
        for sock in strangers:
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /kn")
        late = socket.create_connection(address)
        assert b"200 OK" in http(late, "/known")
        assert b"200 OK" in http(known, "/known")
        for sock in (known, late, *strangers):
            sock.close()


# ------------------------------------------------------------------------------------- the fence


def test_strangers_do_not_hold_up_the_building_of_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "STRANGERS_MAX", 8)
    ranks = [Fence(rank, 3, "127.0.0.1") for rank in range(3)]
    strangers = []
    for fence in ranks:
        for number in range(20):  # before any rank: they are first in the queue
            sock = socket.create_connection(fence._address, DEADLINE_S)
            sock.sendall([b"", b"s", b"x" * 24, b"y" * 100][number % 4])
            strangers.append(sock)
    store: Any = dist.HashStore()
    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda fence: fence.connect(store, DEADLINE_S), ranks))
        assert time.monotonic() - began < 5.0
        words = tuple(range(WORDS))
        assert list(pool.map(lambda fence: fence.meet(words), ranks)) == [(words, words)] * 3
    assert all(len(fence._sockets) == 1 + 2 * fence._rounds for fence in ranks), "strangers' too"
    for fence in ranks:
        fence.close()
    for sock in strangers:
        sock.close()


def test_interrupt_frees_a_building_that_strangers_look_at() -> None:
    lonely, peer = Fence(0, 2, "127.0.0.1"), Fence(1, 2, "127.0.0.1")
    store: Any = dist.HashStore()
    store.set("fence/1", f'["127.0.0.1", {peer._address[1]}, "{peer._cookie.hex()}"]')
    strangers = [socket.create_connection(lonely._address, DEADLINE_S) for _ in range(5)]
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(lonely.connect, store, 60.0)
        wait_until(lambda: len(lonely._sockets) == 2 + len(strangers))
        lonely.interrupt()
        with pytest.raises(OSError):
            building.result(DEADLINE_S)
    for fence in (lonely, peer):
        fence.close()
    for sock in strangers:
        assert closed(sock)
        sock.close()


def test_a_fence_that_nobody_comes_to_gives_up() -> None:
    lonely, peer = Fence(0, 2, "127.0.0.1"), Fence(1, 2, "127.0.0.1")
    store: Any = dist.HashStore()
    store.set("fence/1", f'["127.0.0.1", {peer._address[1]}, "{peer._cookie.hex()}"]')
    with socket.create_connection(lonely._address, DEADLINE_S), pytest.raises(TimeoutError):
        lonely.connect(store, 0.2)
    for fence in (lonely, peer):
        fence.close()


def test_a_large_frame_is_read_from_whoever_begins_with_the_token() -> None:
    """And from nobody else."""
    server = BlobServer("t", lambda rank: [])
    loop = asyncio.new_event_loop()
    address = loop.run_until_complete(server.start("127.0.0.1"))
    put = frame(blob_messages.BlobPut(token="t", rank=0, tick=0, data=b"x" * (32 << 20)))
    wrong = frame(blob_messages.BlobPut(token="u", rank=0, tick=0, data=b"x" * (32 << 20)))
    with socket.create_connection((address.host, address.port), DEADLINE_S) as sock:
        sock.sendall(put)
        assert sock.recv(100) == frame(blob_messages.BlobOk())
    with socket.create_connection((address.host, address.port), DEADLINE_S) as sock:
        sock.sendall(wrong[: 8 << 10])
        assert closed(sock)
    server.close()
    loop.close()
