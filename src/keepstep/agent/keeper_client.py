"""The agent's half of a keeper: processes that are somebody else's children (see keeper.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.agent import keeper
from keepstep.agent.processes import Exited, Order, Process, end_own_session
from keepstep.errors import PermanentError, TransientError

ANSWER_S = 30.0
END_S = 6.0

logger = logging.getLogger(__name__)

_answers: msgspec.msgpack.Decoder[keeper.Answer] = msgspec.msgpack.Decoder(keeper.Answer)
_encoder = msgspec.msgpack.Encoder()


class KeptProcesses:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, folder: Path, on_lost: Callable[[], None]
    ) -> None:
        """`on_lost`: the keeper has ended, and every worker with it."""
        self.exited: Exited = lambda worker, code: None
        self._loop = loop
        self._on_lost = on_lost
        self._over = False
        try:
            self._sock = keeper.connect(folder)
        except OSError as error:
            raise PermanentError(f"no keeper answers in {folder}: {error}") from error
        self._sock.settimeout(ANSWER_S)
        peer = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self._session = int.from_bytes(peer[:4], "little")  # it leads its session
        self.adopted: list[tuple[keeper.KeptWorker, Process]] = []
        while (got := self._read()) and isinstance(got[0], keeper.KeptWorker):
            self.adopted.append((got[0], _process(got[0], got[1])))
        if not isinstance(got[0], keeper.KeptComplete):
            raise PermanentError(f"the keeper in {folder} has another agent, or does not speak")
        loop.add_reader(self._sock, self._readable)

    @property
    def session(self) -> int:
        return self._session

    def start(self, order: Order) -> Process:
        self._send(keeper.Start(order=order))
        while True:
            answer, fds = self._read()
            match answer:
                case keeper.KeptWorker(worker=order.worker):
                    return _process(answer, fds)
                case keeper.StartFailed(worker=order.worker):
                    raise TransientError(answer.error)
                case keeper.Ended():
                    # In its turn, behind what the caller is doing now.
                    self._loop.call_soon(self.exited, answer.worker, answer.code)
                case _:
                    raise PermanentError(f"the keeper answered with {type(answer).__name__}")

    def kill(self, worker: str, number: int) -> None:
        self._send(keeper.KeeperKill(worker=worker, number=number))

    def note(self, worker: str, rank: int) -> None:
        self._send(keeper.KeeperRank(worker=worker, rank=rank))

    def drop(self, worker: str) -> None:
        self._send(keeper.KeeperDrop(worker=worker))

    def linked(self, up: bool) -> None:
        self._send(keeper.Linked(up=up))

    def end(self) -> None:
        """Returns when the keeper has ended, and the workers before it."""
        if self._over:
            return
        self._over = True
        self._loop.remove_reader(self._sock)
        self._send(keeper.KeeperEnd())
        self._sock.settimeout(END_S)
        with contextlib.suppress(OSError):
            while self._sock.recv(keeper.MESSAGE_BYTES_MAX):
                pass
        end_own_session()

    def leave(self) -> None:
        """Without a word: the workers stay for the next agent."""
        self._loop.remove_reader(self._sock)
        self._sock.close()
        end_own_session()

    def _send(self, request: keeper.Request) -> None:
        try:
            self._sock.sendall(_encoder.encode(request))
        except OSError as error:
            # Its end is seen by the reader; what was asked of it does not matter any more.
            logger.warning("the keeper cannot be told: %s", error)

    def _read(self) -> tuple[keeper.Answer | None, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, keeper.MESSAGE_BYTES_MAX, 2)
        except OSError:
            return None, []
        for fd in fds:
            os.set_inheritable(fd, False)
        return (_answers.decode(data) if data else None), fds

    def _readable(self) -> None:
        answer, _ = self._read()
        if isinstance(answer, keeper.Ended):
            self.exited(answer.worker, answer.code)
        elif answer is None:
            self._loop.remove_reader(self._sock)
            self._on_lost()


def _process(kept: keeper.KeptWorker, fds: list[int]) -> Process:
    if len(fds) != 2:
        raise PermanentError(f"the keeper named {kept.worker} without its descriptors")
    pidfd = -1
    if kept.code is None:
        with contextlib.suppress(ProcessLookupError):  # its end will be told
            pidfd = os.pidfd_open(kept.pid)
    return Process(kept.pid, socket.socket(fileno=fds[0]), fds[1], pidfd)
