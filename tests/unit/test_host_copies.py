"""Gradients in host memory: what native code says of them, and who hands them on."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import compress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.worker.device import extension
from keepstep.worker.state.tensors import memory
from keepstep.worker.vault import host, lane
from keepstep.worker.vault.copies import Feeder, Room, aligned
from keepstep.worker.vault.units import same_order

SIZES = [1, 3, 4, 15, 16, 17, 33, 1000, 4096, 5003]


Groups = list[list[tuple[int, int]]]
Fingerprint = tuple[int, int]


@pytest.fixture(params=["cipher", "shifts"], autouse=True)
def function(request: pytest.FixtureRequest) -> Iterator[None]:
    """Machines without the one use the other."""
    native = extension.load()
    wanted = request.param == "cipher"
    try:
        if native.use_cipher(wanted) != wanted:
            pytest.skip("needs a processor with AES")
        yield
    finally:
        native.use_cipher(True)


@contextmanager
def copying(helpers: int = 0) -> Iterator[Any]:
    copier = extension.load().Copier(helpers)
    try:
        yield copier
    finally:
        copier.close()


def group(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one.nbytes) for one in tensors]


def look(groups: Groups, helpers: int = 0) -> list[Fingerprint]:
    with copying(helpers) as copier:
        return copier.look(groups)  # type: ignore[no-any-return]


def fingerprint(*tensors: torch.Tensor) -> Fingerprint:
    (found,) = look([group(*tensors)])
    return found


def test_a_copy_has_the_fingerprint_of_what_it_was_made_of() -> None:
    torch.manual_seed(1)
    sources = [torch.randn(size) for size in SIZES]
    copies = [torch.zeros(size) for size in SIZES]
    pieces = [
        (one.data_ptr(), one.nbytes, other.data_ptr())
        for one, other in zip(sources, copies, strict=True)
    ]
    with copying() as copier:
        found = copier.found(copier.copy(pieces))
    assert all(map(torch.equal, sources, copies))
    assert found == fingerprint(*sources) == fingerprint(*copies)
    assert found not in (fingerprint(*sources[::-1]), fingerprint(*sources[:-1]))


def test_threads_that_help_find_the_same() -> None:
    torch.manual_seed(6)
    tensors = [torch.randn(size) for size in (900_000, 3, 700_001, 800_000, 20)]  # 9 MB
    groups = [group(*tensors[:2]), group(tensors[2]), [], group(*tensors[3:])]
    alone = [look([one])[0] for one in groups]
    for helpers in (0, 1, 3, 8):
        with copying(helpers) as copier:
            for _ in range(10):
                assert copier.look(groups) == alone
            assert copier.look([]) == []


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 200, 70_001])
def test_whatever_is_done_to_one_byte_changes_the_fingerprint(size: int) -> None:
    torch.manual_seed(size)
    data = torch.randint(256, (size,), dtype=torch.uint8)
    seen = {fingerprint(data)}
    places = {0, size // 2, size - 1}
    for place in places:
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 8 * len(places)


def test_what_is_done_to_gradients_changes_the_fingerprint() -> None:
    torch.manual_seed(2)
    gradient = torch.randn(4096)
    done = [
        gradient, -gradient, gradient * 2, gradient + 1e-6, gradient.flip(0), gradient.roll(16),
        gradient.roll(1), gradient.clamp(-2, 2), gradient.abs(), torch.zeros(4096),
        gradient.view(-1, 2).flip(1).reshape(-1), gradient[torch.randperm(4096)],
        torch.where(torch.arange(4096) % 2 == 1, -gradient, gradient),
        torch.cat([-gradient[:2], gradient[2:]]), torch.cat([gradient[:-1], -gradient[-1:]]),
    ]  # fmt: skip
    assert len({fingerprint(one) for one in done}) == len(done)


@contextmanager
def flushing() -> Iterator[None]:
    """The calling thread, and those that it starts, take tiny numbers for nothing."""
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that can take tiny numbers for nothing")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("others_flush", [False, True])
@pytest.mark.parametrize("helpers", [0, 3])
@pytest.mark.parametrize("scale", [0.5, 0.3, 1e-30, 1.0, 0.0, -0.7])
def test_what_is_multiplied_is_what_torch_makes_of_it(
    scale: float, helpers: int, others_flush: bool
) -> None:
    torch.manual_seed(3)
    sizes = [*SIZES, 3_000_003]  # the largest is not done by one thread
    tensors = [torch.randn(size) * 1e-10 for size in sizes]
    tensors += [torch.tensor([math.nan, -math.inf, math.inf, -0.0, 1e-45, -1e-38, 3e38])]
    tensors += [torch.randint(-(2**31), 2**31, (70_001,)).to(torch.int32).view(torch.float32)]
    expected = [one.clone() for one in tensors]
    chosen = [n % 4 != 1 for n in range(len(tensors))]
    groups = [group(*tensors[:3]), group(*tensors[3:])]
    before = look(groups)
    with flushing() if others_flush else nullcontext():
        copier = extension.load().Copier(helpers)
    try:
        found = copier.multiply(groups, [chosen[:3], chosen[3:]], scale)
    finally:
        copier.close()
    torch._foreach_mul_(list(compress(expected, chosen)), torch.tensor(scale))
    for one, other in zip(tensors, expected, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert found == (before, look(groups))
    assert before != look(groups) or scale == 1.0


# ---------------------------------------------------------------- the sender


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
        tickets = [sending.sender.put(made.said, made.views, None, 0) for made, _ in items]
        assert tickets == list(range(8, 8 + len(items)))
        assert not sending.sender.failed and sending.sender.read < tickets[-1]
        expected = b"".join(said for _, said in items)
        assert sending.take(len(expected)) == expected
        sending.sender.wait_read(tickets[-1])
        assert sending.sender.read == tickets[-1]


def test_what_is_to_be_copied_first_is_sent_when_it_was_and_in_its_order() -> None:
    needs_library()
    chance = random.Random(5)
    native = extension.load()
    copier = native.Copier(0)
    sources = [torch.randint(256, (chance.choice((1, 900, 1 << 20)),)).byte() for _ in range(40)]
    copies = [torch.zeros_like(one) for one in sources]
    said, held = [], []
    with Sending() as sending:
        for source, copy in zip(sources, copies, strict=True):
            job = copier.copy([(source.data_ptr(), source.nbytes, copy.data_ptr())])
            made = Item()
            made.add(1, [memory(copy)])
            held.append(made)
            sending.sender.put(made.said, made.views, copier, job)
            said.append(item(bytes(memory(source)))[1])
            if chance.random() < 0.5:  # one that waits for nobody stays behind it
                other, told = item(b"plain", unit=2)
                held.append(other)
                sending.sender.put(other.said, other.views, None, 0)
                said.append(told)
        expected = b"".join(said)
        assert sending.take(len(expected)) == expected
    assert copier.found(3) == fingerprint(sources[2])
    copier.forget()
    copier.close()


def test_what_cannot_be_sent_says_why_and_counts_as_read() -> None:
    needs_library()
    with Sending(silence_s=0.05) as sending:
        made, _ = item(bytes(1 << 24))
        sending.sender.wait_read(sending.sender.put(made.said, made.views, None, 0))
        assert sending.sender.failed and sending.sender.error == errno.ETIMEDOUT
        sending.sender.wait_read(sending.sender.put(made.said, made.views, None, 0))
    with Sending() as sending:
        sending.far.close()
        made, _ = item(b"x")
        sending.sender.wait_read(sending.sender.put(made.said, made.views, None, 0))
        assert sending.sender.error in (errno.EPIPE, errno.ECONNRESET)


def test_a_sender_that_is_closed_lets_go_of_all() -> None:
    needs_library()
    with Sending() as sending:
        made, _ = item(bytes(1 << 24))
        tickets = [sending.sender.put(made.said, made.views, None, 0) for _ in range(3)]
        waiting = threading.Thread(target=sending.sender.wait_read, args=(tickets[-1],))
        waiting.start()
        sending.near.shutdown(socket.SHUT_RDWR)
        sending.sender.close()
        waiting.join(10)
        assert not waiting.is_alive()
        ticket = sending.sender.put(made.said, made.views, None, 0)
        assert sending.sender.read == ticket == tickets[-1] + 1


def test_a_header_without_room_for_digests_is_refused() -> None:
    made, _ = item(b"abc")
    with Sending() as sending:
        for header in (b"", made.said[:-1], made.said[:-18]):
            with pytest.raises(ValueError, match="no room"):
                sending.sender.put(header, made.views, None, 0)


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


def test_a_copier_does_all_that_it_was_told_before_it_ends() -> None:
    sources = [torch.randn(1 << 18) for _ in range(8)]
    copies = [torch.zeros_like(one) for one in sources]
    copier = extension.load().Copier(1)
    for source, copy in zip(sources, copies, strict=True):
        copier.copy([(source.data_ptr(), source.nbytes, copy.data_ptr())])
    assert copier.last == 8
    copier.close()
    assert all(map(torch.equal, sources, copies))
    assert [copier.found(job) for job in range(1, 9)] == list(map(fingerprint, copies))


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


def test_what_is_copied_is_known_by_its_fingerprint_and_multiplied_in_place() -> None:
    torch.manual_seed(4)
    parts = {unit: torch.randn(size) for unit, size in enumerate((40, 7, 100))}
    way = host.HostWay({unit: part.nbytes for unit, part in parts.items()})
    puts: list[Any] = []
    line: Any = SimpleNamespace(
        put_parcel=lambda _, __, parcel, after: puts.append((parcel.data, after)), broken=False
    )
    try:
        before = {unit: bytes(memory(part)) for unit, part in parts.items()}
        ticket = way.put(line, 1, dict(parts), None)
        way.before_write()
        ((views, (copier, job)),) = puts
        copier.wait(job)
        assert {unit: bytes(view) for unit, (view,) in views.items()} == before
        now = list(parts.values())
        is_now = [way.sent(line, ticket)]
        assert is_now == way.look([now])
        for scale, which in ((0.7, [True, True, True]), (0.3, [False, True, True])):
            versions = [one._version for one in now]
            expected = [one * scale if yes else one.clone() for one, yes in zip(now, which)]
            looks = way.multiply([now], [which], torch.tensor(scale))
            assert looks == (is_now, is_now := way.look([now]))
            assert all(map(torch.equal, now, expected))
            assert [one._version for one in now] == [v + yes for v, yes in zip(versions, which)]
        now[2][5] += 1
        assert way.look([now]) != is_now
        line.broken = True
        assert way.sent(line, ticket) is None
    finally:
        way.close()


def test_what_native_code_does_not_multiply_as_torch_does_is_left_to_torch() -> None:
    way = host.HostWay({0: 400, 1: 200})
    try:
        parts = [torch.ones(100), torch.ones(100, dtype=torch.bfloat16)]
        wide = torch.tensor(0.5, dtype=torch.float64)
        for chosen, by in (
            ([True, True], torch.tensor(0.5)),
            ([True, False], wide),
            ([True, False], torch.tensor(math.nan)),
            ([True, False], torch.tensor(-math.inf)),
        ):
            assert way.multiply([parts], [chosen], by) is None
        view = parts[0][50:]
        for together in ([parts[0], view], [view, parts[0]], [parts[0], parts[0]]):
            assert way.multiply([together], [[True, True]], torch.tensor(0.5)) is None
        assert way.multiply([parts[:1]], [[True]], torch.tensor([0.5])) is None
        with flushing():  # torch's other threads do not
            assert way.multiply([parts[:1]], [[True]], torch.tensor(0.5)) is None
        assert all(bool((one == 1).all()) for one in parts)
        assert way.multiply([parts], [[True, False]], torch.tensor(0.5)) is not None
        assert [float(one.sum()) for one in parts] == [50.0, 100.0]
        assert not way.joins(*parts) and way.joins(parts[0], parts[0])
    finally:
        way.close()


def test_what_torch_has_only_noted_is_another_gradient() -> None:
    way = host.HostWay({0: 80})
    try:
        gradient = torch.randn(10, dtype=torch.complex64)
        noted = gradient.conj()
        assert way.look([[gradient]]) == way.look([[noted]]) and not torch.equal(gradient, noted)
        assert way.place([gradient]) != way.place([noted])
        assert way.place([gradient.imag]) != way.place([noted.imag])
        assert same_order(gradient, gradient) and not same_order(gradient, noted)
    finally:
        way.close()


def test_a_process_that_is_forked_has_none_of_the_threads_and_ends() -> None:
    with Sending() as sending:
        copier = extension.load().Copier(0)
        child = os.fork()
        if not child:
            copier.close()
            sending.sender.close()
            sending.sender = copier = None  # the last to know them
            os._exit(7)
        limit = time.monotonic() + 10
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("it hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(done[1]) == 7
