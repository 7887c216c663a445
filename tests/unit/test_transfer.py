from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from keepstep.errors import KeepstepError, PermanentError, UsageError
from keepstep.model.commands import Source
from keepstep.model.messages import Address
from keepstep.worker.state import statefile, transfer
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.pieces import Pieces
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.serving import StateServer
from keepstep.worker.state.transfer import pull

torch.set_num_threads(1)  # as in the processes that serve: sums depend on it

TOKEN = "secret"
TICK = 41
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo"])


def make(seed: int, width: int = 64) -> StateSet:
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(12)), nn.BatchNorm1d(width))
    net.register_buffer("holey", torch.randn(8, 8)[:, ::2])
    net.register_buffer("empty", torch.zeros(0, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=seed / 100)
    net(torch.randn(4, width)).sum().backward()
    optimizer.step()
    box: dict[str, Any] = {"ema": torch.randn(5), "count": seed}
    objects = {"box": Registered("object", lambda: dict(box), box.update)}
    return StateSet({"net": net}, {"adam": optimizer}, objects)


def source(server: StateServer, rank: int = 0) -> Source:
    return Source(rank=rank, pid=os.getpid(), node="n", serve=server.address)


@pytest.fixture
def server() -> Iterator[StateServer]:
    made = StateServer("127.0.0.1", TOKEN, make(1).export(), TICK)
    yield made
    made.close()


@pytest.fixture(params=["memory", "socket", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a device all is tested here but the device: the same operations on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(transfer, "_lands_on_device", lambda tensor: True)
    if request.param == "socket":
        monkeypatch.setattr(transfer, "_memory_is_readable", lambda opened: False)
    return str(request.param)


def test_pull_makes_an_equal_state(server: StateServer, path: str) -> None:
    target = make(2)
    result = pull([source(server)], TICK, TOKEN, target)
    assert target.digest() == make(1).digest()
    assert sorted(result.used) == [0]
    assert result.bytes_copied == make(1).export().bytes_total


def test_several_sources_share_the_work(server: StateServer, path: str) -> None:
    second = StateServer("127.0.0.1", TOKEN, make(1).export(), TICK)
    target = make(2)
    result = pull([source(server, 3), source(second, 5)], TICK, TOKEN, target, batch_bytes=4 << 10)
    second.close()
    assert target.digest() == make(1).digest()
    assert set(result.used) <= {3, 5} and result.used
    assert result.bytes_copied == make(1).export().bytes_total


@pytest.mark.parametrize(("tick", "token", "text"), [(40, TOKEN, "tick 41"), (41, "x", "token")])
def test_wrong_tick_or_token_is_refused(
    server: StateServer, tick: int, token: str, text: str
) -> None:
    target = make(2)
    before = target.digest()
    with pytest.raises(transfer.SourceRefused, match=text) as caught:
        pull([source(server, 6)], tick, token, target)
    assert caught.value.rank == 6 and target.digest() == before


def test_corruption_is_found_by_the_digests(
    server: StateServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"memory": "from_memory", "socket": "from_socket", "device": "to_device"}[path]
    original = getattr(transfer._Link, f"_{name}")
    fired = []

    def flip(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        fired.append(1)
        return result[::-1] if isinstance(result, bytes) else [d[::-1] for d in result]

    monkeypatch.setattr(transfer._Link, f"_{name}", flip)
    with pytest.raises(transfer.DigestMismatch) as caught:
        pull([source(server, 2)], TICK, TOKEN, make(2))
    assert fired and caught.value.rank == 2


def test_a_source_whose_memory_changes_is_found(
    server: StateServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        with torch.no_grad():
            server._export.tensors["model/net/0.weight"][3, 3] += 1

    if path == "device":
        digest = Pieces.digest

        def digest_then_change(self: Pieces, block: torch.Tensor) -> bytes:
            found = digest(self, block)
            change()
            return found

        monkeypatch.setattr(Pieces, "digest", digest_then_change)
    else:
        pull([source(server)], TICK, TOKEN, make(2))  # digests are known now
        change()
    with pytest.raises(transfer.DigestMismatch, match=r"0\.weight"):
        pull([source(server)], TICK, TOKEN, make(2), batch_bytes=1)


def test_another_model_is_refused_by_name(server: StateServer) -> None:
    with pytest.raises(UsageError, match=r"model/net/0\.weight"):
        pull([source(server)], TICK, TOKEN, make(2, width=32))


def test_unreachable_sources_are_skipped_and_all_unreachable_is_lost(server: StateServer) -> None:
    closed = StateServer("127.0.0.1", TOKEN, make(1).export(), TICK)
    gone = source(closed, 7)
    closed.close()
    target = make(2)
    assert pull([gone, source(server, 1)], TICK, TOKEN, target).used.keys() == {1}
    assert target.digest() == make(1).digest()
    with pytest.raises(transfer.SourceLost) as caught:
        pull([gone], TICK, TOKEN, make(2))
    assert caught.value.rank == 7


def test_garbage_from_a_client_does_not_hurt_the_server(server: StateServer) -> None:
    with socket.create_connection((server.address.host, server.address.port)) as sock:
        sock.sendall(b"\xff" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert pull([source(server)], TICK, TOKEN, make(2)).bytes_copied


def serve(pipe: Connection, seed: int) -> None:
    torch.set_num_threads(1)
    server = StateServer("127.0.0.1", TOKEN, make(seed).export(), TICK)
    pipe.send(server.address)
    time.sleep(60)


class Process:
    def __init__(self, rank: int, seed: int = 1) -> None:
        pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, seed), daemon=True)
        self.process.start()
        assert pipe.poll(30)
        address: Address = pipe.recv()
        assert self.process.pid is not None
        self.source = Source(rank=rank, pid=self.process.pid, node="n", serve=address)

    def kill(self) -> None:
        if self.process.is_alive():
            os.kill(self.source.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def pair() -> Iterator[list[Process]]:
    made = [Process(0), Process(1)]
    yield made
    for process in made:
        process.kill()


def kill_after_first_batch(process: Process, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    original = transfer._Link.copy
    fired: list[int] = []

    def copy(self: Any, names: list[str], landing: Any) -> int:
        if self.rank == process.source.rank and names and not names[0].startswith("object/"):
            copied = original(self, names[:1], landing)
            if not fired:
                fired.append(1)
                process.kill()
            return copied + original(self, names[1:], landing)
        while names and not names[0].startswith("object/") and not fired:
            time.sleep(0.001)  # the others must leave some work to the victim
        return original(self, names, landing)

    monkeypatch.setattr(transfer._Link, "copy", copy)
    return fired


def test_source_killed_in_mid_copy_is_replaced_by_another(
    pair: list[Process], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = kill_after_first_batch(pair[0], monkeypatch)
    target = make(2)
    sources = [process.source for process in pair]
    result = pull(sources, TICK, TOKEN, target, batch_bytes=64 << 10)
    assert fired and 1 in result.used
    assert target.digest() == make(1).digest()


def test_last_source_killed_in_mid_copy_is_source_lost(
    pair: list[Process], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = kill_after_first_batch(pair[0], monkeypatch)
    begin = time.monotonic()
    with pytest.raises(transfer.SourceLost) as caught:
        pull([pair[0].source], TICK, TOKEN, make(2), batch_bytes=64 << 10)
    assert fired and caught.value.rank == 0 and time.monotonic() - begin < 5


@pytest.mark.parametrize("silent", [0, 1])
def test_a_source_that_does_not_answer_is_waited_for_once(
    pair: list[Process], monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """A newcomer may copy twice in one attempt, and all other ranks hold meanwhile."""
    asked: list[int] = []
    connect = transfer._Link.__init__

    def connects(self: Any, source: Source, *more: Any) -> None:
        asked.append(source.rank)
        connect(self, source, *more)

    monkeypatch.setattr(transfer._Link, "__init__", connects)
    os.kill(pair[silent].source.pid, signal.SIGSTOP)
    sources, lost = [process.source for process in pair], set[int]()
    for _ in range(2):
        target = make(2)
        pull(sources, TICK, TOKEN, target, lost=lost, timeout_s=1.0)
        assert target.digest() == make(1).digest()
    assert lost == {silent} and asked.count(silent) == 1


def test_a_lost_source_is_asked_again_for_what_no_other_has(server: StateServer) -> None:
    here = source(server, 0)
    part = msgspec.structs.replace(here, rank=1, classes=["something else"])
    lost = {0}
    target = make(2)
    assert pull([here, part], TICK, TOKEN, target, lost=lost).used.keys() == {0}
    assert target.digest() == make(1).digest() and lost == set()


def test_source_with_another_set_of_tensors_is_refused(server: StateServer) -> None:
    other = make(1)
    other.models["net"].register_buffer("more", torch.ones(1))
    second = StateServer("127.0.0.1", TOKEN, other.export(), TICK)
    with pytest.raises(transfer.SourceRefused) as caught:
        pull([source(server, 0), source(second, 1)], TICK, TOKEN, make(2))
    second.close()
    assert caught.value.rank == 1


def test_file_round_trip(tmp_path: Path) -> None:
    target = make(2)
    written = statefile.write_file(tmp_path / "new" / "state", make(1).export())
    assert written == (tmp_path / "new" / "state").stat().st_size
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["state"]
    read = statefile.read_files([tmp_path / "new" / "state"], target)
    assert read == (make(1).export().bytes_total, frozenset())
    assert target.digest() == make(1).digest()


@pytest.mark.parametrize("damage", ["cut", "flip", "magic", "header"])
def test_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "state"
    statefile.write_file(file, make(1).export())
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-100:]
    else:
        data[{"flip": len(data) - 50_000, "magic": 0, "header": 10}[damage]] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(KeepstepError) as caught:
        statefile.read_files([file], make(2))
    assert isinstance(caught.value, (UsageError, PermanentError))


def test_plain_tensors_that_differ_between_ranks_are_not_taken_for_replicas(
    server: StateServer, path: str
) -> None:
    other = StateServer("127.0.0.1", TOKEN, make(3).export(), TICK)
    with pytest.raises((transfer.NotReplicas, transfer.SourceRefused)) as caught:
        pull([source(server, 0), source(other, 1)], TICK, TOKEN, make(2), batch_bytes=1 << 30)
    other.close()
    assert "differs between ranks" in str(caught.value)
