"""Images of this node's ranks: looked at, dumped and sent (keepstep.model.image).

Requests come over the blob port, each in the thread of its connection. What only the rank knows
about itself (which connections are its process groups', and not the script's) it is asked over
its control line, which it answers also while it holds.

A rank that was dumped stands still as a whole tree, by SIGSTOP. It goes on when its agent relays
Abort or Release to it, and not while CRIU is still at work in it. If the dump fails, it goes on at
once: nobody can have its image.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from keepstep.adapters.transport.blocking import relay
from keepstep.agent import preflight
from keepstep.agent.nest import image_folder, last_error
from keepstep.agent.session import kill_group
from keepstep.errors import KeepstepError, TransientError, UsageError
from keepstep.model.image import (
    ImageBegun,
    ImageEnd,
    ImageFacts,
    ImageFile,
    ImageGet,
    ImagePages,
    ImageRefused,
    ImageReply,
    ImageRequest,
)
from keepstep.model.messages import Inspect, Inspected
from keepstep.model.wire import frame
from keepstep.native import criu

INSPECT_S = 10.0
CLAIM_S = 60.0  # for the request that a line was opened for
GHOST_LIMIT = "4G"  # files that are open and have no name any more, such as shared memory

logger = logging.getLogger(__name__)


class Rank(Protocol):
    """What is needed of a worker."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def log(self) -> Path: ...


