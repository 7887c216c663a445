"""`python -m keepstep.agent.capsule COMMAND`: a rank in namespaces of its own, or an empty capsule.

    agent ── capsule ── first process of a PID and mount namespace ── the rank, in its own session

A process that shall be moved needs numbers that are free wherever it goes: each capsule counts its
own, and the rank begins far above what CRIU needs for itself. Whatever a rank leaves behind dies
with the first process, and that with the capsule, which the agent kills like any other worker.

Without a rank the capsule is a spare: it waits to be assigned, looks whether the process could live
here, fetches the image from the agent that has it, wakes it, and hands its own line to the agent
over to it (the restored process finds the socket in the place of its old one). The image lies in
memory (tmpfs), for this user only, and is gone when the process lives or the capsule ends.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import msgspec

from keepstep.adapters.transport.blocking import PIECE_BYTES, Frames, relay, shut
from keepstep.adapters.transport.tls import client_context
from keepstep.agent import areas, gpu, preflight
from keepstep.agent.kernel_namespaces import (
    PR_SET_PDEATHSIG,
    bind,
    ended,
    libc,
    nested,
    own_folder,
    wait_for,
)
from keepstep.errors import KeepstepError, PermanentError, RemoteProtocolError
from keepstep.model import commands, page, wire
from keepstep.model import image as i
from keepstep.model import messages as m
from keepstep.native import criu

FIRST_PID = 1000  # CRIU and its helpers stay below
CONNECT_S = 10.0
FETCH_SILENCE_S = 120.0  # while the other side dumps
DUMP_S_MIN, DUMP_S_MAX = 10.0, 60.0
DUMP_BYTES_PER_S = 250e6  # at least, beyond that

_decoder: msgspec.msgpack.Decoder[commands.WorkerCommand] = msgspec.msgpack.Decoder(
    commands.WorkerCommand
)
_replies: msgspec.msgpack.Decoder[i.ImageReply] = msgspec.msgpack.Decoder(i.ImageReply)


def image_folder(job: str, worker: str, what: str) -> Path:
    return criu.images_folder() / f"keepstep-{job}-{worker}-{what}"


def remove_images(job: str, node: str) -> None:
    """What an agent left behind that did not end by itself."""
    for folder in criu.images_folder().glob(f"keepstep-{glob.escape(job)}-{node}.*"):
        shutil.rmtree(folder, ignore_errors=True)


def run_rank(command: list[str], descriptors: list[int], environ: Mapping[str, str]) -> NoReturn:
    env = {**environ, "KEEPSTEP_SOCKETS": i.CAPSULE}
    library = env.get("KEEPSTEP_SEGMENTS", "")
    if library and env.get("KEEPSTEP_OFFLOAD") != "0":
        env["LD_PRELOAD"] = library  # for the rank only

    def enter() -> int:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(FIRST_PID))
        # Its own session: CRIU cannot give one that belongs to somebody outside.
        rank = subprocess.Popen(command, pass_fds=descriptors, env=env, start_new_session=True)
        leave()
        return rank.pid

    def leave() -> None:
        for number in descriptors:
            os.close(number)

    first = nested(enter)
    leave()
    wait_for(first)


# ------------------------------------------------------------------------------------------ spare


class _Line:
    """The control socket. It reads no byte too many: the restored process reads on."""

    def __init__(self, number: int) -> None:
        self.socket = socket.socket(fileno=number)

    def send(self, message: m.WorkerMessage) -> None:
        self.socket.sendall(wire.frame(message))

    def receive(self) -> commands.WorkerCommand:
        header = self._exactly(wire.HEADER.size)
        return wire.decode(_decoder, self._exactly(wire.body_length(header)))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                os._exit(1)
            data += part
        return bytes(data)


def _show_parked(number: int) -> None:
    """On the progress page: an agent whose orchestrator is new tells it from there."""
    words = {"capacity": page.CAPACITY_DEFAULT, "where": page.WHERE.index("parked")}
    for name, value in {**words, "magic": page.MAGIC}.items():
        os.pwrite(number, value.to_bytes(8, "little"), page.FIELDS[name])


def _connect(welcome: commands.Welcome, address: m.Address) -> socket.socket:
    line = socket.create_connection((address.host, address.port), CONNECT_S)
    line.settimeout(FETCH_SILENCE_S)
    if welcome.tls is None:
        return line
    return client_context(welcome.tls).wrap_socket(line, server_hostname=welcome.tls.peers)


class EmptyCapsule:
    def __init__(self, control: int, page_fd: int, slot: int) -> None:
        self._began = time.monotonic_ns()
        self._line = _Line(control)
        self._page = page_fd
        self._slot = slot
        welcome = self._line.receive()
        if not isinstance(welcome, commands.Welcome):
            raise RemoteProtocolError(f"{type(welcome).__name__} came before Welcome")
        self._welcome = welcome
        self._rank = -1
        self._folder = image_folder(welcome.job, welcome.worker, "restore")
        self._parts = self._folder / "gpu"
        self._facts: i.ImageFacts | None = None
        self._gpu: gpu.Helper | None = None
        self._places: list[tuple[str, str]] = []  # which GPU here for which there

    def run(self) -> NoReturn:
        _show_parked(self._page)
        waited = time.monotonic_ns() - self._began
        self._line.send(m.Parked(where="an empty capsule", warm_ns=waited))
        while True:
            command = self._line.receive()
            match command:
                case commands.Assign():
                    self._rank = command.rank
                    self._assign(command)
                case commands.Position():
                    ready = m.Ready(generation=command.generation, arrived_ns=0, warm_ns=0)
                    self._line.send(ready)
                case commands.Copy():
                    self._copy(command)
                case commands.Leave() | commands.Finish():
                    os._exit(0)
                case _:
                    pass  # meant for ranks

    def _failed(self, generation: int, reason: str, error: str) -> None:
        self._line.send(
            m.CopyFailed(generation=generation, reason=reason, error=error)  # type: ignore[arg-type]
        )

    def _assign(self, command: commands.Assign) -> None:
        """Before anything is held: would it work?"""
        try:
            trouble = self.look(command.holders)
        except (OSError, KeepstepError) as error:
            self._failed(
                command.generation, "error", f"the process could not be looked at: {error}"
            )
            return
        if trouble:
            self._failed(command.generation, "refused", "; ".join(trouble))
        else:
            self._line.send(m.Arrived(generation=command.generation))

    def look(self, holders: list[m.Address]) -> list[str]:
        with closing(_connect(self._welcome, holders[0])) as line:
            ask = i.ImageLook(token=self._welcome.token, rank=self._rank)
            line.sendall(wire.frame(ask))
            facts = Frames(line, _replies).receive()
        if not isinstance(facts, i.ImageFacts):
            return [facts.error if isinstance(facts, i.ImageRefused) else "a foreign answer"]
        if facts.offenders:
            return facts.offenders
        self._facts = facts
        memory, room = preflight.free()
        here = preflight.host()
        wrong = preflight.compare(facts, here, memory=memory, room=room, size=preflight.file_size)
        if facts.gpu and not wrong:
            try:
                self._places = gpu.pairs(facts.host.gpus, here.gpus, facts.gpu, self._slot)
                self._gpu = self._gpu or gpu.Helper()  # its driver starts while training goes on
                self._gpu.facts()
            except PermanentError as error:
                wrong.append(str(error))
        return wrong

    # -------------------------------------------------------------------------------- the image

    def _copy(self, command: commands.Copy) -> None:
        try:
            first, restored = self._wake(command)
        except (OSError, KeepstepError) as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._failed(command.generation, "error", str(error))
            return
        for path in self._folder.iterdir():
            if path != self._parts:  # the process itself fetches and removes those
                path.unlink()
        if self._gpu is not None:
            self._gpu.close()
        self._line.send(restored)
        self._line.socket.close()  # it is the rank's from here on
        os.close(self._page)
        wait_for(first)

    def _wake(self, command: commands.Copy) -> tuple[int, m.Restored]:
        began = time.monotonic_ns()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        begun, size = self._fetch(command.holders[0], command.generation)
        fetched = time.monotonic_ns()
        told, tell = os.pipe()
        first = nested(lambda: self._restore(begun, tell))
        os.close(tell)
        with os.fdopen(told, encoding="utf-8") as result:
            words = result.read()
        if words != "restored":
            os.waitpid(first, 0)
            raise KeepstepError(f"the image did not come to life: {words or 'no word from it'}")
        restored = time.monotonic_ns()
        gpu_ns = {**begun.gpu_ns, **self._thaw(first, begun.areas)}
        return first, m.Restored(
            generation=command.generation,
            page=begun.page,
            image_bytes=size,
            dump_ns=begun.dump_ns,
            stream_ns=fetched - began - begun.dump_ns - sum(begun.gpu_ns.values()),
            restore_ns=restored - fetched,
            gpu_ns=gpu_ns,
        )

    def _thaw(self, first: int, stowed: bool) -> dict[str, int]:
        if self._gpu is None or self._facts is None or not self._facts.gpu:
            return {}
        began, took = time.monotonic_ns(), dict[str, int]()
        try:
            if stowed:
                areas.fetch(self._parts, gpu.THAW_S_MAX, lambda: not ended(first))
                took["gpu-fetch"] = time.monotonic_ns() - began
            # By the capsule's number: this process does not see the rank's any more.
            return took | self._gpu.thaw_in(os.getpid(), gpu.THAW_S_MAX, self._places)
        except (OSError, KeepstepError):
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            raise

    def _fetch(self, holder: m.Address, generation: int) -> tuple[i.ImageBegun, int]:
        with closing(_connect(self._welcome, holder)) as line:
            line.sendall(wire.frame(i.ImagePages(token=self._welcome.token, rank=self._rank)))
            if not isinstance(answer := Frames(line, _replies).receive(), i.ImageEnd):
                raise RemoteProtocolError(f"{type(answer).__name__} in answer to ImagePages")
            line.settimeout(None)  # it ends with the dump, which has a limit
            ours, theirs = socket.socketpair()
            with ours, theirs, ThreadPoolExecutor(2 * i.PARTS) as pool:
                parts = self._fetch_parts(holder, pool)
                command = [*criu.find()[0], "page-server", "-D", str(self._folder)]
                command += ["-o", "pages.log", "--ps-socket", str(theirs.fileno())]
                server = subprocess.Popen(command, pass_fds=[theirs.fileno()], umask=0o077)
                theirs.close()
                pages = threading.Thread(target=relay, args=(line, ours), daemon=True)
                pages.start()
                try:
                    begun = self._fetch_files(holder, generation)
                finally:
                    shut(ours)
                    pages.join()
                    code = server.wait()
                for part in parts:
                    part.result()
        if code != 0:
            raise KeepstepError(f"its pages did not land: {last_error(self._folder / 'pages.log')}")
        return begun, sum(p.stat().st_size for p in self._folder.rglob("*") if p.is_file())

    def _fetch_parts(self, holder: m.Address, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """What the process had on its GPU, while it is dumped. The pool must be gone before the
        process is woken: that is done by a fork."""
        if self._facts is None or not self._facts.gpu:
            return []
        self._parts.mkdir(mode=0o700)
        return [pool.submit(self._fetch_part, holder, part) for part in range(2 * i.PARTS)]

    def _fetch_part(self, holder: m.Address, number: int) -> None:
        with closing(_connect(self._welcome, holder)) as line:
            seconds_max = self._seconds_max()
            line.settimeout(seconds_max + FETCH_SILENCE_S)
            ask = i.ImagePart(
                token=self._welcome.token, rank=self._rank, part=number, seconds_max=seconds_max
            )
            line.sendall(wire.frame(ask))
            frames = Frames(line, _replies)
            match frames.receive():
                case i.ImageFile() as part:
                    self._receive(frames, part, self._parts)
                case i.ImageEnd():
                    pass  # it goes with the image
                case i.ImageRefused() as refused:
                    raise KeepstepError(refused.error)
                case other:
                    raise RemoteProtocolError(f"{type(other).__name__} in answer to ImagePart")

    def _seconds_max(self) -> float:
        """For each part of a dump."""
        facts, stall_s = self._facts, self._welcome.stall_timeout_ns / 1e9
        size = facts.image_bytes + facts.gpu_bytes if facts is not None else 0
        return min(max(stall_s, DUMP_S_MIN), DUMP_S_MAX) + size / DUMP_BYTES_PER_S

    def _fetch_files(self, holder: m.Address, generation: int) -> i.ImageBegun:
        with closing(_connect(self._welcome, holder)) as line:
            facts, seconds_max = self._facts, self._seconds_max()
            line.settimeout(seconds_max + FETCH_SILENCE_S)
            ask = i.ImageGet(
                token=self._welcome.token,
                rank=self._rank,
                generation=generation,
                seconds_max=seconds_max,
                gpu=facts is not None and bool(facts.gpu),
                parts=facts is not None and facts.offloads,
            )
            line.sendall(wire.frame(ask))
            frames = Frames(line, _replies)
            begun = frames.receive()
            if isinstance(begun, i.ImageRefused):
                raise KeepstepError(begun.error)
            if not isinstance(begun, i.ImageBegun):
                raise RemoteProtocolError(f"{type(begun).__name__} came before ImageBegun")
            count = 0
            while isinstance(part := frames.receive(), i.ImageFile):
                self._receive(frames, part, self._folder)
                count += 1
            if not isinstance(part, i.ImageEnd) or part.files != count:
                raise RemoteProtocolError("the image is not complete")
            return begun

    def _receive(self, frames: Frames[i.ImageReply], part: i.ImageFile, folder: Path) -> None:
        if "/" in part.name or part.name.startswith("."):
            raise RemoteProtocolError(f"{part.name!r} is no file of an image")
        path = folder / part.name
        piece = memoryview(bytearray(min(part.size, PIECE_BYTES)))
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            left = part.size
            while left:
                view = piece[:left]
                frames.receive_into(view)
                file.write(view)
                left -= len(view)

    def _rename(self, names: list[str]) -> None:
        """Names of sockets that are nowhere in the file system belong to the network, and the
        process's former self may be here and still have them (CUDA's driver gives itself one). In
        the image they become others of the same length: it has no sums."""
        taken = set(preflight.unix_sockets(os.getpid()).values())
        for name in taken.intersection(names):
            free = other_name(name, taken)
            if not free:
                continue  # CRIU says what is wrong
            taken.add(free)
            # What is shown as @ is a zero, or an @; some names have a zero at every unused place.
            old = re.compile(b"\0" + re.escape(name[1:].encode()).replace(b"@", b"[@\0]"))
            new = free.encode().replace(b"@", b"\0").replace(b"\\", rb"\\")
            for path in (self._folder / "files.img", self._folder / "unixsk.img"):
                if path.exists():
                    path.write_bytes(old.sub(new, path.read_bytes()))

    def _restore(self, begun: i.ImageBegun, tell: int) -> int:
        """In the new namespaces."""
        for folder in set(begun.folders) - {i.CAPSULE}:
            own_folder(folder)
        if self._parts.exists():  # the process looks for them where it has put them
            bind(self._parts, i.PARTS_FOLDER)
        self._rename(begun.names)
        log, control = os.dup(1), self._line.socket.fileno()
        command = [*criu.find()[0], "restore", "-D", str(self._folder), "-o", "restore.log"]
        command += ["-d", "--file-locks", "--manage-cgroups=ignore", "--tcp-close"]
        command += ["--inherit-fd", f"fd[{control}]:socket:[{begun.control}]"]
        command += ["--inherit-fd", f"fd[{log}]:{begun.log.lstrip('/')}"]
        done = subprocess.run(command, pass_fds=[log, control], capture_output=True, text=True)
        words = "restored"
        if done.returncode != 0:
            words = last_error(self._folder / "restore.log") or done.stderr[-500:]
        os.write(tell, words.encode())
        os.close(tell)
        os.close(log)
        self._line.socket.close()
        os.close(self._page)
        if done.returncode != 0:
            os._exit(1)
        return begun.pid


def other_name(name: str, taken: set[str]) -> str:
    """Of a socket, with another last letter, and as long in bytes; "" if there is none."""
    end = len(name.rstrip("@")) - 1
    if end < 1 or not name.isascii():
        return ""
    others = (name[:end] + letter + name[end + 1 :] for letter in string.ascii_letters)
    return next((other for other in others if other not in taken), "")


def last_error(log: Path) -> str:
    """What CRIU says about its failure: its first error that is more than a warning."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if "Error" in line and "rlimit" not in line]
    return "; ".join(line.partition("Error ")[2] for line in errors[:2])[:800]


def main(environ: Mapping[str, str]) -> NoReturn:
    own = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != own or own == 1:
        os._exit(1)
    control, page_fd = (int(environ[f"KEEPSTEP_{name}_FD"]) for name in ("CONTROL", "PAGE"))
    if "RANK" in environ:
        run_rank(sys.argv[1:], [control, page_fd], environ)
    for number in (control, page_fd):
        os.set_inheritable(number, False)
    EmptyCapsule(control, page_fd, int(environ.get("LOCAL_RANK", "0"))).run()


if __name__ == "__main__":
    main(os.environ)
