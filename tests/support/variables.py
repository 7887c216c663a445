"""A stand-in for the session, and a script run by it: once undisturbed, then by each newcomer."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from keepstep.worker.script import frames
from keepstep.worker.script.variables import Variables


class Rank:
    """Stands in for the session: makes the calls that a transaction makes."""

    __module__ = "keepstep.worker.api.session"

    def __init__(self, root: types.CodeType, tree: bytes | None = None) -> None:
        self.variables = Variables(lambda thing: isinstance(thing, Rank | Variables))
        self.root = root
        self.tree = tree
        self.trees: list[bytes] = []
        self.lates: list[bytes | None] = []
        self.log: list[Any] = []
        self.retries = 0
        self.calm = False

    def frames(self, inner: int = 2) -> list[types.FrameType]:
        """Without those of this class."""
        return frames.script_frames(self.root)[:-inner]

    def step(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.tree is not None:
            tree, self.tree = self.tree, None
            self.variables.restore(tree, self.frames())
            return None
        while True:
            self.variables.begin(self.frames(), function, args)
            result = function(*args)
            if not self.retries or self.calm:
                break
            self.retries -= 1
            self.variables.undo()
        self.trees.append(self.variables.capture())
        self.lates.append(self.variables.late())
        self.variables.end()
        return result


def run(script: Callable[[Rank], None], tree: bytes | None = None) -> Rank:
    rank = Rank(script.__code__, tree)
    script(rank)
    return rank


def check(script: Callable[[Rank], None]) -> Rank:
    """Every newcomer logs the rest of what the undisturbed run logs."""
    undisturbed = run(script)
    assert len(undisturbed.trees) == len(undisturbed.log) >= 3
    for number, tree in enumerate(undisturbed.trees):
        newcomer = run(script, tree)
        assert newcomer.log == undisturbed.log[number:], f"step {number}"
        for later, next_tree in enumerate(newcomer.trees):
            again = run(script, next_tree)
            assert again.log == newcomer.log[later + 1 :], f"steps {number} and {later}"
    return undisturbed


def nothing() -> None:
    pass
