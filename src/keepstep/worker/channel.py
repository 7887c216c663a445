"""The worker's line to its agent: one inherited socket, one daemon thread.

The thread reads commands, acts on the few that must not wait for the main thread (Abort, Stage,
Arm, ...), and leaves the rest in an inbox for the main thread, which waits on a condition. It
also writes the heartbeat that tells a stopped process from a busy one. Commands of a generation
older than the newest Abort are dropped here, so nobody behind has to think about them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from keepstep.model import messages as m
from keepstep.model import wire
from keepstep.worker import peers
from keepstep.worker.page import Page

_decoder: msgspec.msgpack.Decoder[m.WorkerCommand] = msgspec.msgpack.Decoder(m.WorkerCommand)

HEARTBEAT_S = 0.2
ABORT_AGAIN_S = 1.0

# A command may be sent again because its answer was lost with a stream. If it was answered for the
# same generation, the answer is said again and the command is done with.
_ANSWERS: dict[type[m.Message], type[m.Message]] = {
    m.Abort: m.Report,
    m.Decide: m.Held,
    m.Hold: m.Held,
    m.Stage: m.Staged,
    m.Copy: m.Copied,
    m.Swap: m.Swapped,
}
# A newcomer does these once in its life, whatever the generation.
_ANSWERED_ONCE: dict[type[m.Message], type[m.Message]] = {
    m.Assign: m.Arrived,
    m.Position: m.Ready,
}


class Channel:
    def __init__(self, fd: int, page: Page) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._page = page
        self._send_lock = threading.Lock()
        self.changed = threading.Condition()
        self.inbox: list[m.WorkerCommand] = []
        self.abort_generation = -1  # newest Abort seen
        self.hold_generation = -1  # newest Hold that is neither released nor aborted
        self.snapshot = -1  # number of the checkpoint to raise the word for
        self.buddy: m.Address | None = None
        self.buddy_known = False
        self.parity: m.Parity | None = None
        self.armed: list[m.Arm] = []
        self.seat = -1  # rank that a standby was given
        self._answers: dict[type[m.Message], m.WorkerMessage] = {}
        self._unheard: tuple[m.Abort, float] | None = None  # no report yet; when to say it again
        # called in the daemon thread; set by the session before it matters
        self.on_abort: Callable[[m.Abort], None] = lambda _: None
        self.on_stage: Callable[[m.Stage], None] = lambda _: None
        self.on_seal: Callable[[m.Seal], None] = lambda _: None
        self.on_inspect: Callable[[m.Inspect], None] = lambda _: None
        self.welcome = self._read_welcome()
        peers.use(self.welcome.tls)
        self._thread = threading.Thread(target=self._run, name="keepstep", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: m.WorkerMessage) -> None:
        data = wire.frame(message)
        with self._send_lock:
            self._answers[type(message)] = message
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(1)  # the agent is gone; this rank must not outlive it

    def answer(self, kind: type[m.Message]) -> m.WorkerMessage | None:
        """The last message of this kind that was sent."""
        return self._answers.get(kind)

    # ------------------------------------------------------------------ main thread

    def wait(
        self, accept: Callable[[m.WorkerCommand], bool], *, newer_than: int | None = None
    ) -> m.WorkerCommand | None:
        """The first command that `accept` takes; None when an Abort newer than `newer_than`
        has arrived and no such command is waiting."""
        with self.changed:
            while True:
                for index, command in enumerate(self.inbox):
                    if accept(command):
                        del self.inbox[index]
                        return command
                if newer_than is not None and self.abort_generation > newer_than:
                    return None
                self.changed.wait(1.0)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not condition():
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(min(left, 1.0))
            return True

    # ------------------------------------------------------------------ daemon thread

    def _read_welcome(self) -> m.Welcome:
        command = self._read()
        if not isinstance(command, m.Welcome):
            os._exit(1)
        return command

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                os._exit(1)
            data += part
        return bytes(data)

    def _read(self) -> m.WorkerCommand:
        length = wire.body_length(self._read_exactly(wire.HEADER.size))
        return wire.decode(_decoder, self._read_exactly(length))

    def _run(self) -> None:
        try:
            while True:
                self._page.heartbeat()
                if select.select([self._socket], [], [], HEARTBEAT_S)[0]:
                    self._take(self._read())
                self._insist()
        except BaseException as error:  # a dead line means a rank nobody can fence: end it
            os.write(2, f"keepstep: control line failed: {error!r}\n".encode())
            os._exit(1)

    def _insist(self) -> None:
        """What the main thread waits for may have come into being just after it was to be cut."""
        if self._unheard is None:
            return
        command, due = self._unheard
        report = self._answers.get(m.Report)
        if isinstance(report, m.Report) and report.generation >= command.generation:
            self._unheard = None
        elif time.monotonic() >= due:
            self._unheard = command, time.monotonic() + ABORT_AGAIN_S
            self.on_abort(command)

    def _take(self, command: m.WorkerCommand) -> None:
        generation: int = getattr(command, "generation", -1)
        if generation >= 0 and generation < self.abort_generation:
            return
        if isinstance(command, m.Assign):
            if self.seat not in (-1, command.rank):
                os.write(2, f"keepstep: built as rank {self.seat}, asked to be another\n".encode())
                os._exit(1)
            self.seat = command.rank
        answer = self._answer(command, generation)
        if answer is not None:
            if isinstance(command, m.Swap) and not command.same_buddy:
                self.buddy = command.buddy  # it may be another one than in the first Swap
            self.send(answer)
            return
        match command:
            case m.Abort():
                with self.changed:
                    self.abort_generation = generation
                    self.hold_generation = self.snapshot = -1
                    self.inbox = [c for c in self.inbox if not self._stale(c)]
                    self.changed.notify_all()
                self._unheard = command, time.monotonic() + ABORT_AGAIN_S
                self.on_abort(command)
            case m.Stage():
                self._unheard = None
                self.on_stage(command)
            case m.Seal():
                self.on_seal(command)
            case m.Inspect():
                self.on_inspect(command)
            case _:
                with self.changed:
                    self._note(command)
                    self.changed.notify_all()

    def _answer(self, command: m.WorkerCommand, generation: int) -> m.WorkerMessage | None:
        kind = type(command)
        if kind in _ANSWERED_ONCE:
            return self._answers.get(_ANSWERED_ONCE[kind])
        if isinstance(command, m.Snapshot):
            saved = self._answers.get(m.Saved)
            same = isinstance(saved, m.Saved) and saved.number == command.number
            return saved if same else None
        answer = self._answers.get(_ANSWERS[kind]) if kind in _ANSWERS else None
        if answer is None or getattr(answer, "generation", None) != generation:
            return None
        # A rank that was released does not hold any more; then the Hold is a new one.
        return answer if kind is not m.Hold or self._page.get("hold") else None

    def _stale(self, command: m.WorkerCommand) -> bool:
        # A Swap is a committed fact: it is obeyed even if an Abort came right after it.
        if isinstance(command, m.Swap | m.Assign | m.Position | m.Leave):
            return False
        generation: Any = getattr(command, "generation", None)
        return generation is not None and generation < self.abort_generation

    def _note(self, command: m.WorkerCommand) -> None:
        match command:
            case m.Hold():
                self.hold_generation = command.generation
            case m.Snapshot():
                self.snapshot = command.number
            case m.Release():
                if self.hold_generation <= command.generation:
                    self.hold_generation = -1
                self.inbox.append(command)
            case m.Buddy():
                self.buddy, self.parity = command.address, command.parity
                self.buddy_known = True
            case m.Arm():
                self.armed.append(command)
            case m.Welcome():  # this process was restored in another place
                self.welcome = command
                peers.use(command.tls)
                self.inbox.append(command)
            case m.Swap():
                # Said again, it replaces the first: its buddy may be another one.
                same = command.generation
                self.inbox = [
                    c for c in self.inbox if not (isinstance(c, m.Swap) and c.generation == same)
                ]
                self.inbox.append(command)
            case _:
                self.inbox.append(command)
