"""Groups of the next generation, built beside the old ones by a thread of their own."""

from __future__ import annotations

from typing import Generic, TypeVar

Groups = TypeVar("Groups")


class Staging(Generic[Groups]):
    """Which of them are wanted. `aborted` is the generation of the newest Abort."""

    def __init__(self) -> None:
        self._building = -1  # generation that was asked for last
        self._built: tuple[int, Groups] | None = None

    @property
    def ready(self) -> Groups | None:
        return self._built[1] if self._built is not None else None

    def begin(self, generation: int) -> bool:
        """False: it is under way already."""
        again = self._building == generation
        self._building = generation
        return not again

    def failed(self, generation: int, aborted: int) -> bool:
        """Whether that is to be said. It may be asked for again."""
        wanted = self._building == generation
        if wanted:
            self._building = -1
        return wanted and aborted <= generation

    def built(self, generation: int, groups: Groups, aborted: int) -> tuple[bool, Groups | None]:
        """Whether they are kept, and who has no use any more: they themselves, or those before."""
        if aborted > generation or self._building != generation:
            return False, groups
        before, self._built = self._built, (generation, groups)
        return True, before[1] if before is not None else None

    def take(self, generation: int) -> Groups | None:
        if self._built is None or self._built[0] != generation:
            return None
        groups, self._built = self._built[1], None
        return groups

    def drop(self, below: int) -> Groups | None:
        """Groups of generations below this one, which nobody will take."""
        if self._built is None or self._built[0] >= below:
            return None
        groups, self._built = self._built[1], None
        return groups