class Images:
    """`rank_of` gives the worker that has a rank, `ask` sends it a command; both are called in the
    thread of the event loop."""

    def __init__(
        self,
        token: str,
        job: str,
        rank_of: Callable[[int], Rank | None],
        ask: Callable[[str, Inspect], None],
    ) -> None:
        self._token = token.encode()
        self._job = job
        self._rank_of = rank_of
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Inspected]] = {}
        self._lock = threading.Lock()
        self._dumping: set[str] = set()
        self._stopped: dict[str, tuple[int, int]] = {}  # worker -> generation, its process
        self._over: dict[str, int] = {}  # worker -> generation up to which moves are over
        self._lines: dict[int, queue.Queue[socket.socket]] = {}  # rank -> where pages may go

    # ----------------------------------------------------------------- in the loop's thread

    def inspected(self, said: Inspected) -> None:
        future = self._asked.pop(said.number, None)
        if future is not None and not future.done():
            future.set_result(said)

    def go_on(self, worker: str, generation: int) -> None:
        """It was told that what it held for, up to this generation, is over. While CRIU is at work
        in it, whoever started that sees to it; and a dump that comes later is refused."""
        with self._lock:
            self._over[worker] = max(generation, self._over.get(worker, -1))
            stopped = self._stopped.get(worker)
            if stopped is None or stopped[0] > generation:
                return
            del self._stopped[worker]
        logger.info("%s goes on: its image is of no use any more", worker)
        wake(stopped[1])

    def ended(self, worker: str) -> None:
        """Its process is gone: nothing of its images stays behind."""
        with self._lock:
            self._stopped.pop(worker, None)
            self._over.pop(worker, None)
        for what in ("dump", "restore"):
            shutil.rmtree(image_folder(self._job, worker, what), ignore_errors=True)

    # ----------------------------------------------------------------- in a connection's thread

    def serve(self, connection: socket.socket, request: ImageRequest) -> None:
        if not hmac.compare_digest(request.token.encode(), self._token):
            connection.sendall(frame(ImageRefused(error="wrong token")))
            return
        if isinstance(request, ImagePages):
            self._pass_pages(connection, request.rank)
            return
        try:
            worker, inspected = self._find(request.rank)
            if isinstance(request, ImageGet):
                self._send(connection, request, worker, inspected)
                return
            reply: ImageReply = self._look(worker, inspected)
        except KeepstepError as error:
            reply = ImageRefused(error=str(error))
        connection.sendall(frame(reply))

    def _pass_pages(self, connection: socket.socket, rank: int) -> None:
        """Until the dump that needs this line is over, or none comes."""
        claimed = self._lines[rank] = queue.Queue(1)
        connection.sendall(frame(ImageEnd(files=0)))
        with contextlib.suppress(queue.Empty), claimed.get(timeout=CLAIM_S) as local:
            relay(connection, local)

    def _find(self, rank: int) -> tuple[Rank, Inspected]:
        number, future = next(self._numbers), Future[Inspected]()

        async def ask() -> Rank | None:
            worker = self._rank_of(rank)
            if worker is not None:
                self._asked[number] = future
                self._ask(worker.name, Inspect(number=number))
            return worker

        worker = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(INSPECT_S)
        if worker is None:
            raise UsageError(f"rank {rank} does not run on this node in a nest of its own")
        try:
            return worker, future.result(INSPECT_S)
        except TimeoutError as error:
            self._asked.pop(number, None)
            raise TransientError(f"rank {rank} did not answer its agent") from error

    def _inner(self, worker: Rank) -> int:
        pid = preflight.inner_pid(worker.pid)
        if pid is None:
            raise TransientError(f"{worker.name} has ended")
        return pid

    def _look(self, worker: Rank, inspected: Inspected) -> ImageFacts:
        found = preflight.scan(self._inner(worker), inspected.control)
        return ImageFacts(
            host=preflight.host(),
            offenders=[*inspected.foreign, *found.offenders],
            files=found.files,
            paths=found.paths,
            image_bytes=found.image_bytes,
        )

    def _send(
        self, connection: socket.socket, request: ImageGet, worker: Rank, inspected: Inspected
    ) -> None:
        folder = image_folder(self._job, worker.name, "dump")
        try:
            begun = self._dump(request, worker, inspected, folder)
            connection.sendall(frame(begun))
            names = sorted(path for path in folder.iterdir() if path.suffix != ".log")
            for path in names:
                size = path.stat().st_size
                connection.sendall(frame(ImageFile(name=path.name, size=size)))
                with path.open("rb") as file:
                    connection.sendfile(file)
                path.unlink()  # its memory is needed elsewhere
            connection.sendall(frame(ImageEnd(files=len(names))))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _dump(
        self, request: ImageGet, worker: Rank, inspected: Inspected, folder: Path
    ) -> ImageBegun:
        began = time.monotonic_ns()
        pid = self._inner(worker)
        first, own = _numbers(pid)
        found = preflight.scan(pid, inspected.control)
        offenders = [*inspected.foreign, *found.offenders]
        if offenders:
            raise UsageError(f"it cannot be dumped: {'; '.join(offenders)}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        with self._lock:
            if worker.name in self._dumping or worker.name in self._stopped:
                raise TransientError(f"{worker.name} is being dumped already")
            if self._over.get(worker.name, -1) >= request.generation:
                raise TransientError(f"{worker.name} does not hold for this move any more")
            self._dumping.add(worker.name)
        stopped = False
        try:
            line = self._lines.pop(request.rank, None)
            if line is None:
                raise UsageError("there is no line for its pages")
            ours, theirs = socket.socketpair()
            line.put(ours)
            with theirs:
                _run_criu(first, own, inspected.control, theirs, folder, request.seconds_max)
            stopped = True
        finally:
            with self._lock:
                self._dumping.discard(worker.name)
                stopped = stopped and self._over.get(worker.name, -1) < request.generation
                if stopped:
                    self._stopped[worker.name] = (request.generation, pid)
            if not stopped:
                wake(pid)
        return ImageBegun(
            pid=own,
            control=inspected.control,
            page=inspected.page,
            log=str(worker.log.resolve()),
            folders=found.folders,
            dump_ns=time.monotonic_ns() - began,
        )


def _numbers(pid: int) -> tuple[int, int]:
    """The first process of its namespace, and its own number there."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["PPid"]), int(fields["NSpid"].split()[-1])


def _run_criu(
    first: int, pid: int, control: int, pages: socket.socket, folder: Path, seconds_max: float
) -> None:
    command = ["nsenter", "-t", str(first), "--pid", "--mount", *criu.find()[0], "dump"]
    command += ["-t", str(pid), "-D", str(folder), "-o", "dump.log", "--leave-stopped"]
    command += ["--external", f"unix[{control}]", "--file-locks", "--manage-cgroups=ignore"]
    command += ["--ghost-limit", GHOST_LIMIT, "--timeout", str(max(1, int(seconds_max)))]
    command += ["--page-server", "--ps-socket", str(pages.fileno())]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command,
        stdin=null,
        stdout=null,
        stderr=null,
        pass_fds=[pages.fileno()],
        process_group=0,  # nsenter is CRIU's parent and not CRIU
        umask=0o077,
    )
    try:
        code = process.wait(seconds_max)
    except subprocess.TimeoutExpired:
        kill_group(process.pid, signal.SIGKILL)
        process.wait()
        raise TransientError(f"CRIU did not finish the dump in {seconds_max:.0f} s") from None
    if code != 0:
        said = last_error(folder / "dump.log") or "it did not say why"
        raise TransientError(f"CRIU could not dump it (code {code}): {said}")


def wake(pid: int) -> None:
    """The whole tree: CRIU has stopped every process of it."""
    for one in preflight.tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)
