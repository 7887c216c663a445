"""The random streams of a rank: those of its process, and the persistent worker processes of its
loaders, which draw from streams of their own (loader_workers.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.worker.script import loader_workers
from keepstep.worker.script.roots import Roots
from keepstep.worker.script.streams import Streams, no_roots


class RankStreams(Streams):
    def __init__(self, roots: Callable[[], Roots] = no_roots) -> None:
        super().__init__(roots)
        self._loaders: dict[str, Any] = {}  # with persistent workers, by path
        self._open: set[int] = set()  # ids of loaders in open loops

    def discover(self, roots: Roots | None = None) -> None:
        roots = self._roots() if roots is None else roots
        super().discover(roots)
        self._loaders = {
            p: x for p, x in self._pipelines.items() if loader_workers.keeps_workers(x)
        }
        self._open = {id(loader) for loader in roots.loaders.values()}

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self._loaders:
            kept = {path: loader_workers.kept(loader) for path, loader in self._loaders.items()}
            state["workers"] = {path: x for path, x in kept.items() if x is not None}
        return state

    def _start_workers(self, state: dict[str, Any]) -> None:
        for path, kept in state.get("workers", {}).items():
            loader = self._loaders.get(path)
            if loader is not None and id(loader) not in self._open:
                loader_workers.keep(loader, kept)
