"""The vault: what a rank puts there, who may, how much, and what its successor gets back."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.adapters.identity.authority import Authority, new_node_key
from keepstep.adapters.transport import tls
from keepstep.adapters.transport.blocking import Frames
from keepstep.agent.blobs import BlobServer
from keepstep.core.agent.vault import Refusal, Shelf, StoredPiece, VaultStore
from keepstep.errors import PermanentError, UsageError
from keepstep.model import vault as v
from keepstep.model.blob_messages import BlobOk, BlobPut
from keepstep.model.messages import Address, TlsFiles
from keepstep.model.wire import frame
from keepstep.worker.line import peers
from keepstep.worker.state.statefile import DigestMismatch
from keepstep.worker.vault.lane import VaultLacks
from keepstep.worker.vault.vault import VaultLine, fetch, forget
from tests.support.vault import DEADLINE_S, MB, agent, going_on, line, opened, plain, wait_until

# ---------------------------------------------------------------- there and back


def test_what_was_put_comes_back() -> None:
    large = bytes(range(256)) * (3 * MB // 256) + b"odd"
    with agent() as (address, server), line(address) as rank:
        assert opened(rank) == -1
        rank.put_base(0, 7, [large, b"", b"moment"])
        rank.put_base(1, 8, [memoryview(b"abcdefgh").cast("I")])
        rank.put_grad(0, 7, large[::-1])
        rank.put_absent(0, 8)
        rank.put_grad(1, 8, b"g8")
        rank.note(7, b"lr 7")
        rank.note(8, b"lr 8")
        rank.sync(8, going_on)
        found = fetch(address, "t", 2, 9)
        assert plain(found) == {
            0: (7, [large, b"", b"moment"], {7: large[::-1], 8: None}),
            1: (8, [b"abcdefgh"], {8: b"g8"}),
        }
        assert (found.layout, found.notes) == (b"layout", {7: b"lr 7", 8: b"lr 8"})
        held = 2 * len(large) + 6 + 8 + 2 + 8
        assert found.bytes == held
        assert server.vault.held() == {2: (held, 64 * MB)}
        assert plain(fetch(address, "t", 2, 8))[1] == (8, [b"abcdefgh"], {})


def test_the_content_outlives_the_process_and_a_successor_goes_on_with_it() -> None:
    with agent() as (address, _), line(address, 5) as successor:
        with line(address, 4) as rank:
            opened(rank)
            for unit in (0, 1):
                rank.put_base(unit, 3, [b"base"])
                rank.put_grad(unit, 3, b"three")
            rank.sync(3, going_on)
        assert opened(successor) == 4
        for unit in (0, 1):
            successor.put_grad(unit, 4, b"four")
        successor.sync(4, going_on)
        expected = (3, [b"base"], {3: b"three", 4: b"four"})
        assert plain(fetch(address, "t", 2, 5)) == {0: expected, 1: expected}
        assert opened(successor, units=1, fresh=True) == -1
        with pytest.raises(VaultLacks, match="unit 0 has no base"):
            fetch(address, "t", 2, 5)


def test_side_state_and_the_vault_share_a_port() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        with socket.create_connection((address.host, address.port)) as other:
            other.sendall(frame(BlobPut(token="t", rank=0, tick=0, data=b"x")))
            assert other.recv(100) == frame(BlobOk())
        rank.sync(0, going_on)


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority")
    key, request = new_node_key("n0")
    given_files = {
        "ca": authority.certificate.encode(),
        "certificate": authority.sign_node(request, "job", "n0").encode(),
        "key": key,
    }
    for what, data in given_files.items():
        (tmp_path / what).write_bytes(data)
    texts = {what: str(tmp_path / what) for what in given_files}
    files = TlsFiles(**texts, peers=tls.job_name("job"))
    peers.use(files)
    try:
        with agent(files) as (address, _), line(address) as rank:
            opened(rank, units=1)
            rank.put_base(0, 0, [b"x" * (5 * MB)])
            rank.sync(0, going_on)
            assert plain(fetch(address, "t", 2, 0)) == {0: (0, [b"x" * (5 * MB)], {})}
            rank.interrupt()
            with pytest.raises(ConnectionAbortedError):
                rank.sync(1, going_on)
    finally:
        peers.use(None)


# ---------------------------------------------------------------- versions and logs


def test_a_new_base_drives_out_what_nobody_can_ask_for_any_more() -> None:
    with agent() as (address, server), line(address) as rank:
        opened(rank, units=1)
        rank.put_base(0, 0, [b"base 0"])
        for step in (0, 1):
            rank.put_grad(0, step, b"grad")
            rank.note(step, b"note")
            rank.sync(step, going_on)
        rank.put_base(0, 2, [b"base 2"])
        rank.put_grad(0, 2, b"grad")
        rank.sync(2, going_on)
        # Another rank may wait in the fence of step 1: should this one die now, it goes back to 1.
        assert plain(fetch(address, "t", 2, 1)) == {0: (0, [b"base 0"], {0: b"grad"})}
        assert plain(fetch(address, "t", 2, 3)) == {0: (2, [b"base 2"], {2: b"grad"})}
        rank.put_grad(0, 3, b"grad")
        rank.note(3, b"note")
        rank.sync(3, going_on)
        assert server.vault.held()[2][0] == len(b"base 2" + b"grad" * 2 + b"note")
        with pytest.raises(VaultLacks, match="unit 0 has base 2, which is newer"):
            fetch(address, "t", 2, 1)


def test_a_retried_step_replaces_what_it_had_sent() -> None:
    with agent() as (address, server), line(address) as rank:
        opened(rank, units=1)
        rank.put_base(0, 5, [b"base"])
        rank.put_grad(0, 5, b"first try")
        rank.note(5, b"first note")
        rank.put_grad(0, 5, b"second")
        rank.note(5, b"again")
        rank.sync(5, going_on)
        found = fetch(address, "t", 2, 6)
        assert plain(found) == {0: (5, [b"base"], {5: b"second"})}
        assert found.notes == {5: b"again"}
        rank.put_absent(0, 5)
        rank.sync(5, going_on)
        assert plain(fetch(address, "t", 2, 6)) == {0: (5, [b"base"], {5: None})}
        assert server.vault.held()[2][0] == len(b"base" + b"again")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (12, "rank 2 cannot be brought to 12: unit 3 has base 7 and gradients up to 9, not 11"),
        (6, "unit 0 has base 7, which is newer"),
        (10, "unit 5 has no base"),
        (8, "unit 4 has base 7 and no gradients, not 7"),
    ],
)
def test_a_version_that_cannot_be_had_is_refused_by_name(version: int, words: str) -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank, units={12: 4, 6: 1, 10: 6, 8: 5}[version])
        for unit in range({12: 4, 6: 1, 10: 5, 8: 5}[version]):
            rank.put_base(unit, 7, [b"base"])
            gaps = {3: (10,), 4: (7,) if version == 8 else ()}.get(unit, ())
            for step in range(7, 12):
                if step not in gaps:
                    rank.put_grad(unit, step, b"grad")
        rank.sync(7, going_on)
        with pytest.raises(VaultLacks, match=words):
            fetch(address, "t", 2, version)
        with pytest.raises(VaultLacks, match="nothing of rank 3"):
            fetch(address, "t", 3, version)


# ---------------------------------------------------------------- fences and accidents


def raw(address: Address, *messages: Any) -> tuple[socket.socket, Frames[v.VaultReply]]:
    sock = socket.create_connection((address.host, address.port), DEADLINE_S)
    sock.sendall(b"".join(one if isinstance(one, bytes) else frame(one) for one in messages))
    return sock, Frames(sock, msgspec.msgpack.Decoder(v.VaultReply))


def asking(generation: int = 1, serial: int = 0, **how: Any) -> v.VaultOpen:
    given_fields = {"rank": 2, "layout": b"layout", "units": [0, 1], "reserve": MB, "token": "t"}
    return v.VaultOpen(generation=generation, serial=serial, **(given_fields | how))


def putting(kind: Any, version: int, *parts: bytes, unit: int = 0) -> bytes:
    digests = [xxhash.xxh3_128_digest(part) for part in parts]
    sizes = [len(part) for part in parts]
    puts = v.VaultPuts(kind=kind, units=[unit], version=version, sizes=[sizes], digests=digests)
    return frame(puts) + b"".join(parts)


def incoming(server: BlobServer, rank: int = 2) -> int:
    return server.vault._store._shelves[rank].incoming


def test_a_base_that_comes_in_part_replaces_nothing() -> None:
    with agent() as (address, server):
        old = putting("base", 1, b"old", b"moment") + putting("base", 1, b"u1", unit=1)
        new = putting("base", 2, b"new", b"m" * 1000)
        sock, frames = raw(address, asking(), old, v.VaultSync(version=1), new[:-1])
        assert isinstance(frames.receive(), v.VaultOpened)
        assert frames.receive() == v.VaultSynced(version=1)
        wait_until(lambda: incoming(server) == 1003)
        sock.close()
        wait_until(lambda: incoming(server) == 0)
        assert plain(fetch(address, "t", 2, 1))[0] == (1, [b"old", b"moment"], {})
        assert server.vault.held()[2][0] == len(b"old" + b"moment" + b"u1")


def test_a_late_writer_of_an_earlier_generation_changes_nothing() -> None:
    with agent() as (address, _), line(address, 4) as late, line(address, 5) as rank:
        for one in (late, rank):
            opened(one, units=1)
            one.put_base(0, 1, [b"of %d" % one.generation])
            one.sync(1, going_on)
        late.put_base(0, 1, [b"late"])
        with pytest.raises(PermanentError, match="later writer"):
            late.sync(1, going_on)
        with pytest.raises(PermanentError, match="belongs to a writer of generation 5"):
            opened(late, units=1)
        assert plain(fetch(address, "t", 2, 1)) == {0: (1, [b"of 5"], {})}


def test_a_writer_that_is_overtaken_in_the_middle_of_a_base_changes_nothing() -> None:
    base = putting("base", 3, b"late" * 1000)
    with agent() as (address, server), line(address, 5) as rank:
        sock, frames = raw(address, asking(4, serial=99), base[:100])
        with sock:
            wait_until(lambda: 2 in server.vault.held() and incoming(server) == 4000)
            opened(rank, units=2, reserve=10)  # what the late one holds does not count
            for unit in (0, 1):
                rank.put_base(unit, 3, [b"right"])
            rank.sync(3, going_on)
            sock.sendall(base[100:] + frame(v.VaultSync(version=3)))
            assert isinstance(frames.receive(), v.VaultOpened)
            refused = frames.receive()
            assert isinstance(refused, v.VaultRefused) and refused.reason == "fenced"
        assert plain(fetch(address, "t", 2, 3))[0] == (3, [b"right"], {})
        assert server.vault.held() == {2: (10, 10)}


def test_a_later_connection_of_the_same_process_drives_out_the_earlier_one() -> None:
    with agent() as (address, _), line(address) as earlier, line(address) as later:
        opened(earlier)
        opened(later)
        earlier.put_grad(0, 1, b"late")
        with pytest.raises(PermanentError, match="later writer"):
            earlier.sync(1, going_on)
        later.sync(1, going_on)


def test_streams_of_one_writer_share_its_reservation() -> None:
    first, second = putting("base", 1, b"x" * 600), putting("base", 1, b"y" * 600, unit=1)
    with agent() as (address, server):
        sock, frames = raw(address, asking(reserve=1000), first[:-1])
        wait_until(lambda: server.vault.held() and incoming(server) == 600)
        other, replies = raw(address, asking(reserve=1000), second, v.VaultSync(version=1))
        with sock, other:
            assert isinstance(replies.receive(), v.VaultOpened)
            refused = replies.receive()
            assert isinstance(refused, v.VaultRefused) and refused.reason == "memory"
            sock.sendall(first[-1:] + frame(v.VaultSync(version=1)))
            assert isinstance(frames.receive(), v.VaultOpened)
            assert frames.receive() == v.VaultSynced(version=1)
        assert server.vault.held() == {2: (600, 1000)}


def puts_of(kind: Any, version: int, sizes: list[list[int]], *digests: bytes) -> v.VaultPuts:
    units = list(range(len(sizes)))
    return v.VaultPuts(kind=kind, version=version, units=units, sizes=sizes, digests=[*digests])


@pytest.mark.parametrize(
    "put",
    [
        puts_of("base", -1, [[]]),
        puts_of("base", 1, [[-1, 1]], b"x", b"y"),
        puts_of("base", 1, [[1]]),
        puts_of("base", 1, [[0], [0]], b"x"),
        puts_of("base", 1, [[0]], b"x", b"y"),
        puts_of("grad", 1, [[]]),
        puts_of("note", 1, [[0, 0]], b"x", b"y"),
        puts_of("absent", 1, [[0]], b"x"),
        v.VaultPuts(kind="base", version=1, units=[0, 1], sizes=[[]]),
    ],
)
def test_a_put_that_makes_no_sense_ends_the_connection(
    put: v.VaultPuts, caplog: pytest.LogCaptureFixture
) -> None:
    with agent() as (address, server):
        sock, frames = raw(address, asking(), put, v.VaultSync(version=1))
        with sock:
            assert isinstance(frames.receive(), v.VaultOpened)
            with pytest.raises(ConnectionError):
                frames.receive()
        wait_until(lambda: not server.connections)
        assert re.search("makes? no sense", caplog.text) and "failed" not in caplog.text
        assert server.vault.held() == {2: (0, MB)}


def test_another_layout_is_refused_unless_it_is_fresh() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank, units=2)
        rank.put_base(0, 1, [b"base"])
        rank.sync(1, going_on)
        with pytest.raises(PermanentError, match="hint: open it as fresh"):
            opened(rank, units=3)
        assert opened(rank, units=3, fresh=True) == -1
        rank.put_base(3, 1, [b"base"])
        with pytest.raises(PermanentError, match="has no unit 3"):
            rank.sync(1, going_on)


def test_what_was_damaged_is_found() -> None:
    with agent() as (address, server), line(address) as rank:
        damaged = putting("base", 1, b"right")[:-1] + b"?"
        sock, frames = raw(address, asking(), damaged, v.VaultSync(version=1))
        with sock:
            assert isinstance(frames.receive(), v.VaultOpened)
            refused = frames.receive()
            assert isinstance(refused, v.VaultRefused) and refused.reason == "digest"
        opened(rank)
        for unit in (0, 1):
            rank.put_base(unit, 1, [b"b" * 5000])
        rank.put_grad(1, 1, b"g" * 5000)
        rank.put_grad(0, 1, b"g" * 5000)
        rank.sync(1, going_on)
        grad = server.vault._store._shelves[2].units[1].log[1][0].data
        grad[4321] ^= 1
        with pytest.raises(DigestMismatch, match="gradient 1 of unit 1 of rank 2"):
            fetch(address, "t", 2, 2)
        assert fetch(address, "t", 2, 1).bytes == 10_000


def test_without_the_token_nothing_is_done() -> None:
    with agent() as (address, server):
        stranger = VaultLine(address, "x", 2, 1)
        for attempt in (
            lambda: opened(stranger),
            lambda: fetch(address, "x", 2, 0),
            lambda: forget(address, "x", 2, 1),
        ):
            with pytest.raises(PermanentError, match="wrong token"):
                attempt()
        assert server.vault.held() == {}


def test_forgetting_frees_the_memory_for_those_who_may() -> None:
    with agent() as (address, server), line(address, 4) as rank:
        opened(rank, units=1)
        rank.put_base(0, 1, [b"x" * MB])
        rank.sync(1, going_on)
        with pytest.raises(PermanentError, match="generation 4 already"):
            forget(address, "t", 2, 3)
        assert server.vault.held()[2][0] == MB
        forget(address, "t", 2, 4)
        assert server.vault.held() == {}
        with pytest.raises(PermanentError, match="was forgotten"):
            rank.sync(1, going_on)
        with line(address, 3) as earlier, pytest.raises(PermanentError, match="generation 4"):
            opened(earlier)
        opened(rank, units=1)


def test_when_a_rank_has_moved_away_only_what_its_own_agent_kept_is_forgotten() -> None:
    with agent() as (address, server):
        with line(address, 4) as buddys:
            opened(buddys, units=1)
            server.vault.left(2)
            assert 2 in server.vault.held()
        with line(address, 5, own=True) as own:
            opened(own, units=1)
            server.vault.left(2)
            assert server.vault.held() == {}


def test_bases_of_one_version_are_preferred_to_newer_ones_of_some_units() -> None:
    """An average of all weights cannot begin with some of version 4 and others of version 8."""
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        for unit in (0, 1):
            rank.put_base(unit, 4, [b"four"])
            rank.put_grad(unit, 4, b"g")
        rank.put_base(0, 5, [b"five"])
        rank.sync(4, going_on)
        assert {base for base, _, _ in fetch(address, "t", 2, 5).units.values()} == {4}
        with pytest.raises(VaultLacks, match="unit 1"):
            fetch(address, "t", 2, 5, base=5)


# ---------------------------------------------------------------- memory


def test_a_reservation_that_the_machine_cannot_keep_is_refused() -> None:
    with agent() as (address, server):
        server.vault._available = lambda: 1000
        with line(address, rank=0) as first, line(address, rank=1) as second:
            opened(first, reserve=600)
            with pytest.raises(UsageError):
                opened(second, reserve=401)
            opened(second, reserve=400)
            first.put_base(0, 0, [b"x" * 500])
            first.sync(0, going_on)
            server.vault._available = lambda: 500  # what is held is not available any more
            opened(second, reserve=400)
            opened(first, reserve=600)
            with pytest.raises(UsageError):
                opened(first, reserve=601)
            opened(first, reserve=600, fresh=True)
            assert server.vault.held() == {0: (0, 600), 1: (0, 400)}


def test_too_little_memory_is_said_with_what_it_means() -> None:
    with agent() as (address, server):
        server.vault._available = lambda: 1000 * MB
        with line(address, rank=0) as first, line(address, rank=1) as second:
            opened(first, reserve=600 * MB)
            with pytest.raises(UsageError) as refused:
                opened(second, reserve=401 * MB)
    said = str(refused.value)
    assert "shards of rank 1, which no other rank has, take 401.0 MiB of host memory" in said
    assert "and 400.0 MiB are left there" in said
    assert "hint: take nodes with more memory" in said
    assert "with --redundancy off a rank that is lost means going back to a checkpoint" in said


def test_nothing_is_received_beyond_the_reservation() -> None:
    with agent() as (address, server), line(address) as rank:
        opened(rank, units=1, reserve=3 * MB)
        rank.put_base(0, 0, [b"x" * (2 * MB)])
        rank.sync(0, going_on)
        rank.put_grad(0, 0, b"x" * (2 * MB))
        rank.put_grad(0, 1, b"y")
        with pytest.raises(UsageError, match=f"{2 * MB} of {3 * MB} bytes are taken\nhint: "):
            rank.sync(1, going_on)
        assert server.vault.held() == {2: (2 * MB, 3 * MB)}
        opened(rank, units=1, reserve=4 * MB)
        rank.put_grad(0, 0, b"x" * (2 * MB))
        rank.sync(1, going_on)


# ---------------------------------------------------------------- the line


@contextmanager
def deaf_agent() -> Iterator[Address]:
    """Opens every vault, reads nothing more and says nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    kept.append(sock)
                    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(v.VaultRequest)
                    Frames(sock, decoder).receive()
                    sock.sendall(frame(v.VaultOpened(reaches=-1, held=0)))

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in kept:
                sock.close()


