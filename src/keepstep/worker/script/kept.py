"""Objects that the script keeps and nobody has attached, by the paths that lead to them.

Theory of operation
-------------------
An object is named after the path by which it was found first, and keeps that name. Paths through a
list or another object go before variables: that of a loop leads to something else on a newcomer,
which looks for the first time in a later round. A newcomer finds an object by any of its paths.

A path may come to lead to another object: `teacher = copy.deepcopy(student)` at every epoch. The
name then stands for the new one; the one before gets another name if it lives on. What no path
leads to any more is lost: its name goes when somebody says so (`let_go`).

All of the script is looked through rarely, because that takes long. Paths that are known are
followed at every look. Modules that are made in the meantime are noticed as they get their
parameters and buffers, or are copied; if one of them lives on, everything is looked through.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from keepstep.worker.script import graph
from keepstep.worker.script.roots import Roots

PATHS_MAX = 8  # to one object, that are followed
VARIABLE = 2  # members of the path of a variable: its namespace, and itself


class _Thing:
    def __init__(self, thing: Any, paths: dict[str, graph.Route]) -> None:
        self.thing = thing  # until the next look, even if the script has let go of it
        self.routes = list(paths.values())[:PATHS_MAX]


class Kept:
    """`wanted(thing)`: it is of a kind that matters, and nobody has attached it."""

    def __init__(self, roots: Callable[[], Roots], wanted: Callable[[Any], bool]) -> None:
        self._roots, self._wanted = roots, wanted
        self._things: dict[str, _Thing] = {}
        self._lost: dict[str, Any] = {}
        self._late: dict[int, weakref.ref[nn.Module]] = {}  # modules made since the first search
        self._searched = False
        self.homeless = False  # something lives on whose name stands for another object now
        _watch_modules()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._things))

    def get(self, name: str) -> Any:
        """What the name stands for now; None: nothing."""
        one = self._things.get(name)
        return one.thing if one is not None else self._lost.get(name)

    def let_go(self, names: Iterable[str]) -> None:
        """Of what is lost."""
        for name in names:
            self._lost.pop(name, None)

    def holds(self, thing: Any) -> bool:
        return any(one.thing is thing for one in self._things.values())

    def search(self) -> None:
        """Look through all of the script."""
        self.made()
        self.homeless = False
        if not self._searched:
            self._late.clear()  # a newcomer builds them, too
            self._searched = True
        names = {id(one.thing): name for name, one in self._things.items()}
        for thing, paths in self._found():
            name = names.get(id(thing)) or self._free(next(iter(paths)))
            self._things[name] = _Thing(thing, paths)

    def _found(self) -> list[tuple[Any, dict[str, graph.Route]]]:
        """Things, each with all paths to it. What is inside another one is left out."""
        found = graph.find(self._roots().script, self._wanted)
        modules = [thing for thing in found.values() if isinstance(thing, nn.Module)]
        inside = {id(part) for one in modules for part in one.modules() if part is not one}
        paths = {path: {path: found.routes[path]} for path in found}
        for path, first in found.aliases.items():
            paths[first][path] = found.routes[path]
        return [(x, _lasting(paths[p])) for p, x in found.items() if id(x) not in inside]

    def _free(self, path: str) -> str:
        while path in self._things or path in self._lost:
            path += "'"
        return path

    def made(self) -> list[nn.Module]:
        """Modules that were made since the last call, and live."""
        taken = [(key, ref, ref()) for key, ref in list(_made.items())]
        _made.clear()
        self._late = {key: ref for key, ref in self._late.items() if ref() is not None}
        new = []
        for key, ref, module in taken:
            if module is not None and not self._made_late(module):
                self._late[key] = ref
                new.append(module)
        return new

    def is_late(self, thing: Any) -> bool:
        """It, or a part of it, was made when training had begun: a newcomer may make it otherwise,
        or not at all."""
        return isinstance(thing, nn.Module) and any(map(self._made_late, thing.modules()))

    def _made_late(self, module: nn.Module) -> bool:
        ref = self._late.get(id(module))
        return ref is not None and ref() is module

    def follow(self) -> tuple[set[str], set[str]]:
        """Names that stand for another object than before, and those of what is lost."""
        exchanged, lost = set[str](), set[str]()
        before: list[weakref.ref[Any]] = []
        roots = self._roots().script if self._things else {}
        for name, one in self._things.items():
            first = graph.follow(roots, one.routes[0])
            if first is one.thing:
                continue
            others = (graph.follow(roots, route) for route in one.routes[1:])
            if any(other is one.thing for other in others):
                continue
            if first is not None and self._wanted(first) and not self.holds(first):
                before.append(weakref.ref(one.thing))
                one.thing = first
                exchanged.add(name)
            else:
                lost.add(name)
        for ref in before:
            self._moved(ref())
        for thing, paths in self._found() if lost else ():
            for name in [name for name in lost if self.get(name) is thing]:
                self._things[name] = _Thing(thing, paths)  # by another path
                lost.discard(name)
        for name in lost:
            self._lost[name] = self._things.pop(name).thing
        return exchanged, lost

    def _moved(self, thing: Any) -> None:
        """Another object has its name. If the script keeps it elsewhere, it is as good as new."""
        if isinstance(thing, nn.Module):
            self._late[id(thing)] = weakref.ref(thing)
            self.homeless = True

    def rename(self, wanted: set[str], given: set[str]) -> set[str]:
        """On a newcomer: other ranks have these names. Those that lead to something here that has
        not been `given` another one of theirs."""
        found = set()
        for thing, paths in self._found() if wanted else ():
            name = next((path for path in paths if path in wanted), None)
            others = [n for n, one in self._things.items() if one.thing is thing]
            if name is not None and given.isdisjoint(others):
                for other in others:
                    del self._things[other]
                self._things[name] = _Thing(thing, {name: paths[name]} | paths)
                found.add(name)
        return found


def _lasting(paths: dict[str, graph.Route]) -> dict[str, graph.Route]:
    """First those that lead through an object: a variable may be that of a loop."""
    return dict(sorted(paths.items(), key=lambda one: len(one[1]) <= VARIABLE))


_made: dict[int, weakref.ref[nn.Module]] = {}


def _note(module: nn.Module) -> None:
    _made[id(module)] = weakref.ref(module)


def _watch_modules() -> None:
    """Copies and what is unpickled get no parameters registered: they get a state."""
    restore: Any = nn.Module.__setstate__
    if hasattr(restore, "keepstep"):
        return

    def note(module: nn.Module, *_: Any) -> None:
        _note(module)

    def noted(self: nn.Module, state: Any) -> None:
        _note(self)
        restore(self, state)

    noted.keepstep = True  # type: ignore[attr-defined]
    nn.Module.__setstate__ = noted  # type: ignore[method-assign]
    torch_module.register_module_parameter_registration_hook(note)
    torch_module.register_module_buffer_registration_hook(note)
