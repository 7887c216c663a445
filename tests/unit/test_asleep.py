"""Operations that gloo forgets when a connection is lost in the middle of a message."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from keepstep.worker import asleep, gloo, groups

MESSAGE = torch.ones(16 << 20)
LIMIT = timedelta(minutes=30)


def connected(rank: int, port: int) -> tuple[Any, gloo.Mesh]:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, LIMIT)
    mesh = gloo.Mesh()
    return gloo.connect(store, rank, 2, LIMIT, mesh), mesh


def until_asleep() -> None:
    working = asleep.operations()
    while working.slept_s() < 0.2:
        time.sleep(asleep.LOOK_S)


def stops(port: int) -> None:
    """Has asked for the message, and takes only the beginning of it."""
    backend, _ = connected(1, port)
    work = backend.broadcast([MESSAGE], dist.BroadcastOptions())
    until_asleep()
    os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()


def cut_while_sending(port: int, pipe: Connection, then: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    backend, mesh = connected(0, port)
    pipe.send(os.getpid())
    pipe.recv()  # the other one stands still
    work = backend.broadcast([MESSAGE], dist.BroadcastOptions())
    until_asleep()
    gloo.shutdown([mesh])
    backends, works = [backend], [work]
    del backend, work
    then(pipe, backends, mesh, works)


def destroys(pipe: Connection, backends: list[Any], mesh: gloo.Mesh, works: list[Any]) -> None:
    works.clear()
    began = time.monotonic()
    groups._destroy(backends, [mesh])
    pipe.send((time.monotonic() - began, threading.active_count()))
    pipe.recv()


def waits(pipe: Connection, backends: list[Any], mesh: gloo.Mesh, works: list[Any]) -> None:
    asleep.STUCK_S = 2.0
    watch = asleep.Watch()

    def look() -> None:
        while True:
            watch.look(1)
            time.sleep(0.3)

    os.dup2(pipe.fileno(), 2)  # what is said at the end
    threading.Thread(target=look, daemon=True).start()
    inside = os.path.join(os.path.dirname(torch.__file__), "distributed", "some.py")
    exec(compile("work.wait()", inside, "exec"), {"work": works[0]})  # as dist.broadcast does it


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    context = multiprocessing.get_context("spawn")
    made: list[Any] = []

    def begin(then: Callable[..., Any]) -> tuple[Any, Connection]:
        with gloo.listen("127.0.0.1") as free:
            port = free.getsockname()[1]
        here, there = context.Pipe()
        made.append(context.Process(target=stops, args=(port,)))
        made.append(context.Process(target=cut_while_sending, args=(port, there, then)))
        for process in made:
            process.start()
        there.close()
        here.recv()
        stopped = psutil.Process(made[0].pid)
        end = time.monotonic() + 60
        while stopped.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end
            time.sleep(0.01)
        here.send("go on")
        return made[1], here

    yield begin
    for process in made:
        process.kill()
        process.join()


def test_it_is_left_behind_when_its_group_is_dropped(pair: Any) -> None:
    _, pipe = pair(destroys)
    assert pipe.poll(60), "the destructor is waited for"
    taken_s, threads = pipe.recv()
    assert taken_s >= groups.FORGOTTEN_S and threads >= 2


def test_who_waits_for_it_is_replaced(pair: Any) -> None:
    process, pipe = pair(waits)
    process.join(60)
    assert process.exitcode == 1
    assert b"operation of gloo that never ends" in os.read(pipe.fileno(), 1000)
