"""No Keepstep job around: the same surface, plain Python, the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from keepstep.worker.state.objects import registered

F = TypeVar("F", bound=Callable[..., Any])
Batch = TypeVar("Batch")


class PlainSession:
    """No Keepstep job around: plain Python, unprotected."""

    protected = False

    def __init__(self) -> None:
        self._steps = 0
        self._updates: list[Callable[[], Any]] = []

    @property
    def committed_step(self) -> int:
        return self._steps

    def step(self, function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            for update in self._updates:
                update()
            self._steps += 1
            return result

        return wrapper  # type: ignore[return-value]

    def section(self, function: F) -> F:
        return function

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        return iter(loader)

    def register(
        self,
        name: str,
        target: Any,
        load: Any = None,
        *,
        per_rank: bool = False,
        after_update: Callable[[], Any] | None = None,
    ) -> None:
        registered(name, target, load, per_rank=per_rank)
        if after_update is not None:
            self._updates.append(after_update)

    def progress(self) -> None:
        """Tell the stall detector that a long section is alive."""

    def begin(self) -> None:
        """Everything given to attach is registered."""
