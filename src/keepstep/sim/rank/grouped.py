"""A worker that meets others: in its script's first rendezvous, and in groups for a move."""

from __future__ import annotations

from typing import Any

from keepstep.model import messages as m
from keepstep.sim.ground.groups import Group
from keepstep.sim.rank.worker import SimWorker


class Grouped(SimWorker):
    group: Group | None = None
    odd_groups = False  # its script has created one that the others do not have
    builder_stuck = False  # its next groups are never finished

    def _drop_staged(self, below: int) -> None:
        group = self.staging.drop(below)
        if group is not None:
            group.leave(self)

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.leave(self)

    def _meet(self, generation: int, store: m.Address) -> None:
        host = self.world.store_at(store)
        self.world.net.ask(
            self.node.name,
            host,
            lambda: host.stores.get(generation),
            lambda found: self.thread(self._found, generation, found),
            lambda why: self.stage_failed(generation, why),
        )

    def _found(self, generation: int, store: Any) -> None:
        if store is None or not store.open:
            self.stage_failed(generation, "connection refused")
        elif not self.inbox.aborted(generation):
            store.meet(self)

    def stage_failed(self, generation: int, why: str) -> None:
        self.thread(self._stage_failed, generation, why)

    def _stage_failed(self, generation: int, why: str) -> None:
        if self.mode == "init":
            self.exit(1, f"RuntimeError: no process group: {why}")
        elif self.staging.failed(generation, self.inbox.abort_generation):
            self.say(m.StageFailed(generation=generation, error=why))

    def met(self, group: Group) -> None:
        self.thread(self._met, group)

    def _met(self, group: Group) -> None:
        generation = group.generation
        if group.left:
            self._stage_failed(generation, "a peer is gone")
        elif self.mode == "init":
            self.group = group
            self._first_met(group)
        else:
            self._built(generation, group)

    def _built(self, generation: int, group: Group) -> None:
        kept, useless = self.staging.built(generation, group, self.inbox.abort_generation)
        if useless is not None:
            useless.leave(self)
        if kept and self.builder_stuck:
            self.builder_stuck = False
            self.staging.take(generation)
        elif kept:
            self.say(m.Staged(generation=generation))

    # ------------------------------------------------------------------ what a group tells it

    def _first_met(self, group: Group) -> None:
        raise NotImplementedError

    def all_came(self, group: Group) -> None:
        raise NotImplementedError

    def fence_passed(self, group: Group, tick: int) -> None:
        raise NotImplementedError

    def connection_lost(self, group: Group) -> None:
        raise NotImplementedError
