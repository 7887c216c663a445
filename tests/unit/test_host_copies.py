"""Gradients in host memory: what native code says of them, and who hands them on."""

from __future__ import annotations

import errno
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from keepstep.worker import extension, host, lane
from keepstep.worker.copies import Feeder, Room, aligned
from keepstep.worker.state import memory

SIZES = [1, 3, 4, 15, 16, 17, 33, 1000, 4096, 5003]


def fingerprint(*tensors: torch.Tensor) -> tuple[int, int]:
    groups = [[(one.data_ptr(), one.nbytes) for one in tensors]]
    (found,) = extension.load().fingerprints(groups, 2)
    return tuple(found)  # type: ignore[return-value]


def test_a_copy_has_the_fingerprint_of_what_it_was_made_of() -> None:
    torch.manual_seed(1)
    sources = [torch.randn(size) for size in SIZES]
    copies = [torch.zeros(size) for size in SIZES]
    pieces = [
        (one.data_ptr(), one.nbytes, other.data_ptr())
        for one, other in zip(sources, copies, strict=True)
    ]
    found = extension.load().copy(pieces)
    assert all(map(torch.equal, sources, copies))
    assert found == fingerprint(*sources) == fingerprint(*copies)
    assert found not in (fingerprint(*sources[::-1]), fingerprint(*sources[:-1]))


def test_threads_that_help_find_the_same() -> None:
    torch.manual_seed(6)
    tensors = [torch.randn(size) for size in (900_000, 3, 700_001, 800_000, 20)]  # 9 MB
    groups = [[(one.data_ptr(), one.nbytes)] for one in tensors]
    native = extension.load()
    for helpers in (1, 3, 8):
        assert native.fingerprints(groups, helpers) == [fingerprint(one) for one in tensors]
        alone = native.fingerprints_multiplied(groups, 0.3, 0)
        assert native.fingerprints_multiplied(groups, 0.3, helpers) == alone


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


@pytest.mark.parametrize("scale", [0.5, 0.3, 1e-30, 1.0, 0.0, float("inf"), float("nan")])
def test_a_fingerprint_of_products_is_that_of_what_torch_multiplies(scale: float) -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(size) * 1e-10 for size in SIZES]
    groups = [[(one.data_ptr(), one.nbytes) for one in tensors]]
    (found,) = extension.load().fingerprints_multiplied(groups, scale, 0)
    torch._foreach_mul_(tensors, torch.tensor(scale))
    assert found == fingerprint(*tensors)


def test_digests_are_those_of_xxhash() -> None:
    native = extension.load()
    if not native.can_digest():
        pytest.skip("needs libxxhash.so.0 (Debian: libxxhash0)")
    views = [os.urandom(size) for size in (0, 1, 9, 17, 200, 241, 100_000)]
    given = [memoryview(bytearray(one)) for one in views]
    assert native.digests(given) == [xxhash.xxh3_128_digest(one) for one in views]
    assert native.digests([]) == []


def test_many_pieces_are_sent_however_slowly_they_are_taken() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        views = [os.urandom(n % 77) for n in range(1500)] + [os.urandom(1 << 20), b"", b"end"]
        taken = bytearray()

        def take() -> None:
            while part := other.recv(3000):
                taken.extend(part)

        reader = threading.Thread(target=take)
        reader.start()
        assert extension.load().send_all(one.fileno(), views, 10.0) == 0
        one.close()
        reader.join(10)
        assert bytes(taken) == b"".join(views)


def test_what_cannot_be_sent_says_why() -> None:
    native = extension.load()
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        assert native.send_all(one.fileno(), [bytes(1 << 24)], 0.05) == errno.ETIMEDOUT
        other.close()
        assert native.send_all(one.fileno(), [b"x"], 1.0) in (errno.EPIPE, errno.ECONNRESET)


def test_without_the_library_python_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepstep.model import vault as v

    sent: list[bytes] = []
    monkeypatch.setattr(
        lane.extension,
        "load",
        lambda: SimpleNamespace(
            can_digest=lambda: False,
            send_all=lambda _, views, __: sent.extend(map(bytes, views)) or 0,
        ),
    )
    item = lane.Item(v.VaultPuts(kind="grad", version=1, units=[], sizes=[]))
    item.add(7, [memoryview(b"abc")])
    connection: Any = SimpleNamespace(fileno=lambda: 0)
    lane.Lane(SimpleNamespace(), 0, 1)._send(connection, [item])  # type: ignore[arg-type]
    assert sent[1:] == [b"abc"]
    assert xxhash.xxh3_128_digest(b"abc") in sent[0]


def test_a_feeder_does_all_in_order_also_behind_what_failed() -> None:
    done: list[int] = []
    go = threading.Event()
    feeder = Feeder("test")
    first = feeder.put(lambda: (go.wait(10), done.append(1)))
    feeder.put(lambda: 1 // 0)
    last = feeder.put(lambda: done.append(2))
    assert last == first + 2 and not done
    go.set()
    feeder.join(first)
    assert done[0] == 1
    feeder.put(lambda: done.append(3))
    feeder.close()
    assert done == [1, 2, 3]


def test_rooms_are_given_out_one_behind_the_other() -> None:
    room = Room(torch.zeros(256, dtype=torch.uint8))
    assert [room.take(size) for size in (3, 64, 1)] == [
        slice(0, 3), slice(64, 128), slice(128, 129)
    ]  # fmt: skip
    assert room.left == 256 - 192 and aligned(65) == 128


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_what_some_of_a_group_are_multiplied_by_is_told_of_the_copy(kind: torch.dtype) -> None:
    torch.manual_seed(4)
    parts = {unit: torch.randn(size).to(kind) for unit, size in enumerate((40, 7, 100))}
    way = host.HostWay({unit: part.nbytes for unit, part in parts.items()})
    puts: list[Any] = []
    line: Any = SimpleNamespace(
        put_all=lambda _, __, views: puts.append({u: bytes(w[0]) for u, w in views.items()}),
        broken=False,
    )
    try:
        before = {unit: bytes(memory(part)) for unit, part in parts.items()}
        ticket = way.put(line, 1, dict(parts), None)
        way.before_write()
        assert puts == [before]
        now = list(parts.values())
        assert [way.sent(line, ticket)] == way.look([now])
        for scale, which in ((0.7, [True, True, True]), (0.3, [False, True, True])):
            by = torch.tensor(scale)
            assert way.multiplied([(ticket, which)], by)
            torch._foreach_mul_([one for one, yes in zip(now, which, strict=True) if yes], by)
            assert [way.sent(line, ticket)] == way.look([now])
        now[2][5] += 1
        assert [way.sent(line, ticket)] != way.look([now])
        line.broken = True
        assert way.sent(line, ticket) is None
    finally:
        way.close()
