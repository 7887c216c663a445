"""Threads on the way to a vault: the native one that sends, and the one that hands copies on."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.worker.device import extension
from keepstep.worker.vault import lane
from keepstep.worker.vault.copies import Feeder, Room, aligned


class Sending:
    """One end of a connection with a sender, and what comes out of the other."""

    def __init__(self, instead: Any = None, silence_s: float = 10.0) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.sender = extension.load().Sender(self.near.fileno(), silence_s, 1 << 20, 7, instead)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.shutdown(socket.SHUT_RDWR)
        self.sender.close()
        self.near.close()
        self.far.close()

    def take(self, size: int) -> bytes:
        self.far.settimeout(10)
        taken = bytearray()
        while len(taken) < size:
            part = self.far.recv(min(3000, size - len(taken)))
            assert part
            taken += part
        return bytes(taken)


class Item(lane.Chunk):
    @property
    def said(self) -> bytes:
        return self.header("grad", 300)


def item(*views: bytes, unit: int = 1) -> tuple[Item, bytes]:
    """And what is to be sent of it."""
    made = Item()
    made.add(unit, [memoryview(bytearray(view)) for view in views])
    digests = [xxhash.xxh3_128_digest(view) for view in views]
    message = v.VaultPuts(
        kind="grad", version=300, units=[unit], sizes=[list(map(len, views))], digests=digests
    )
    return made, wire.frame(message) + b"".join(views)


def needs_library() -> None:
    if not extension.load().can_digest():
        pytest.skip("needs libxxhash.so.0 (Debian: libxxhash0)")


def test_many_pieces_are_hashed_and_sent_however_slowly_they_are_taken() -> None:
    needs_library()
    with Sending() as sending:
        items = [item(*(os.urandom(n % 77) for n in range(1500)), unit=unit) for unit in range(3)]
        items += [item(os.urandom(1 << 20), b"", b"end"), item(), item(b"")]
        tickets = [sending.sender.put(made.said, made.views) for made, _ in items]
        assert tickets == list(range(8, 8 + len(items)))
        assert not sending.sender.failed and sending.sender.read < tickets[-1]
        expected = b"".join(said for _, said in items)
        assert sending.take(len(expected)) == expected
        sending.sender.wait_read(tickets[-1])
        assert sending.sender.read == tickets[-1]


def test_what_cannot_be_sent_says_why_and_counts_as_read() -> None:
    needs_library()
    with Sending(silence_s=0.05) as sending:
        made, _ = item(bytes(1 << 24))
        sending.sender.wait_read(sending.sender.put(made.said, made.views))
        assert sending.sender.failed and sending.sender.error == errno.ETIMEDOUT
        sending.sender.wait_read(sending.sender.put(made.said, made.views))
    with Sending() as sending:
        sending.far.close()
        made, _ = item(b"x")
        sending.sender.wait_read(sending.sender.put(made.said, made.views))
        assert sending.sender.error in (errno.EPIPE, errno.ECONNRESET)


def test_a_sender_that_is_closed_lets_go_of_all() -> None:
    needs_library()
    with Sending() as sending:
        made, _ = item(bytes(1 << 24))
        tickets = [sending.sender.put(made.said, made.views) for _ in range(3)]
        waiting = threading.Thread(target=sending.sender.wait_read, args=(tickets[-1],))
        waiting.start()
        sending.near.shutdown(socket.SHUT_RDWR)
        sending.sender.close()
        waiting.join(10)
        assert not waiting.is_alive()
        ticket = sending.sender.put(made.said, made.views)
        assert sending.sender.read == ticket == tickets[-1] + 1


def test_a_header_without_room_for_digests_is_refused() -> None:
    made, _ = item(b"abc")
    with Sending() as sending:
        for header in (b"", made.said[:-1], made.said[:-18]):
            with pytest.raises(ValueError, match="no room"):
                sending.sender.put(header, made.views)


@pytest.mark.parametrize("fails", [False, True])
def test_without_the_library_python_hashes_and_sends(fails: bool) -> None:
    near, far = socket.socketpair()
    with near, far:
        one = lane.Lane(SimpleNamespace(), 0)  # type: ignore[arg-type]
        one._connection = near
        if fails:
            near.shutdown(socket.SHUT_RDWR)
        sender = one._sender = extension.load().Sender(near.fileno(), 1.0, 1 << 20, 0, one._send)
        made, said = item(b"abc", b"", b"x" * 100_000)
        ticket = one.enqueue("grad", 300, made)
        if not fails:
            far.settimeout(10)
            taken = b""
            while len(taken) < len(said):
                taken += far.recv(1 << 20)
            assert taken == said
        one.wait_read(ticket)
        failure = one.failure()
        assert sender.failed == fails == (failure is not None and isinstance(failure[0], OSError))
        sender.close()


def test_a_feeder_does_all_in_order_also_behind_what_failed() -> None:
    done: list[int] = []
    go = threading.Event()
    feeder = Feeder("test")
    feeder.put(lambda: (go.wait(10), done.append(1)))
    feeder.put(lambda: 1 // 0)
    feeder.put(lambda: done.append(2))
    assert not done
    go.set()
    feeder.join()
    assert done == [1, 2]
    feeder.put(lambda: done.append(3))
    feeder.close()
    assert done == [1, 2, 3]


def test_rooms_are_given_out_one_behind_the_other() -> None:
    room = Room(torch.zeros(256, dtype=torch.uint8))
    assert [room.take(size) for size in (3, 64, 1)] == [
        slice(0, 3), slice(64, 128), slice(128, 129)
    ]  # fmt: skip
    assert room.left == 256 - 192 and aligned(65) == 128


def test_a_process_that_is_forked_does_not_have_the_thread_and_ends() -> None:
    with Sending() as sending:
        child = os.fork()
        if not child:
            sending.sender.close()
            sending.sender = None  # the last to know it
            os._exit(7)
        limit = time.monotonic() + 10
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("it hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(done[1]) == 7
