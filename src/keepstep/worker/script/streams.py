"""Every random stream of a process: its own, and those that the script made for itself.

Theory of operation
-------------------
A stream is known by the path that reaches it (graph.py), so that the process that replaces this
one finds the same. `capture` reads the process-wide generators (rng.py), every stream found, and
the numbers that samplers and datasets count (data.py); `restore` sets all of it, in this process
after an abort or in another one. A rank has the worker processes of its loaders besides
(rank_streams.py).

When streams are looked for
    full walk    at the first three calls of a step or section and at every 64th, when a loop is
                 opened, before every `restore`, and when the quick look below finds a difference
    quick look   at the begin of every step: every known path still leads to its stream, and the
                 script's own namespaces hold no other one

All of it depends on the script's course alone, so every rank and every newcomer does the same.

A newcomer whose paths differ from those of the rank it replaces is refused: some stream would go
on from another place than it should, and nobody would see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from keepstep.errors import UsageError
from keepstep.worker.script import graph, sources
from keepstep.worker.script.data import Counters, holders, is_data
from keepstep.worker.script.roots import Roots
from keepstep.worker.state import codec, rng

FIRST_CALLS: Final = 3
EVERY: Final = 64

_encoder = msgspec.msgpack.Encoder()
_HINT: Final = (
    "make generators before the first ks.epochs, ks.batches or step, in the same way in every "
    "process; or register what holds them with ks.register(name, save, load, per_rank=True)"
)


def no_roots() -> Roots:
    return Roots({}, {})


class Streams:
    def __init__(self, roots: Callable[[], Roots] = no_roots) -> None:
        self._roots = roots
        self._calls: Counter[str] = Counter()
        self._due = True
        self._sources: dict[str, sources.StreamSource] = {}
        self._objects: dict[str, Any] = {}
        self._routes: dict[str, graph.Route] = {}
        self._aliases: dict[str, str] = {}
        self._near: frozenset[int] = frozenset()  # ids that a quick look may meet
        self._near_types: frozenset[type] = frozenset()
        self._counters = Counters()
        self._pipelines: dict[str, Any] = {}  # loaders, samplers and datasets, by path

    @property
    def paths(self) -> list[str]:
        return list(self._sources)

    # ------------------------------------------------------------------ looking

    def entering(self, site: str) -> None:
        """A transaction begins."""
        self._calls[site] += 1
        calls = self._calls[site]
        roots = self._roots()
        if self._due or calls <= FIRST_CALLS or calls % EVERY == 0 or self._moved(roots):
            self.discover(roots)

    def leaving(self, site: str) -> None:
        """Its fence comes: what a first call has made lazily belongs to the state."""
        if self._calls[site] <= FIRST_CALLS:
            self.discover()

    def loop_opens(self) -> None:
        self.discover()
        self._due = True  # what iterating makes is found by the next transaction

    def _moved(self, roots: Roots) -> bool:
        for name in roots.near:
            space = roots.script[name]
            for value in space.values():
                if type(value) in self._near_types and id(value) not in self._near:
                    return True
        reached = roots.script | roots.loaders
        return any(
            graph.follow(reached, route) is not self._objects[path]
            for path, route in self._routes.items()
        )

    def discover(self, roots: Roots | None = None) -> None:
        roots = self._roots() if roots is None else roots
        known = sources.process_wide()
        found = graph.find(roots.script, _is_stream_or_data)
        pipelines = {path: thing for path, thing in found.items() if is_data(thing)}
        pipelines |= roots.loaders
        counted, inside = holders(pipelines)
        aliases = found.aliases | inside.aliases
        objects: dict[str, Any] = {}
        routes: dict[str, graph.Route] = {}
        names: dict[int, str] = {}
        near = set(known)
        direct = [(path, thing) for path, thing in found.items() if path not in pipelines]
        for path, stream in (*direct, *inside.items()):
            near.add(id(stream))
            same = sources.identity(stream)
            if same in known:
                continue
            if same in names:
                if path != names[same]:
                    aliases[path] = names[same]
                continue
            _refuse_unordered(path)
            names[same] = path
            objects[path] = stream
            routes[path] = found.routes.get(path) or _joined(found.routes, inside.routes[path])
        kept = self._objects
        self._sources = {
            path: self._sources[path] if kept.get(path) is stream else sources.source(stream)
            for path, stream in objects.items()
        }
        self._objects, self._routes, self._aliases = objects, routes, aliases
        self._near, self._near_types = frozenset(near), sources.near_types()
        self._counters.refresh(counted)
        self._pipelines = pipelines
        self._due = False

    # ------------------------------------------------------------------ states

    def capture(self) -> bytes:
        return _encoder.encode(self._state())

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"process": rng.capture()}
        if self._sources:
            state["streams"] = {
                path: (source.kind, source.read()) for path, source in self._sources.items()
            }
        numbers = self._counters.capture()
        if numbers:
            state["numbers"] = codec.dumps_inline(numbers)
        return state

    def missing(self, data: bytes) -> list[str]:
        """What a state is of, and this process does not have (yet)."""
        self.discover()
        state = msgspec.msgpack.decode(data)
        found = [
            p for p in state.get("streams", {}) if self._aliases.get(p, p) not in self._sources
        ]
        return found + self._counters.missing(_numbers_of(state))

    def restore(self, data: bytes, *, others: bool = False) -> None:
        """`others`: streams that have appeared since the state was taken stay as they are."""
        missing = self.missing(data)
        state = msgspec.msgpack.decode(data)
        if "process" not in state:  # a checkpoint of a version that knew only these
            rng.restore(data)
            return
        streams = {self._aliases.get(p, p): x for p, x in state.get("streams", {}).items()}
        other = [] if others else [path for path in self._sources if path not in streams]
        if missing or other:
            raise _different(missing, other)
        if len(streams) < len(state.get("streams", {})):
            raise _different([], [], "several generators there are one and the same here")
        for path, (kind, _) in streams.items():
            if self._sources[path].kind != kind:
                raise UsageError(
                    f"{path} is a generator of another kind ({self._sources[path].kind}) than in "
                    f"the process that is replaced ({kind})",
                    hint=_HINT,
                )
        self._start_workers(state)
        rng.restore(state["process"])
        for path, (_, value) in streams.items():
            self._sources[path].write(value)
        self._counters.restore(_numbers_of(state))

    def _start_workers(self, state: dict[str, Any]) -> None:
        """Before anything is set: whatever starting them draws is undone by the rest."""

    def of_loader(self, data: bytes, loader: Any) -> dict[str, Any]:
        """The part of a state that is of this loader's own streams, by path."""
        mine = graph.find({"loader": loader}, sources.is_stream, third_party=True)
        same = {sources.identity(stream) for stream in mine.values()}
        state = msgspec.msgpack.decode(data).get("streams", {})
        return {
            path: state[path]
            for path, stream in self._objects.items()
            if sources.identity(stream) in same and path in state
        }


def _numbers_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return codec.loads_inline(state["numbers"]) if "numbers" in state else {}


def _is_stream_or_data(thing: Any) -> bool:
    return sources.is_stream(thing) or is_data(thing)


def _joined(outer: dict[str, graph.Route], route: graph.Route) -> graph.Route:
    """A route that begins at a pipeline, from the root that leads to the pipeline."""
    name = route[0][1]
    return outer.get(name, (("root", name),)) + route[1:]


def _refuse_unordered(path: str) -> None:
    if graph.UNORDERED in path:
        raise UsageError(
            f"{path} is one of several generators in a set, which have no order that another "
            "process repeats",
            hint="keep generators in a list or a dict",
        )


def _different(missing: Iterable[str], other: Iterable[str], *also: str) -> UsageError:
    parts = list(also)
    if missing:
        parts.append(f"not here: {', '.join(sorted(missing))}")
    if other:
        parts.append(f"only here: {', '.join(sorted(other))}")
    return UsageError(
        "the random generators and samplers of this process are not those whose state it was "
        f"given ({'; '.join(parts)})",
        hint=_HINT,
    )
