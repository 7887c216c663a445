"""How ranks that know nothing of Keepstep come to stand at the same step, without ever waiting.

Theory of operation. Ranks count calls of optimizers' `step`. Whoever is asked to stop writes its
count into the store of the generation, at its next count, and trains on. Who finds all counts
there knows the goal: the greatest of them and a margin. All ranks find the same goal. A rank stops
at it and waits until all have, or until one says that it cannot (it was past the goal when it
learned of it, its script has ended, or somebody does not come because it waits for one of those who
stand here). The first word decides, for all: stop, or go on and try again with a wider margin.

In a job whose ranks reduce gradients in every step nobody can be past a margin of one: the last
rank to write has not contributed to the next step before.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

ROUNDS_MAX = 4
SPREAD_MAX = 1000  # of counts: ranks that are further apart do not count the same thing
MARGIN_FACTOR = 4
UNEVEN = "the ranks do not call their optimizers equally often"


class ScriptStopping:
    """One for each generation of process groups."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank, self._world = rank, world
        self._round = 0
        self._goal: int | None = None
        self.failed = ""  # why there is no step at which all can stand, as far as can be told
        self.joined = False  # in this round: the others may wait

    def reached(self, count: int, patience_s: float) -> bool:
        """At every count since a stop is wanted. True: all stand here, at the same count. Once it
        has failed it stays so: what was said in the store cannot be taken back."""
        if self.failed:
            return False
        try:
            return self._reached(count, patience_s)
        except RuntimeError as error:
            self._give_up(f"the store of their process groups is out of reach: {error}")
            return False

    def _give_up(self, why: str) -> None:
        self.failed, self.joined = why, False

    def _reached(self, count: int, patience_s: float) -> bool:
        keys = PrefixStore(f"keepstep/stop/{self._round}", self._store)
        if not self.joined:
            keys.set(f"count/{self._rank}", str(count))
            keys.add("joined", 1)
            self.joined = True
        if self._goal is None:
            if keys.add("joined", 0) < self._world:
                return False
            said = keys.multi_get([f"count/{rank}" for rank in range(self._world)])
            counts = [int(one) for one in said]
            if max(counts) - min(counts) > SPREAD_MAX:
                self._give_up(UNEVEN)
                return False
            self._goal = max(counts) + MARGIN_FACTOR**self._round
        if count < self._goal:
            return False
        if count > self._goal:
            word = _say(keys, "go")
        elif keys.add("there", 1) == self._world:
            word = _say(keys, "stop")
        else:
            word = _wait(keys, patience_s)
        if word == "stop":
            return True
        self._round, self._goal, self.joined = self._round + 1, None, False
        if self._round == ROUNDS_MAX:
            self._give_up(UNEVEN)
        return False

    def meet(self, patience_s: float) -> None:
        """Where all stand: until everybody has nothing more to give to the others, or for a while.
        NCCL sends in the background, and does not when it is told to end."""
        keys = PrefixStore("keepstep/stop", self._store)
        with contextlib.suppress(RuntimeError):
            if keys.add("calm", 1) == self._world:
                keys.set("calm/all", "")
            keys.wait(["calm/all"], timedelta(seconds=patience_s))

    def never(self) -> None:
        """The script has ended: it will not come to any goal."""
        if self.joined:
            _say(PrefixStore(f"keepstep/stop/{self._round}", self._store), "go")


def _say(keys: Any, word: str) -> str:
    """The word that was said first."""
    return str(keys.compare_set("word", "", word).decode())


def _wait(keys: Any, patience_s: float) -> str:
    try:
        keys.wait(["word"], timedelta(seconds=patience_s))
    except RuntimeError:  # somebody does not come
        return _say(keys, "go")
    return str(keys.get("word").decode())
