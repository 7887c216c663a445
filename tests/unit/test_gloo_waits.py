"""Operations that gloo forgets when a connection is lost in the middle of a message."""

from __future__ import annotations

import array
import fcntl
import multiprocessing
import os
import signal
import termios
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from keepstep.worker.device import extension
from keepstep.worker.groups import gloo, groups

LIMIT = timedelta(minutes=30)
LONG = 64 << 20  # numbers: far more than all buffers of a connection hold
DEADLINE_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def connected(rank: int, port: int) -> tuple[Any, gloo.Mesh]:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, LIMIT)
    mesh = gloo.Mesh()
    return gloo.connect(store, rank, 2, LIMIT, mesh), mesh


def broadcast(backend: Any, message: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return backend.broadcast([message], options)


def stand_still(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the peer runs on")


def unsent(mesh: gloo.Mesh) -> int:
    total = 0
    for sock in gloo._connections([mesh]):
        count = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
        total += count[0]
    return total


def peer(rank: int, port: int) -> None:
    """Sends or takes the message, until it is made to stand still."""
    backend, _ = connected(rank, port)
    broadcast(backend, torch.ones(LONG)).wait()


def half_sent(port: int, pid: int) -> tuple[Any, Any, gloo.Mesh]:
    backend, mesh = connected(0, port)
    work = broadcast(backend, torch.ones(LONG))
    until(lambda: unsent(mesh) > 0, "nothing is sent")
    stand_still(pid)
    return backend, work, mesh


def half_received(port: int, pid: int) -> tuple[Any, Any, gloo.Mesh]:
    backend, mesh = connected(1, port)
    message = torch.zeros(LONG)
    work = broadcast(backend, message)
    until(lambda: float(message[0]) == 1.0, "nothing has come")
    stand_still(pid)
    return backend, work, mesh


def woken(backends: list[Any], work: Any) -> str:
    assert extension.load().end_waits() == 1
    with pytest.raises(RuntimeError, match="Connection closed by Keepstep"):
        work.wait()
    return "woken"


def dropped(backends: list[Any], work: Any) -> str:
    """As an aborted group is: the destructor waits for the thread of the operation."""
    groups._ext = extension.load()
    groups._destroy(backends, end=True)
    assert work.is_completed() and not backends
    return "dropped"


def cut(
    begin: Callable[..., tuple[Any, Any, gloo.Mesh]],
    then: Callable[..., str],
    port: int,
    pipe: Connection,
) -> None:
    assert extension.load().note_waits()
    backend, work, mesh = begin(port, pipe.recv())
    gloo.shutdown([mesh])
    until(lambda: not gloo.connected([mesh]), "gloo has not closed its connections")
    assert not work.is_completed(), "gloo has ended the operation by itself"
    backends = [backend]
    del backend
    pipe.send(then(backends, work))


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    context = multiprocessing.get_context("spawn")
    made: list[Any] = []

    def run(begin: Callable[..., Any], then: Callable[..., str]) -> str:
        with gloo.listen("127.0.0.1") as free:
            port = free.getsockname()[1]
        here, there = context.Pipe()
        rank = 1 if begin is half_sent else 0
        made.append(context.Process(target=peer, args=(rank, port)))
        made.append(context.Process(target=cut, args=(begin, then, port, there)))
        for process in made:
            process.start()
        there.close()
        here.send(made[0].pid)
        assert here.poll(DEADLINE_S), "whoever waits is not woken"
        return str(here.recv())

    yield run
    for process in made:
        process.kill()
        process.join()


@pytest.mark.parametrize("begin", [half_sent, half_received])
@pytest.mark.parametrize("then", [woken, dropped])
def test_whoever_waits_is_woken(
    run: Callable[..., str], begin: Callable[..., Any], then: Callable[..., str]
) -> None:
    assert run(begin, then) == then.__name__