def test_an_interruption_frees_who_waits_for_the_acknowledgement() -> None:
    with deaf_agent() as address, line(address) as rank:
        opened(rank)
        rank.put_grad(0, 1, b"grad")
        interrupting = threading.Timer(0.05, rank.interrupt)
        interrupting.start()
        with pytest.raises(ConnectionAbortedError):
            rank.sync(1, going_on)
        interrupting.join()
        assert rank.drained()
        rank.put_grad(0, 1, b"says nothing")
        with pytest.raises(ConnectionAbortedError):
            rank.sync(1, going_on)


def test_an_abort_that_came_before_is_seen() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        with pytest.raises(ConnectionAbortedError):
            rank.sync(1, lambda: True)
        rank.sync(1, going_on)


def test_puts_do_not_wait_for_an_agent_that_takes_nothing() -> None:
    large = b"x" * (32 * MB)
    with deaf_agent() as address, line(address) as rank:
        opened(rank)
        tickets = [rank.put_grad(0, step, large) for step in (1, 2, 3)]
        assert not rank.drained()
        waiting = threading.Thread(target=rank.wait_read, args=(tickets[-1],))
        waiting.start()
        rank.interrupt()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
        assert rank.drained()


def test_a_view_may_be_written_to_once_it_was_read() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank, units=1)
        rank.put_base(0, 0, [b"base"])
        buffer = bytearray(2 * MB)
        for step in range(4):
            buffer[:] = bytes([step]) * len(buffer)
            rank.wait_read(rank.put_grad(0, step, buffer))
        rank.sync(3, going_on)
        assert rank.drained()
        _, _, log = fetch(address, "t", 2, 4).units[0]
        assert [set(bytes(view)) for view in log.values() if view is not None] == [
            {step} for step in range(4)
        ]


