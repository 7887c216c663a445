"""The runtime beside a script that knows nothing of Keepstep: it can be held, and moved as a whole.

    Hold or Abort -> all ranks at one count of optimizer steps (same_step.py) -> every connection is
    closed -> Held or Report -> the process may be dumped, and go on from here in another place
        -> Stage, Swap: new connections behind the same process groups, the script goes on

The post hook of `Optimizer.step` is where a rank stands: its stack is in the image, so that any
point does at which nothing is in flight between ranks. Nothing is waited for in a step unless a
stop is wanted.

If a move comes to nothing, nobody wants the rank to hold any more. It has no connections then, and
says so, and the orchestrator makes all ranks connect again, as if they had lost them.

Threads: the channel's answers Inspect and builds groups; everything else is the main thread's.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from keepstep.adapters.transport.tls import is_loopback
from keepstep.errors import LocalProtocolError, PermanentError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.device import cuda
from keepstep.worker.groups import fence, gloo, groups, nccl
from keepstep.worker.groups.stager import Stager
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page
from keepstep.worker.line.process import RankEnvironment
from keepstep.worker.transparent import device
from keepstep.worker.transparent.same_step import ScriptStopping

PATIENCE_S = 10.0  # at least, for the others at a goal
PATIENCE_STEPS = 50
UNWANTED_S = 2.0  # between two words of a rank that nobody wants to hold
NOWHERE = m.Address("127.0.0.1", 0)


class Runtime:
    def __init__(self, channel: Channel, page: Page, environment: RankEnvironment) -> None:
        self._channel, self._page = channel, page
        self._rank, self._world = environment.rank, environment.world
        self._master = environment.master
        self.generation = environment.generation
        self.steps = 0
        self._pid = os.getpid()
        self._stager = Stager(channel, self._rank, self._world, device.wait_until_back)
        self._stopping: ScriptStopping | None = None
        self._refused = -1  # generation of the last Hold that could not be met
        self._held = False
        self._unwanted_ns = 0  # when it last said that nobody wants it to hold
        self._announce = False  # the next step is the first of its generation
        self._moved = False
        self._last_ns = 0
        self._step_times_ns: deque[int] = deque(maxlen=65)
        self._store = gloo.Mesh()
        channel.on_stage = self._stage
        channel.on_abort = self._aborted
        channel.on_inspect = self._inspect

    def install(self, *, sockets: str, segments: str) -> None:
        """Before the script runs. `sockets`: a folder that every place has; `segments`: the library
        that moves device memory."""
        self._page.where("outside")
        self._page.set("generation", self.generation)
        # "stepping" stays 0: who is in a long evaluation makes no step and does not hang, and a
        # hang could not be cured here. And nobody waits for the first step of others: when that
        # comes, and whether on all ranks, is the script's own business.
        self._channel.send(
            m.Attached(
                generation=self.generation, groups=[], parameters=0, bytes_state=0, redundant=False
            )
        )
        self._know_store(self._master.host, self._master.port)
        device.find_library(segments)
        register_optimizer_step_post_hook(self._stepped)
        groups.install_destroy()
        os.register_at_fork(after_in_child=device.after_fork)
        os.register_at_fork(after_in_child=_forget_connections)
        watch_sockets()
        # Loader workers hand tensors over through named sockets: where every place has room.
        if sockets:
            multiprocessing.current_process()._config["tempdir"] = sockets  # type: ignore[attr-defined]

    def _know_store(self, host: str, port: int) -> None:
        """Forked children drop its connection as they do those of process groups."""
        gloo.forget([self._store])
        self._store = gloo.Mesh(groups.resolve(host, port))
        gloo.watch(self._store)

    # ------------------------------------------------------------------ at every step

    def _stepped(self, *_: Any) -> None:
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        now = time.monotonic_ns()
        self.steps += 1
        page = self._page
        page.set("tick", self.steps)
        page.set("version", self.steps)
        page.set("commit_ns", now)
        page.mark()
        page.new_tick()
        if self._announce:
            self._resumed(now)
        elif self._last_ns:
            self._step_times_ns.append(now - self._last_ns)
        self._last_ns = now
        if self._must_stop():
            self._hold()

    def _resumed(self, now: int) -> None:
        self._announce = False
        self._channel.send(
            m.Resumed(
                generation=self.generation,
                tick=self.steps,
                version=self.steps,
                last_commit_ns=0 if self._moved else self._last_ns,  # another machine's clock
                first_commit_ns=now,
                median_step_ns=self._median_ns(),
            )
        )
        self._moved = False

    def _median_ns(self) -> int:
        return int(statistics.median(self._step_times_ns)) if self._step_times_ns else 0

    # ------------------------------------------------------------------ coming to a stop

    def _wanted(self) -> bool:
        channel = self._channel
        hold = channel.inbox.hold_generation > max(self.generation, self._refused)
        return hold or channel.inbox.abort_generation > self.generation

    def _must_stop(self) -> bool:
        stopping = self._stopping
        if not self._wanted() and (stopping is None or not stopping.joined):
            return False
        if self._world == 1:
            return True
        if not dist.is_initialized():
            return False
        if stopping is None:
            store = c10d._get_default_store()
            stopping = self._stopping = ScriptStopping(store, self._rank, self._world)
        stall_s = self._channel.welcome.stall_timeout_ns / 1e9
        patience_s = max(PATIENCE_S, PATIENCE_STEPS * self._median_ns() / 1e9)
        if stopping.reached(self.steps, min(patience_s, stall_s / 2)):
            return True
        if stopping.failed:
            self._refuse(stopping.failed)
        return False

    def _refuse(self, why: str) -> None:
        generation = self._channel.inbox.hold_generation
        if generation > self._refused:
            self._refused = generation
            self._channel.send(
                m.CopyFailed(generation=generation, reason="refused", error=why[:2000])
            )

    # ------------------------------------------------------------------ held

    def _hold(self) -> None:
        self._page.where("held")
        self._page.set("hold", 1)
        if not groups.destroyed():
            device.settle_in()
            groups.finish_collectives()
            if self._stopping is not None:
                self._stopping.meet(PATIENCE_S)
            groups.go_solo()
            groups.leave_stores()
            nccl.wait_until_dropped()
        self._stopping = None
        gc.collect()  # store clients live as long as the last cycle that knows them
        self._held = True  # not before: an abort would cut what is still being finished
        try:
            while not self._obey():
                pass
        finally:
            self._held = False
            self._page.set("hold", 0)
        self._page.where("outside")

    def _obey(self) -> bool:
        """One look. True: the script goes on."""
        channel = self._channel
        if channel.inbox.hold_generation <= self.generation or device.awaited():
            device.come_back()  # whoever wanted to take it away does not want to any more
        if channel.inbox.abort_generation > self.generation:
            asked, answer = channel.inbox.abort_generation, self._answered(m.Report)
            if answer != asked:
                channel.send(
                    m.Report(
                        generation=asked,
                        tick=self.steps,
                        version=self.steps,
                        in_fence=False,
                        computing=False,
                    )
                )
        elif channel.inbox.hold_generation > self.generation:
            if self._answered(m.Held) != channel.inbox.hold_generation:
                self._say_held(channel.inbox.hold_generation)
        else:
            self._say_unwanted()
        command = self._next()
        match command:
            case commands.Decide() if command.generation == channel.inbox.abort_generation:
                if command.tick != self.steps:
                    raise LocalProtocolError(
                        f"rank {self._rank} at step {self.steps} told to go to {command.tick}"
                    )
                self._say_held(command.generation)
            case commands.Offload():
                self._offload(command)
            case commands.Welcome():
                self._arrive(command)
            case commands.Swap() if command.generation > self.generation:
                return self._swap(command)
            case commands.Leave() | commands.Finish():
                _leave()
            case _:
                pass  # of another time, or nothing came
        return False

    def _answered(self, kind: type[m.Message]) -> int:
        answer = self._channel.inbox.answer(kind)
        return getattr(answer, "generation", -1)

    def _next(self) -> commands.WorkerCommand | None:
        """The next command, or None when something else has changed or nothing came for a while."""
        channel, inbox = self._channel, self._channel.inbox

        def heard() -> tuple[int, int]:
            return inbox.abort_generation, inbox.hold_generation

        before = heard()
        channel.wait_until(lambda: bool(inbox.waiting) or heard() != before, UNWANTED_S)
        with channel.changed:
            return inbox.pop(lambda _: True)

    def _say_held(self, generation: int) -> None:
        self._channel.send(
            m.Held(
                generation=generation,
                tick=self.steps,
                version=self.steps,
                serve=NOWHERE,
                pid=os.getpid(),
            )
        )

    def _say_unwanted(self) -> None:
        """A rank stops only if it was told to itself, so that was taken back. Said again and again:
        the word may be lost with a stream."""
        now = time.monotonic_ns()
        if now - self._unwanted_ns < UNWANTED_S * 1e9:
            return
        self._unwanted_ns = now
        self._channel.send(
            m.Failure(
                generation=self.generation,
                error_kind="undone",
                error="a move was undone while the ranks held for it: they connect again",
                version=self.steps,
            )
        )

    def _offload(self, command: commands.Offload) -> None:
        began, moved, areas = time.monotonic_ns(), False, False
        error = "the rank does not hold for this move any more"
        if command.generation == self._channel.inbox.hold_generation:
            try:
                moved, error = device.offload(command.move), ""
            except PermanentError as trouble:
                error = str(trouble)
            areas = device.watch_areas()
        took_ns = time.monotonic_ns() - began
        self._channel.send(
            m.Offloaded(
                number=command.number, moved=moved, areas=areas, took_ns=took_ns, error=error
            )
        )

    def _arrive(self, welcome: commands.Welcome) -> None:
        """This process was restored in another place. Nothing of it has run there yet."""
        began = time.monotonic_ns()
        self._moved = True
        if not is_loopback(welcome.interface):
            os.environ["GLOO_SOCKET_IFNAME"] = _interface(welcome.interface)
        device.come_back()
        where = cuda.home if device.kind() else None
        if int(torch.ones(64, device=where).sum()) != 64 or not os.path.isdir(os.getcwd()):
            raise PermanentError("the restored process does not compute")
        self._channel.send(
            m.Copied(
                generation=self._channel.inbox.hold_generation,
                tick=self.steps,
                bytes_copied=0,
                copy_ns=time.monotonic_ns() - began,
                sources=[self._rank],
                side_state="self",
                restored="the image of its process",
            )
        )

    def _swap(self, command: commands.Swap) -> bool:
        """False: committed, but its connections are gone again. Then a newer Abort is here."""
        channel, began = self._channel, time.monotonic_ns()
        if command.solo and self._world > 1:
            raise PermanentError("some ranks have ended, and this one is in the middle of its work")
        device.come_back()
        entered = groups.destroyed() or self._enter(command.generation)
        self.generation = command.generation
        self._page.set("generation", command.generation)
        self._page.new_tick()
        if channel.inbox.hold_generation <= command.generation:
            channel.inbox.hold_generation = -1
        elapsed = time.monotonic_ns() - began
        channel.send(m.Swapped(generation=command.generation, swap_ns=elapsed))
        self._announce = True
        return entered

    def _enter(self, generation: int) -> bool:
        staged = self._stager.take(generation)
        if staged is not None:
            try:
                groups.swap(staged)
                return True
            except RuntimeError:
                if not staged.aborted:
                    raise
            staged.discard()
        if self._channel.inbox.abort_generation <= generation:
            raise LocalProtocolError(f"no groups are staged for generation {generation}")
        return False

    # ------------------------------------------------------------------ the script's end

    def finish(self) -> None:
        if self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._stopping.never()
        self._page.where("done")
        self._channel.send(m.Done(tick=self.steps, version=self.steps))
        self._channel.wait(lambda c: isinstance(c, commands.Finish | commands.Leave))

    # ------------------------------------------------------------------ the channel's thread

    def _stage(self, command: commands.Stage) -> None:
        self._know_store(command.store.host, command.store.port)
        self._stager.begin(command)

    def _aborted(self, command: commands.Abort) -> None:
        if self._held:  # else there is nothing to be freed from: it stops at a step
            groups.abort()
        self._stager.discard(below=command.generation)

    def _inspect(self, command: commands.Inspect) -> None:
        self._channel.send(
            m.Inspected(
                number=command.number,
                foreign=[*foreign_sockets(), *device.trouble()],
                control=os.fstat(self._channel.fileno()).st_ino,
                page=self._page.fd,
                **device.describe(),
            )
        )


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    raise PermanentError(f"no interface of this machine has the address {address}")


def foreign_sockets() -> list[str]:
    """Connections of this process that are not its process groups': those cannot be closed and
    built anew by anybody but the script. NCCL's cannot be told from those of other libraries: where
    it was used, only what Python has opened is named."""
    meshes = gloo.watched()
    incoming = frozenset[gloo.Address]().union(*(mesh.incoming for mesh in meshes))
    outgoing = frozenset[gloo.Address]().union(*(mesh.outgoing for mesh in meshes))
    own = fence.addresses()
    opened = python_sockets() if nccl.used else None
    found = []
    for number, sock in gloo.inet_sockets():
        if opened is not None and number not in opened:
            continue
        with contextlib.suppress(OSError):
            local = gloo.address(sock.getsockname())
            peer: gloo.Address | None = None
            with contextlib.suppress(OSError):
                peer = gloo.address(sock.getpeername())
            if local in incoming or peer in outgoing or local in own:
                continue
            kind = "TCP" if sock.type == socket.SOCK_STREAM else "UDP"
            to = f" to {peer[0]}:{peer[1]}" if peer else ""
            found.append(f"the script has a {kind} socket open{to} (fd {number})")
    return found


def _forget_connections() -> None:
    """In a forked child, where gloo's and the store's are gone already: NCCL's."""
    if nccl.used:
        opened = python_sockets()
        gloo.forget_sockets(number for number, _ in gloo.inet_sockets() if number not in opened)


_opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_detached: set[int] = set()


def watch_sockets() -> None:
    """Python notes which sockets it opens. To look for them among all objects would touch, and so
    copy, all memory of a forked child."""
    kind: Any = socket.socket
    begin, detach = kind.__init__, kind.detach

    def noted(sock: Any, *args: Any, **kwargs: Any) -> None:
        begin(sock, *args, **kwargs)
        _opened.add(sock)

    def let_go(sock: Any) -> int:
        number: int = detach(sock)
        _detached.add(number)
        return number

    kind.__init__, kind.detach = noted, let_go
    # type() and not isinstance: lazy proxies answer isinstance by importing things.
    _opened.update(thing for thing in gc.get_objects() if issubclass(type(thing), socket.socket))


def python_sockets() -> set[int]:
    """Descriptors."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has opened one meanwhile
            return {sock.fileno() for sock in _opened} | _detached
