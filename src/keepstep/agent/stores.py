"""Store host processes: one c10d TCPStore per open generation.

A store lives in a process of its own, not in the agent (which never loads torch) and never in a
rank. The program prints its port as the first line and ends when its stdin does, so that no store
outlives its agent, however the agent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from keepstep.errors import TransientError
from keepstep.model.agent_messages import StoreFailed, StoreOpened
from keepstep.model.messages import Address

OPEN_TIMEOUT_S = 30.0
PORT_LINE_BYTES_MAX = 16

T = TypeVar("T")

logger = logging.getLogger(__name__)


def native_store_command() -> Sequence[str]:
    from keepstep.native import store_host_path

    return [str(store_host_path())]


@dataclass
class _Store:
    task: asyncio.Task[None]
    process: subprocess.Popen[bytes] | None = None
    address: Address | None = None


class Stores:
    def __init__(
        self,
        host: str,
        log: Path,
        *,
        on_event: Callable[[StoreOpened | StoreFailed], None],
        command: Callable[[], Sequence[str]] = native_store_command,
    ) -> None:
        """`command` may take its time (it may have to build the program): it runs in a thread."""
        self._host = host
        self._log = log
        self._on_event = on_event
        self._command = command
        self._stores: dict[int, _Store] = {}

    def open(self, generation: int) -> None:
        """Answered by one event; asking again for an open store answers again. A store that ends
        without being closed is told as failed, and may be opened anew."""
        store = self._stores.get(generation)
        if store is None:
            task = asyncio.create_task(self._open(generation))
            self._stores[generation] = _Store(task)
        elif store.address is not None:
            self._on_event(StoreOpened(generation=generation, store=store.address))

    def generations(self) -> list[int]:
        return list(self._stores)

    def close(self, generation: int) -> None:
        store = self._stores.pop(generation, None)
        if store is None:
            return
        store.task.cancel()
        if store.process is not None:
            _end(store.process)
            logger.info("closed the store of generation %d", generation)

    def close_all(self) -> None:
        for generation in list(self._stores):
            self.close(generation)

    async def _open(self, generation: int) -> None:
        try:
            command = await _in_daemon_thread(self._command)
            store = self._stores[generation]
            # Started here, on the loop, so that close() can not miss it.
            store.process = self._spawn(command)
            port = await _read_port(store.process, OPEN_TIMEOUT_S)
        except Exception as error:  # building the program may fail in many ways
            what = str(error) or type(error).__name__
            logger.exception("no store for generation %d", generation)
            self._discard(generation)
            self._on_event(StoreFailed(generation=generation, error=what))
            return
        store.address = Address(self._host, port)
        logger.info("store of generation %d listens on port %d", generation, port)
        self._on_event(StoreOpened(generation=generation, store=store.address))
        await _ended(store.process)  # by itself: close() cancels this task first
        self._discard(generation)
        why = f"the store program ended with {store.process.returncode}"
        logger.error("generation %d: %s", generation, why)
        self._on_event(StoreFailed(generation=generation, error=why))

    def _discard(self, generation: int) -> None:
        store = self._stores.pop(generation, None)
        if store is not None and store.process is not None:
            _end(store.process)

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as errors:
            return subprocess.Popen(
                [*command, self._host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Unlike asyncio's own threads, one of these does not keep the agent from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def resolve(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve, value, failure)

    threading.Thread(target=run, name="store-program", daemon=True).start()
    return await result


async def _read_port(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    try:
        line = await asyncio.wait_for(_read_line(process), timeout_s)
    except TimeoutError as error:
        raise TransientError(f"the store program named no port in {timeout_s:.0f} s") from error
    if not line.strip().isdigit() or not 0 < int(line) < 65536:
        raise TransientError(f"the store program said {line!r} instead of its port")
    return int(line)


async def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    # A number of its own: whoever ends the process closes the pipe at once, and the next descriptor
    # that somebody opens and watches would get the number that is watched here.
    fd = os.dup(process.stdout.fileno())
    os.set_blocking(fd, False)
    readable = asyncio.Event()
    line = b""
    loop.add_reader(fd, readable.set)
    try:
        while not line.endswith(b"\n"):
            await readable.wait()
            readable.clear()
            try:
                data = os.read(fd, 1)
            except BlockingIOError:
                continue
            line += data
            if not data or len(line) > PORT_LINE_BYTES_MAX:
                break
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return line


async def _ended(process: subprocess.Popen[bytes]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
