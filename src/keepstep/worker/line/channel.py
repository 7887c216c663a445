"""The worker's line to its agent: one inherited socket, one daemon thread.

The thread reads commands, acts on the few that must not wait for the main thread (Abort, Stage,
Arm, ...), and leaves the rest in the inbox (core/rank/inbox) for the main thread, which waits on a
condition. It also writes the heartbeat that tells a stopped process from a busy one.

`drive` runs a protocol of core/rank in the main thread: it blocks until what was asked for is done.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from keepstep.core.rank import asks
from keepstep.core.rank.inbox import Inbox
from keepstep.model import commands, wire
from keepstep.model import messages as m
from keepstep.worker.line import peers
from keepstep.worker.line.page import Page

_decoder: msgspec.msgpack.Decoder[commands.WorkerCommand] = msgspec.msgpack.Decoder(
    commands.WorkerCommand
)

HEARTBEAT_S = 0.2
ABORT_AGAIN_S = 1.0

Result = TypeVar("Result")


class Channel:
    def __init__(self, fd: int, page: Page) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._page = page
        self._send_lock = threading.Lock()
        self.changed = threading.Condition()
        self.inbox = Inbox()
        self.armed: list[commands.Arm] = []
        self._abort_again = 0.0  # when to act on it once more
        # called in the daemon thread; set by the session before it matters
        self.on_abort: Callable[[commands.Abort], None] = lambda _: None
        self.on_stage: Callable[[commands.Stage], None] = lambda _: None
        self.on_seal: Callable[[commands.Seal], None] = lambda _: None
        self.on_inspect: Callable[[commands.Inspect], None] = lambda _: None
        self.welcome = self._read_welcome()
        peers.use(self.welcome.tls)
        self._thread = threading.Thread(target=self._run, name="keepstep", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: m.WorkerMessage) -> None:
        data = wire.frame(message)
        with self._send_lock:
            self.inbox.said(message)
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(1)  # the agent is gone; this rank must not outlive it

    # ------------------------------------------------------------------ main thread

    def drive(self, protocol: asks.Protocol[Result], perform: Callable[[asks.Ask], Any]) -> Result:
        """To its end. `perform` does what is neither to be said nor to be waited for."""
        answer: Any = None
        try:
            while True:
                try:
                    ask = protocol.send(answer)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                # The user's code may run here, and raise whatever it likes, StopIteration too.
                match ask:
                    case asks.Say():
                        self.send(ask.message)
                        answer = None
                    case asks.Await():
                        answer = self.wait(ask.accept, newer_than=ask.newer_than, s=ask.seconds)
                    case _:
                        answer = perform(ask)
        finally:
            protocol.close()

    def wait(
        self,
        accept: Callable[[commands.WorkerCommand], bool],
        *,
        newer_than: int | None = None,
        s: float | None = None,
    ) -> commands.WorkerCommand | None:
        """The first command that `accept` takes; None when an Abort newer than `newer_than` has
        come and no such command is waiting, or `s` seconds are over."""
        found: list[commands.WorkerCommand] = []

        def over() -> bool:
            command = self.inbox.pop(accept)
            if command is not None:
                found.append(command)
            return bool(found) or (newer_than is not None and self.inbox.aborted(newer_than))

        self.wait_until(over, s)
        return found[0] if found else None

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

    def _read_welcome(self) -> commands.Welcome:
        command = self._read()
        if not isinstance(command, commands.Welcome):
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

    def _read(self) -> commands.WorkerCommand:
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
        command = self.inbox.unreported()
        if command is not None and time.monotonic() >= self._abort_again:
            self._abort_again = time.monotonic() + ABORT_AGAIN_S
            self.on_abort(command)

    def _take(self, command: commands.WorkerCommand) -> None:
        if isinstance(command, commands.Welcome):  # this process was restored in another place
            self.welcome = command
            peers.use(command.tls)
        with self.changed:
            verdict, answer = self.inbox.take(command, bool(self._page.get("hold")))
            self.changed.notify_all()
        if verdict == "wrong":
            words = f"keepstep: built as rank {self.inbox.rank}, asked to be another\n"
            os.write(2, words.encode())
            os._exit(1)
        elif answer is not None:
            self.send(answer)
        elif verdict == "now":
            self._act(command)

    def _act(self, command: commands.WorkerCommand) -> None:
        match command:
            case commands.Abort():
                self._abort_again = time.monotonic() + ABORT_AGAIN_S
                self.on_abort(command)
            case commands.Stage():
                self.on_stage(command)
            case commands.Seal():
                self.on_seal(command)
            case commands.Inspect():
                self.on_inspect(command)
            case commands.Arm():
                self.armed.append(command)
