"""Builds the groups of the next generation beside the old ones, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from keepstep.core.rank.staging import Staging
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.groups import groups
from keepstep.worker.line.channel import Channel

STAGE_TIMEOUT_S: Final = 60.0


class Stager:
    def __init__(
        self, channel: Channel, rank: int, world: int, ready: Callable[[], None] = lambda: None
    ) -> None:
        """`ready` comes back when groups may be built."""
        self._channel = channel
        self._rank = rank
        self._world = world
        self._ready = ready
        self._lock = threading.Lock()
        self._staging: Staging[groups.StagedGroups] = Staging()

    def begin(self, command: commands.Stage) -> None:
        with self._lock:
            if not self._staging.begin(command.generation):
                return  # asked again while it is being done
        threading.Thread(
            target=self._build, args=(command,), name="keepstep-stage", daemon=True
        ).start()

    def _build(self, command: commands.Stage) -> None:
        generation = command.generation
        try:
            self._ready()
            staged = groups.stage(
                generation,
                command.store.host,
                command.store.port,
                self._rank,
                self._world,
                self._channel.welcome.interface,
                STAGE_TIMEOUT_S,
            )
        except Exception as error:
            with self._lock:
                wanted = self._staging.failed(generation, self._channel.inbox.abort_generation)
            if wanted:
                self._channel.send(m.StageFailed(generation=generation, error=str(error)[:2000]))
            return
        with self._lock:
            aborted = self._channel.inbox.abort_generation
            kept, useless = self._staging.built(generation, staged, aborted)
        if useless is not None:
            useless.discard()
        if kept:
            self._channel.send(m.Staged(generation=generation))

    def take(self, generation: int) -> groups.StagedGroups | None:
        with self._lock:
            return self._staging.take(generation)

    def discard(self, below: int) -> None:
        with self._lock:
            useless = self._staging.drop(below)
        if useless is not None:
            useless.discard()
