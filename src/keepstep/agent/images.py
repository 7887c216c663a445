"""Images of this node's ranks: looked at, dumped and sent (keepstep.model.image).

Requests come over the blob port, each in the thread of its connection. What only the rank knows
about itself (which connections are its process groups', and not the script's) it is asked over
its control line, which it answers also while it holds.

A rank that was dumped stands still as a whole tree, by SIGSTOP. It goes on when its agent relays
Abort or Release to it, and not while CRIU is still at work in it. If the dump fails, it goes on at
once: nobody can have its image.

A rank that uses a GPU first moves what it has there into files, if it can
(worker/transparent/device.py); the driver then takes its own part into the process's memory
(gpu.py), which goes into files as well (areas.py). On the way back it is the other way round: what
was the driver's memory is fetched when the tree runs again, then the driver restores, and the rank
fetches its files when it hears that it may go on.
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
from typing import Any, Protocol

import msgspec

from keepstep.adapters.transport.blocking import relay
from keepstep.agent import areas, gpu, preflight
from keepstep.agent.capsule import image_folder, last_error
from keepstep.agent.process_sessions import kill_group
from keepstep.agent.process_tree import inner_pid, tree
from keepstep.errors import KeepstepError, TransientError, UsageError
from keepstep.model.commands import Inspect, Offload
from keepstep.model.image import (
    PARTS,
    PARTS_FOLDER,
    ImageBegun,
    ImageEnd,
    ImageFacts,
    ImageFile,
    ImageGet,
    ImagePages,
    ImagePart,
    ImageRefused,
    ImageReply,
    ImageRequest,
)
from keepstep.model.messages import Inspected, Offloaded
from keepstep.model.wire import frame
from keepstep.native import criu

INSPECT_S = 10.0
CLAIM_S = 60.0  # for the request that a line was opened for
GHOST_LIMIT = "4G"  # files that are open and have no name any more, such as shared memory

logger = logging.getLogger(__name__)


Parts = tuple[Future[Path | None], Future[Path | None]]


class ImageRank(Protocol):
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
        rank_of: Callable[[int], ImageRank | None],
        ask: Callable[[str, Inspect | Offload], None],
    ) -> None:
        self._token = token.encode()
        self._job = job
        self._rank_of = rank_of
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._dumping: set[str] = set()
        self._stopped: dict[str, tuple[int, int]] = {}  # worker -> generation, its process
        self._gpus: dict[str, gpu.Helper] = {}  # worker -> who calls the driver for it
        # rank -> where it has put what it had on the GPU, and what its driver took of that
        self._parts: dict[int, Parts] = {}
        self._over: dict[str, int] = {}  # worker -> generation up to which moves are over
        self._lines: dict[int, queue.Queue[socket.socket]] = {}  # rank -> where pages may go

    # ----------------------------------------------------------------- in the loop's thread

    def answered(self, said: Inspected | Offloaded) -> None:
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
            if worker in self._gpus:
                self._dumping.add(worker)  # until it has its GPU
        logger.info("%s goes on: its image is of no use any more", worker)
        wake(stopped[1])
        if worker in self._gpus:  # it may take its driver seconds
            args = (worker, stopped[1])
            threading.Thread(
                target=self._thaw, args=args, name="keepstep-thaw", daemon=True
            ).start()

    def ended(self, worker: str) -> None:
        """Its process is gone: nothing of its images stays behind."""
        with self._lock:
            self._stopped.pop(worker, None)
            self._over.pop(worker, None)
            helper = self._gpus.pop(worker, None)
        if helper is not None:
            helper.close()
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
        if isinstance(request, ImagePart):
            self._send_part(connection, request)
            return
        asked = self._parts.get(request.rank) if isinstance(request, ImageGet) else None
        parts = asked or (Future(), Future())  # not those that somebody asks for later
        try:
            worker, inspected = self._find(request.rank)
            if isinstance(request, ImageGet):
                self._send(connection, request, worker, inspected, parts)
                return
            reply: ImageReply = self._look(worker, inspected)
        except KeepstepError as error:
            reply = ImageRefused(error=str(error))
            for part in parts:  # nobody is kept waiting for what does not come
                if not part.done():
                    part.set_exception(error)
        connection.sendall(frame(reply))

    def _pass_pages(self, connection: socket.socket, rank: int) -> None:
        """Until the dump that needs this line is over, or none comes."""
        claimed = self._lines[rank] = queue.Queue(1)
        self._parts[rank] = (Future(), Future())
        connection.sendall(frame(ImageEnd(files=0)))
        with contextlib.suppress(queue.Empty), claimed.get(timeout=CLAIM_S) as local:
            relay(connection, local)

    def _send_part(self, connection: socket.socket, request: ImagePart) -> None:
        """When the rank has moved it out of the GPU; meanwhile the rank is dumped."""
        try:
            wanted = self._parts[request.rank][request.part >= PARTS]
            folder = wanted.result(request.seconds_max)
        except (KeyError, TimeoutError, KeepstepError) as error:
            connection.sendall(frame(ImageRefused(error=f"nothing came from the GPU: {error}")))
            return
        path = folder / f"part-{request.part}" if folder is not None else None
        if path is None or not path.exists():
            connection.sendall(frame(ImageEnd(files=0)))
            return
        with path.open("rb") as file:
            connection.sendall(frame(ImageFile(name=path.name, size=path.stat().st_size)))
            connection.sendfile(file)

    def _find(self, rank: int) -> tuple[ImageRank, Inspected]:
        worker, inspected = self._exchange(rank, lambda number: Inspect(number=number), INSPECT_S)
        assert isinstance(inspected, Inspected)
        return worker, inspected

    def _exchange(
        self, rank: int, command: Callable[[int], Inspect | Offload], seconds_max: float
    ) -> tuple[ImageRank, Inspected | Offloaded]:
        number, future = next(self._numbers), Future[Inspected | Offloaded]()

        async def ask() -> ImageRank | None:
            worker = self._rank_of(rank)
            if worker is not None:
                self._asked[number] = future
                self._ask(worker.name, command(number))
            return worker

        worker = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(INSPECT_S)
        if worker is None:
            raise UsageError(f"rank {rank} does not run on this node in a capsule of its own")
        try:
            return worker, future.result(seconds_max)
        except TimeoutError as error:
            self._asked.pop(number, None)
            raise TransientError(f"rank {rank} did not answer its agent") from error

    def _inner(self, worker: ImageRank) -> int:
        pid = inner_pid(worker.pid)
        if pid is None:
            raise TransientError(f"{worker.name} has ended")
        return pid

    def _look(self, worker: ImageRank, inspected: Inspected) -> ImageFacts:
        pid = self._inner(worker)
        found = preflight.scan(pid, inspected.control, bool(inspected.device))
        offenders = [*inspected.foreign, *found.offenders]
        host = preflight.host()
        if inspected.device:
            offenders += preflight.gpu_trouble(pid, inspected.device, host, inspected.gpu_bytes)
            if not offenders:
                self._helper(worker.name)  # its driver starts while training goes on
        return ImageFacts(
            host=host,
            offenders=offenders,
            files=found.files,
            paths=found.paths,
            image_bytes=found.image_bytes,
            gpu=inspected.gpu,
            gpu_bytes=inspected.gpu_bytes,
            offloads=inspected.offloads,
        )

    def _helper(self, worker: str) -> gpu.Helper:
        with self._lock:
            helper = self._gpus.get(worker)
            if helper is None or not helper.alive:
                helper = self._gpus[worker] = gpu.Helper()
        helper.facts()
        return helper

    def _offload(self, request: ImageGet, inspected: Inspected, parts: Parts) -> tuple[int, bool]:
        """Nanoseconds that it took, and whether the rank can move its driver's memory."""
        if inspected.device and not request.gpu:
            raise TransientError("it uses a GPU, and did not when it was looked at")
        folder, took_ns, areas = None, 0, False
        if inspected.device:
            worker, said = self._exchange(
                request.rank,
                lambda number: Offload(
                    number=number, generation=request.generation, move=request.parts
                ),
                request.seconds_max,
            )
            assert isinstance(said, Offloaded)
            took_ns, areas = said.took_ns, said.areas
            if said.error:
                logger.warning("%s: %s; its driver does it", worker.name, said.error)
            elif said.moved:
                folder = _parts_folder(self._inner(worker))
        parts[0].set_result(folder)
        return took_ns, areas

    def _freeze(
        self, request: ImageGet, worker: ImageRank, pid: int, areas_wanted: bool
    ) -> tuple[dict[str, int], bool]:
        """How long its GPU took, and whether what the driver has saved is in files."""
        frozen = self._helper(worker.name).freeze(pid, request.seconds_max)
        began, folder, stowed = time.monotonic_ns(), _parts_folder(pid), False
        if areas_wanted and frozen.areas:
            error = areas.stow(folder, frozen.areas, request.seconds_max, lambda: areas.runs(pid))
            stowed = not error
            if error:
                logger.warning("%s: %s; CRIU moves it", worker.name, error)
        took = {"gpu-stow": time.monotonic_ns() - began} if stowed else {}
        return {**frozen.took_ns, **took}, stowed

    def _thaw(self, worker: str, pid: int) -> None:
        """A process that does not get its GPU back would wait for it for ever, and all others for
        it."""
        try:
            if areas.stowed(folder := _parts_folder(pid)):
                areas.fetch(folder, gpu.THAW_S_MAX, lambda: areas.runs(pid))
            self._helper(worker).thaw(pid, gpu.THAW_S_MAX)
        except KeepstepError as error:
            logger.error("%s is lost: %s", worker, error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        finally:
            with self._lock:
                self._dumping.discard(worker)

    def _send(
        self,
        connection: socket.socket,
        request: ImageGet,
        worker: ImageRank,
        inspected: Inspected,
        parts: Parts,
    ) -> None:
        folder = image_folder(self._job, worker.name, "dump")
        try:
            offload_ns, areas_wanted = self._offload(request, inspected, parts)
            begun = self._dump(request, worker, inspected, folder, parts, areas_wanted)
            if inspected.device:
                gpu_ns = {**begun.gpu_ns, "gpu-offload": offload_ns}
                begun = msgspec.structs.replace(begun, gpu_ns=gpu_ns)
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
        self,
        request: ImageGet,
        worker: ImageRank,
        inspected: Inspected,
        folder: Path,
        parts: Parts,
        areas_wanted: bool,
    ) -> ImageBegun:
        pid = self._inner(worker)
        first, own = _numbers(pid)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        with self._lock:
            if worker.name in self._dumping or worker.name in self._stopped:
                raise TransientError(f"{worker.name} is being dumped already")
            if self._over.get(worker.name, -1) >= request.generation:
                raise TransientError(f"{worker.name} does not hold for this move any more")
            self._dumping.add(worker.name)
        stopped, gpu_ns, stowed = False, dict[str, int](), False
        try:
            if inspected.device:
                gpu_ns, stowed = self._freeze(request, worker, pid, areas_wanted)
            parts[1].set_result(_parts_folder(pid) if stowed else None)
            began = time.monotonic_ns()
            found = preflight.scan(pid, inspected.control)
            if offenders := [*inspected.foreign, *found.offenders]:
                raise UsageError(f"it cannot be dumped: {'; '.join(offenders)}")
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
                stopped = stopped and self._over.get(worker.name, -1) < request.generation
                thaw = inspected.device and not stopped
                if stopped:
                    self._stopped[worker.name] = (request.generation, pid)
                if not thaw:
                    self._dumping.discard(worker.name)
            if not stopped:
                wake(pid)
            if thaw:
                self._thaw(worker.name, pid)
        return ImageBegun(
            pid=own,
            control=inspected.control,
            page=inspected.page,
            log=str(worker.log.resolve()),
            folders=found.folders,
            names=found.names,
            dump_ns=time.monotonic_ns() - began,
            gpu_ns=gpu_ns,
            areas=stowed,
        )


def _parts_folder(pid: int) -> Path:
    return Path(f"/proc/{pid}/root{PARTS_FOLDER}")


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
    command += ["--tcp-close"]  # what a library forgot to close
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
    for one in tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)
