"""The keeper: holds a node's workers while their agent is being started again.

    python -m keepstep.agent.keeper FOLDER LEASE_NS

It does what must survive an agent and nothing else: it is the workers' parent, holds the agent's
end of their control sockets and their pages, and reaps them. One agent at a time attaches to
FOLDER/keeper.sock, is given all of that (SCM_RIGHTS) and talks to the workers itself; they do not
notice which agent it is. What is written to a worker or by it while no agent is there stays in its
socket.

Who ends what:

* The keeper ends: the kernel ends the workers with it (parent-death signal).
* No agent is there that has reached the orchestrator since it attached, for longer than the
  lease: the keeper kills the workers and itself. The lease counts from the moment the orchestrator
  was last in reach and is shorter than the stall timeout, after which the orchestrator gives the
  node up. So a rank is gone here before it can be rebuilt elsewhere, even one that is
  stopped or holds the GIL: nothing depends on its own cooperation.
* An attached agent that had reached the orchestrator and lost it decides by itself (agent.py).
* The agent says End: the job is over.

One thread and no event loop: the fewer parts, the less there is to be restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.adapters.identity.private_files import write_private
from keepstep.agent.process_sessions import (
    kill_group,
    leads_session,
    process_started,
    sweep_session,
)
from keepstep.agent.processes import Order, spawn
from keepstep.errors import KeepstepError
from keepstep.model.messages import Message

SOCKET, NOTE = "keeper.sock", "keeper.json"
MESSAGE_BYTES_MAX = 4 << 20
LOOK_S = 0.25
PR_SET_CHILD_SUBREAPER = 36
EXIT_LEASE = 3
IDLE_NS = 60_000_000_000


class KeeperNote(msgspec.Struct, frozen=True, kw_only=True):
    """FOLDER/keeper.json: which process it is."""

    pid: int
    started: int  # clock ticks since boot: a reused pid has another

    @property
    def alive(self) -> bool:
        return process_started(self.pid) == self.started


def living(folder: Path) -> KeeperNote | None:
    try:
        note = msgspec.json.decode((folder / NOTE).read_bytes(), type=KeeperNote)
    except (OSError, msgspec.DecodeError):
        return None
    return note if note.alive else None


# --------------------------------------------------------------------------- agent -> keeper


class Start(Message, frozen=True):
    order: Order


class KeeperKill(Message, frozen=True, tag="Kill"):
    worker: str
    number: int


class KeeperRank(Message, frozen=True, tag="Note"):
    worker: str
    rank: int


class KeeperDrop(Message, frozen=True, tag="Drop"):
    worker: str


class Linked(Message, frozen=True):
    up: bool


class KeeperEnd(Message, frozen=True, tag="End"):
    pass


Request = Start | KeeperKill | KeeperRank | KeeperDrop | Linked | KeeperEnd


# --------------------------------------------------------------------------- keeper -> agent


class KeptWorker(Message, frozen=True, tag="Kept"):
    """One worker. Two descriptors come with it: its control socket and its page."""

    worker: str
    slot: int
    rank: int
    pid: int
    log: str
    code: int | None = None  # how it ended; its page is kept until Drop


class KeptComplete(Message, frozen=True, tag="Complete"):
    """All that is kept has been told."""


class StartFailed(Message, frozen=True):
    worker: str
    error: str


class Ended(Message, frozen=True):
    worker: str
    code: int


Answer = KeptWorker | KeptComplete | StartFailed | Ended

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


@dataclass
class _Held:
    told: KeptWorker
    process: subprocess.Popen[bytes]
    control: socket.socket
    page_fd: int


class Keeper:
    def __init__(self, folder: Path, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._held: dict[str, _Held] = {}
        self._agent: socket.socket | None = None
        self._reached = False  # by the attached agent, at least once
        self._out_of_reach_ns: int | None = _now_ns()  # None: in reach
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        usual = os.umask(
            0o177
        )  # the socket is as private as the folder; workers keep the usual one
        with _short(path) as name:
            self._listener.bind(name)
        os.umask(usual)
        self._listener.listen(4)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken up
        self._selector.register(woken, selectors.EVENT_READ, lambda: _drain(woken))
        pid = os.getpid()
        note = KeeperNote(pid=pid, started=process_started(pid) or 0)
        write_private(folder / NOTE, msgspec.json.encode(note))

    def run(self) -> int:
        while True:
            for key, _ in self._selector.select(LOOK_S):
                key.data()
            self._reap()
            if self._lease_is_over():
                _say("no agent came back in time: ending this node")
                sweep_session(os.getsid(0))
                return EXIT_LEASE

    def _lease_is_over(self) -> bool:
        if self._out_of_reach_ns is None or (self._agent is not None and self._reached):
            return False
        away_ns = _now_ns() - self._out_of_reach_ns
        if any(held.told.code is None for held in self._held.values()):
            return away_ns > self._lease_ns
        # Nothing runs that could be somewhere else, too; an agent may take its time to start.
        return self._agent is None and away_ns > max(self._lease_ns, IDLE_NS)

    # ------------------------------------------------------------------ the agent

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            agent, _ = self._listener.accept()
            if self._agent is not None:
                _say("a second agent was turned away")
                agent.close()
                return
            with contextlib.suppress(OSError):
                agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
            self._agent, self._reached = agent, False
            self._selector.register(agent, selectors.EVENT_READ, self._hear)
            for held in self._held.values():
                self._tell(held.told, held)
            self._tell(KeptComplete())

    def _hear(self) -> None:
        assert self._agent is not None
        try:
            data = self._agent.recv(MESSAGE_BYTES_MAX)
            request = _requests.decode(data) if data else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            request = None
        if request is None:
            self._detach()
        else:
            self._obey(request)

    def _detach(self) -> None:
        if self._agent is None:
            return
        self._selector.unregister(self._agent)
        self._agent.close()
        self._agent = None
        if self._out_of_reach_ns is None:
            self._out_of_reach_ns = _now_ns()

    def _obey(self, request: Request) -> None:
        match request:
            case Start():
                self._start(request.order)
            case KeeperKill():
                held = self._held.get(request.worker)
                if held is not None and held.told.code is None:
                    kill_group(held.process.pid, request.number)
            case KeeperRank():
                if held := self._held.get(request.worker):
                    held.told = msgspec.structs.replace(held.told, rank=request.rank)
            case KeeperDrop():
                self._drop(request.worker)
            case Linked(up=True):
                self._reached, self._out_of_reach_ns = True, None
            case Linked():
                self._out_of_reach_ns = self._out_of_reach_ns or _now_ns()
            case KeeperEnd():
                sweep_session(os.getsid(0))
                sys.exit(0)

    def _tell(self, answer: Answer, held: _Held | None = None) -> None:
        """An agent that does not listen has ended, or will be found to be mute."""
        if self._agent is None:
            return
        fds = [held.control.fileno(), held.page_fd] if held is not None else []
        try:
            socket.send_fds(self._agent, [_encoder.encode(answer)], fds)
        except OSError as error:
            _say(f"the agent cannot be told: {error}")
            self._detach()

    # ------------------------------------------------------------------ workers

    def _start(self, order: Order) -> None:
        try:
            process, control, page_fd = spawn(order)
        except (OSError, ValueError, KeepstepError) as error:
            self._tell(StartFailed(worker=order.worker, error=str(error)))
            return
        told = KeptWorker(
            worker=order.worker,
            slot=order.slot,
            rank=order.rank,
            pid=process.pid,
            log=order.log,
        )
        self._held[order.worker] = held = _Held(told, process, control, page_fd)
        self._tell(told, held)

    def _reap(self) -> None:
        """Workers, and whatever their dead children left behind for us as their new parent."""
        by_pid = {h.process.pid: h for h in self._held.values() if h.told.code is None}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            held = by_pid.pop(ended.si_pid, None)
            if held is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(ended.si_pid, 0)
                continue
            # Still a zombie, which keeps the number of the group from being reused.
            kill_group(ended.si_pid, signal.SIGKILL)
            code = held.process.wait()
            held.told = msgspec.structs.replace(held.told, code=code)
            self._tell(Ended(worker=held.told.worker, code=code))

    def _drop(self, worker: str) -> None:
        held = self._held.get(worker)
        if held is not None and held.told.code is not None:
            held.control.close()
            os.close(held.page_fd)
            del self._held[worker]


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """A name of `path` that fits into a socket's address, which is limited to 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def connect(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
        with _short(folder / SOCKET) as name:
            sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def _now_ns() -> int:
    # Goes on while the machine sleeps: the orchestrator's clock does, too.
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(4096):
            pass


def _say(text: str) -> None:
    print(f"keeper: {text}", file=sys.stderr, flush=True)


def main() -> int:
    if not leads_session():
        os.setsid()  # what it ends is its session: never that of whoever started it by hand
    # Orphans of killed ranks (loader workers) are ours to reap, not of whoever started us.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # meant for whoever was started by hand
    return Keeper(Path(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    sys.exit(main())