def test_a_fence_does_not_wait_for_what_is_put_behind_it() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        rank.ask(0)
        behind = rank.put_grad(0, 1, b"grad")
        rank.synced(0, going_on)
        rank.wait_read(behind)
        rank.sync(1, going_on)


class Slow:
    """A sender that is about to give a ticket for a while."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.inside = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, *what: Any) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.001)
        self.inside -= 1
        return self._inner.put(*what)


def test_two_threads_put_in_turn() -> None:
    """Copies of a device are put by another thread than what is in host memory."""
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        (lane,) = rank._lanes
        slow = lane._sender = Slow(lane._sender)
        given: list[list[int]] = [[], []]

        def put(unit: int) -> None:
            rank.put_base(unit, 0, [b"base"])
            for step in range(50):
                ((_, ticket),) = rank.put_grad(unit, step, bytearray(b"%d of %d" % (step, unit)))
                given[unit].append(ticket)

        other = threading.Thread(target=put, args=(1,))
        other.start()
        put(0)
        other.join()
        rank.sync(49, going_on)
        assert slow.most == 1
        assert not lane._held
        assert len({*given[0], *given[1]}) == 100
        found = plain(fetch(address, "t", 2, 50))
        for unit in (0, 1):
            assert found[unit][2][49] == b"49 of %d" % unit


def test_what_the_user_raises_while_the_vault_is_waited_for_is_the_users() -> None:
    """A handler of a signal, say. The answer is waited for again."""
    with agent() as (address, _), line(address) as rank:
        opened(rank)
        (lane,) = rank._lanes
        frames = lane._frames
        assert frames is not None
        for raised in (KeyboardInterrupt(), ValueError("theirs")):
            rank.ask(0)
            with pytest.raises(type(raised)), pytest.MonkeyPatch.context() as patch:
                patch.setattr(frames, "receive", raising(raised))
                rank.synced(0, going_on)
            assert not rank.broken
            rank.synced(0, going_on)


def raising(error: BaseException) -> Any:
    def run(*_: Any) -> None:
        raise error

    return run


def test_a_refusal_is_told_though_more_was_sent_behind_it() -> None:
    with agent() as (address, _), line(address) as rank:
        opened(rank, reserve=MB)
        rank.put_grad(0, 0, bytes(2 * MB))
        rank.ask(0)
        wait_until(lambda: refused(rank))

        def nobody_takes_it() -> bool:
            rank.put_grad(0, 0, b"again")
            return bool(rank._lanes[0]._sender.failed)

        wait_until(nobody_takes_it)
        with pytest.raises(UsageError, match="reservation"):
            rank.sync(0, going_on)


def refused(rank: VaultLine) -> bool:
    """Its words have come."""
    connection = rank._lanes[0]._connection
    assert connection is not None
    return b"VaultRefused" in connection.recv(4096, socket.MSG_PEEK)


def test_a_line_that_is_not_open_says_so_at_the_fence() -> None:
    with agent() as (address, server), line(address) as rank:
        rank.wait_read(rank.put_grad(0, 1, b"grad"))
        with pytest.raises(ConnectionError, match="not open"):
            rank.sync(1, going_on)
        opened(rank)
        server.close()
        with pytest.raises(ConnectionError, match="rank 2 lost its vault at 127"):
            for _ in range(2):  # a sync that was under way may still have been answered
                rank.sync(1, going_on)
        with pytest.raises(OSError):
            opened(rank)


# ---------------------------------------------------------------- fuzz

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
whole = st.integers(-2, 40) | st.sampled_from([-(2**63), 2**31, 2**63 - 1])
digests = st.binary(min_size=16, max_size=16) | st.binary(max_size=20)
batches = st.builds(
    v.VaultPuts,
    kind=st.sampled_from(["base", "grad", "absent", "note"]),
    version=whole,
    units=st.lists(whole, max_size=3),
    sizes=st.lists(st.lists(whole, max_size=3), max_size=3),
    digests=st.lists(digests, max_size=5),
).map(frame)
others = st.one_of(
    st.builds(v.VaultSync, version=whole),
    st.builds(v.VaultFetch, token=st.just("t"), rank=whole, version=whole),
    st.just(asking(2)),
    st.just(BlobPut(token="t", rank=2, tick=0, data=b"x")),
).map(frame)
good = st.builds(putting, st.sampled_from(["grad", "note"]), st.integers(0, 9), st.binary())


@given(parts=st.lists(st.one_of(st.binary(max_size=60), batches, others, good), max_size=6))
@fuzz
def test_a_writer_that_says_anything_harms_nobody(parts: list[bytes]) -> None:
    with agent() as (address, server), line(address, rank=1) as neighbour:
        opened(neighbour, units=1)
        neighbour.put_base(0, 1, [b"base"])
        neighbour.sync(1, going_on)
        sock, _ = raw(address, asking(), *parts)
        with sock:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1 << 16):
                    pass
        wait_until(lambda: server.connections == 1)
        assert incoming(server) == 0
        held, reserved = server.vault.held()[2]
        shelf = server.vault._store._shelves[2]
        stored = [shelf.notes, *(part for u in shelf.units.values() for part in (u.bases, u.log))]
        pieces = [piece for part in stored for found in part.values() for piece in found]
        assert held == sum(len(piece.data) for piece in pieces) <= reserved
        assert all(xxhash.xxh3_128_digest(piece.data) == piece.digest for piece in pieces)
        neighbour.sync(2, going_on)
        assert plain(fetch(address, "t", 1, 1)) == {0: (1, [b"base"], {})}


@given(parts=st.lists(st.one_of(st.binary(max_size=60), batches), min_size=1, max_size=3))
@fuzz
def test_a_stranger_gets_no_word(parts: list[bytes]) -> None:
    with agent() as (address, server):
        sock, _ = raw(address, *parts)
        with sock, contextlib.suppress(ConnectionError):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""
        assert server.vault.held() == {}


# ---------------------------------------------------------------- the store


def stored(store: VaultStore, shelf: Shelf, kind: Any, version: int, unit: int, *data: int) -> None:
    pieces = tuple(StoredPiece(memoryview(one.to_bytes(8, "little")), b"digest") for one in data)
    put = v.VaultPut(kind=kind, version=version, unit=unit, sizes=[8] * len(data))
    store.admit(shelf, put)
    store.keep(shelf, put, pieces)
    store.done(shelf, put)


def rebuilt(store: VaultStore, version: int) -> list[int]:
    """What a successor makes of it. A state is a number here, and a gradient is added."""
    fetched, pieces = store.fetch(0, version)
    values = iter(int.from_bytes(piece.data, "little") for piece in pieces)
    states = []
    begun = {(unit.unit % v.SLICES, unit.version) for unit in fetched.units}
    assert len(begun) == len({unit.unit % v.SLICES for unit in fetched.units})
    for unit in fetched.units:
        state = next(values)
        for expected, (step, _, digest) in zip(range(unit.version, version), unit.log, strict=True):
            assert step == expected
            state += next(values) if digest else 0
        states.append(state)
    first = min(unit.version for unit in fetched.units)
    assert [note for note, _, _ in fetched.notes] == list(range(first, version))
    assert list(values) == fetched_notes(first, version)
    return states


def fetched_notes(first: int, version: int) -> list[int]:
    return [1000 + step for step in range(first, version)]


def test_a_successor_does_not_inherit_the_base_of_a_step_that_is_made_again() -> None:
    """A rank passes a fence alone, sends its next base and dies; others go back behind it."""
    store, slices = VaultStore(), [0, v.SLICES]
    ask = msgspec.structs.replace(asking(), rank=0, units=slices, reserve=2000, version=4)
    shelf = store.open(ask, 10_000)
    for number in slices:
        stored(store, shelf, "base", 4, number, 100)
        stored(store, shelf, "grad", 4, number, 1)
    stored(store, shelf, "note", 4, 0, 1004)
    store.drop_before(shelf, 3)
    for number in slices:
        stored(store, shelf, "base", 5, number, 101)
    shelf = store.open(msgspec.structs.replace(ask, generation=2), 10_000)
    for step, gradient in ((4, 10), (5, 0)):
        for number in slices:
            stored(store, shelf, "grad", step, number, gradient)
        stored(store, shelf, "note", step, 0, 1000 + step)
        if step == 4:
            stored(store, shelf, "base", 5, v.SLICES, 110)  # and of the other the line broke
        store.drop_before(shelf, step - 1)
    assert rebuilt(store, 6) == rebuilt(store, 5) == [110, 110]
    store.drop_before(shelf, 5)
    assert rebuilt(store, 6) == [110, 110] and shelf.held == 2 * 8 + 4 * 8 + 2 * 8


@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 1, v.SLICES], [0, v.SLICES, 2 * v.SLICES]])
@given(data=st.data())
@settings(deadline=None)
def test_at_every_fence_all_versions_that_may_be_asked_for_can_be_rebuilt(
    numbers: list[int], data: st.DataObject
) -> None:
    """A rank that stands at the fence of step s may be rebuilt as s - 1 (another rank has not
    passed the fence before), s (the step is retried) or s + 1 (somebody has passed this one)."""
    store, count = VaultStore(), 3
    ask = msgspec.structs.replace(asking(), rank=0, units=numbers, reserve=2000)
    shelf = store.open(ask, 10_000)
    states = {0: [10, 20, 30]}
    for step in range(data.draw(st.integers(1, 12))):
        renewed = data.draw(st.sets(st.integers(0, count - 1))) if step else set(range(count))
        for unit in sorted(renewed):
            stored(store, shelf, "base", step, numbers[unit], states[step][unit])
        for retry in range(data.draw(st.integers(1, 2))):
            if retry:
                generation = shelf.fence[0] + 1
                shelf = store.open(msgspec.structs.replace(ask, generation=generation), 10_000)
            grads = [data.draw(st.none() | st.integers(0, 9)) for _ in range(count)]
            for unit, grad in enumerate(grads):
                kind, given_data = ("absent", []) if grad is None else ("grad", [grad])
                stored(store, shelf, kind, step, numbers[unit], *given_data)
            stored(store, shelf, "note", step, 0, 1000 + step)
            store.drop_before(shelf, step - 1)
            states[step + 1] = [old + (new or 0) for old, new in zip(states[step], grads)]
            for version in (step - 1, step, step + 1):
                if version >= 0:
                    assert rebuilt(store, version) == states[version]
            assert store.reaches(shelf) == step + 1
    oldest = min(min(unit.bases) for unit in shelf.units.values())
    assert all(note >= oldest for note in shelf.notes)
    for unit in shelf.units.values():
        assert len([base for base in unit.bases if base < step]) <= 1
        assert min(unit.log) >= min(unit.bases)
    with pytest.raises(Refusal):
        store.fetch(0, step + 2)


def test_what_a_job_went_back_behind_is_forgotten() -> None:
    store = VaultStore()
    for rank, generation in ((0, 3), (1, 7)):
        ask = v.VaultOpen(
            token="t",
            rank=rank,
            generation=generation,
            serial=1,
            layout=b"l",
            units=[0],
            reserve=10,
        )
        store.open(ask, 100)
    for _ in range(2):
        store.forget_before(7)
        assert store.held() == {1: (0, 10)}
