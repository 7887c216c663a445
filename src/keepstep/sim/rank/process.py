"""A process of a simulated node: threads and timers, and what a fault does to them.

The main thread is `mode` with the timers of its epoch: when it goes on to something else, they are
void. Other threads run to their end at once. A stopped process does everything later; in one that
hangs only the main thread stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.sim.ground.world_view import HomeNode, SimSurroundings


class SimProcess:
    def __init__(
        self, world: SimSurroundings, node: HomeNode, name: str, slot: int, pid: int
    ) -> None:
        self.world = world
        self.node = node
        self.id = name
        self.slot = slot
        self.pid = pid
        self.mode = "starting"
        self.alive = True
        self.stopped = False
        self.stopped_at = 0
        self.was_stopped = False
        self.hung = False
        self.slow = 1
        self.was_slow = False
        self.epoch = 0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def place(self) -> str:
        return f"{self.node.name}/{self.slot}"

    # ------------------------------------------------------------------ threads

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        """Main thread: void when it has gone on to something else."""
        self.world.after(ns * self.slow, self._due, self.epoch, work, args)

    def _due(self, epoch: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or epoch != self.epoch or self.hung:
            return
        if self.stopped:
            self._backlog.append((self._due, (epoch, work, args)))
        else:
            work(*args)

    def thread(self, work: Callable[..., None], *args: Any) -> None:
        """Another thread of the process, now."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((self.thread, (work, *args)))
        else:
            work(*args)

    def go(self, mode: str) -> None:
        self.mode = mode
        self.epoch += 1

    # ------------------------------------------------------------------ signals

    def stop(self) -> None:
        if self.alive and not self.stopped:
            self.stopped, self.stopped_at = True, self.world.now
            self.was_stopped = True

    def resume(self) -> None:
        if self.stopped:
            self.stopped = False
            backlog, self._backlog = self._backlog, []
            for work, args in backlog:
                work(*args)

    def exit(self, code: int, tail: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        self.leave_group()
        self.node.process_ended(self.id, code, tail)

    def vanish(self) -> None:
        """With its node: nobody is there to be told."""
        if self.alive:
            self.alive = False
            self.leave_group()

    def leave_group(self) -> None:
        raise NotImplementedError
