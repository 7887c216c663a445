"""Nodes for what modules and optimizers keep besides their state, and what registered objects keep
besides their state_dict. See nodes.py."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import attributes, graph, values
from keepstep.worker.script.namespaces import DictNames
from keepstep.worker.script.nodes import HOOK, MODULE, PARAMETER, Graph
from keepstep.worker.state import codec

_MODULE_OWN: Final = frozenset(vars(torch.nn.Module()))
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS: Final = "<hooks>"


def _users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return graph.origin(hook) != "library"


def _told(hooked: list[dict[Any, Any]]) -> tuple[tuple[str, ...], ...]:
    """Hooks without torch's own, which come and go as models are wrapped; classes of modules."""
    *hooks, modules = hooked
    users = [[x for x in each.values() if _users(x)] for each in hooks]
    inside = [f"{name}: {values.name_of(kind)}" for name, kind in modules.items()]
    return (*(tuple(map(values.described, each)) for each in users), tuple(inside))


class DataNames(DictNames):
    """A dataset or sampler of torch's own: what the script sets in it. One that also holds what
    cannot be carried, such as a generator, is not made anew."""


def _ignored(name: str) -> bool:
    """Attributes that libraries give to a parameter. `main_grad` is Megatron's gradient."""
    return name.startswith("_") or name == "main_grad"


class ParameterNames(DictNames):
    """What a script keeps on a parameter (`p.omega = ...`)."""

    kind = "parameter"

    def ignored(self, name: str) -> bool:
        return _ignored(name)


class NetworkNames(DictNames):
    """An nn.Module: plain attributes; what torch keeps in it is state and carried as such."""

    kind = "network"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        origin = type(target).__module__
        self._plain = not origin.startswith("torch.") or origin.startswith("torch.nn.modules")
        self._hooks: list[dict[Any, Any]] | None = None
        self._watched: list[dict[Any, Any]] = []
        self._watch(graph)

    def _watch(self, graph: Graph) -> None:
        own = vars(self.target)
        parameters = [vars(p) for p in own["_parameters"].values() if p is not None]
        self._watched = [*(own[name] for name in ("_modules", *_HOOKS)), *parameters]
        for inside in self._watched:
            graph.versions.watch(inside, self)

    def unwatch(self, graph: Graph) -> None:
        for inside in self._watched:
            graph.versions.forget(inside)
        self._watched = []

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        if self.target is None:
            self.unwatch(graph)

    def hold(self, graph: Graph) -> None:
        super().hold(graph)
        if self.target is not None and not self._watched:
            self._watch(graph)

    def ignored(self, name: str) -> bool:
        return not self._plain or name in _MODULE_OWN or name.startswith("__")

    def scan(self, graph: Graph) -> None:
        super().scan(graph)
        self._scan_hooks(graph)
        for name, module in self.target._modules.items():
            child = self.children.get((MODULE, name))
            if child is not None and child.target is not None and child.target is not module:
                graph.release(self, (MODULE, name))  # another one has taken its place
                child = None
            if module is not None and child is None:
                graph.adopt(module, self, (MODULE, name))
        for name, parameter in self.target._parameters.items():
            own = None if parameter is None else vars(parameter)
            child = self.children.get((PARAMETER, name))
            if child is not None and child.target is not own:
                graph.release(self, (PARAMETER, name))
                child = None
            if child is not None:
                child.scan(graph)
            elif own and not all(map(_ignored, own)):
                self.look_at(name, graph)

    def look_at(self, name: str, graph: Graph) -> Any:
        """At the attributes of this parameter."""
        parameter = self.target._parameters.get(name)
        if parameter is None:
            return None
        label = f"{self.label}.{name}"
        return graph.adopt(vars(parameter), self, (PARAMETER, name), label, ParameterNames)

    def _scan_hooks(self, graph: Graph) -> None:
        now = self._hooked()
        if self._hooks is not None and now != self._hooks:
            graph.note(self, HOOKS, self._hooks)
            self.changing_names.add(HOOKS)
            graph.touch(self)
        if now != self._hooks or self._hooked_parameters():
            self._look_into_hooks(graph, now[:-1])
        self._hooks = now

    def _hooked_parameters(self) -> list[torch.Tensor]:
        own = self.target._parameters.values()
        return [p for p in own if p is not None and p._backward_hooks]

    def _look_into_hooks(self, graph: Graph, hooks: list[dict[Any, Any]]) -> None:
        """Objects that only a hook knows."""
        found = [*hooks, *(dict(p._backward_hooks or {}) for p in self._hooked_parameters())]
        gone = {key for key in self.children if key.__class__ is tuple and key[0] == HOOK}
        for kind, each in enumerate(found):
            for place, hook in enumerate(filter(_users, each.values())):
                key = (HOOK, kind, place)
                gone.discard(key)
                child = self.children.get(key)
                if child is None or child.target is not hook:
                    graph.release(self, key)
                    graph.adopt(hook, self, key)
        for key in gone:
            graph.release(self, key)

    def payload(self, graph: Graph) -> Any:
        changing, late, removed = super().payload(graph)
        if HOOKS in self.changing_names and self._hooks is not None:
            changing[HOOKS] = graph.pack(_told(self._hooks), self)
        return [changing, late, removed]

    def _hooked(self) -> list[dict[Any, Any]]:
        modules = {name: type(module) for name, module in self.target._modules.items()}
        return [*(dict(vars(self.target)[name]) for name in _HOOKS), modules]

    def put_back(self, old: dict[str, Any]) -> None:
        hooks = old.pop(HOOKS, None)
        for name, there in zip(_HOOKS, hooks or ()):  # modules inside stay
            mine = vars(self.target)[name]
            mine.clear()
            mine.update(there)
        super().put_back(old)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        theirs = data[0].pop(HOOKS, None)
        super().apply(data, referred)
        if theirs is None:
            return
        if values.unpack(theirs, referred) != _told(self._hooked()):
            raise UsageError(
                f"{self.label} of the rank that is replaced has other hooks or modules inside, "
                "which it got while it trained",
                hint="build them before the first step, and let a variable turn them on",
            )
        self.changing_names.add(HOOKS)


class OptimizerNames(DictNames):
    """An optimizer: objects that it keeps. Plain data is carried by attributes.py."""

    kind = "optimizer"

    def ignored(self, name: str) -> bool:
        if name in attributes.TORCHS or name.startswith("__"):
            return True
        value = self.names[name]
        if name in self.last or not isinstance(value, (*attributes.PLAIN, torch.optim.Optimizer)):
            return False
        return isinstance(value, torch.optim.Optimizer) or attributes.is_data(value)


class RegisteredNames(DictNames):
    """A registered object: numbers and the like, which its state_dict may have left out."""

    kind = "registered"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        save = getattr(target, "state_dict", None)
        saved = save() if callable(save) else {}
        saved = saved if isinstance(saved, dict) else {}
        names = [key for key in saved if isinstance(key, str)]
        self._saved = frozenset(way for key in names for way in (key, f"_{key}", key.lstrip("_")))
        self._marks = self._marked()
        if self._marks:  # under another name
            there = {_encoded(value) for value in saved.values()}
            self._saved |= {name for name in self._marks if _encoded(self.names[name]) in there}

    def ignored(self, name: str) -> bool:
        if name in self._saved or name.startswith("__"):
            return True
        if values.is_leaf_type(type(self.names[name])):
            return False
        self.last.pop(name, None)  # it was a number before
        self.changing_names.discard(name)
        self.late_names.discard(name)
        return True

    def left_out(self) -> list[str]:
        """Containers, tensors and arrays that its state_dict does not have, and that have changed
        since the last call."""
        before, self._marks = self._marks, self._marked()
        return [name for name, mark in self._marks.items() if before.get(name) != mark]

    def _marked(self) -> dict[str, Any]:
        if self.target is None or not graph.user_code(type(self.target)):
            return {}
        return {
            name: _mark(value)
            for name, value in list(self.names.items())
            if name not in self._saved and isinstance(value, _INSIDE)
        }


_INSIDE: Final = (list, dict, set, deque, torch.Tensor, numpy.ndarray)
_MARKED_MAX: Final = 64  # items of a container


def _mark(value: Any, depth: int = 2) -> Any:
    """Cheap, and another one when the value has changed; of a large container, often."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, numpy.ndarray):
        small = value.nbytes <= values.BYTES_MAX and not value.dtype.hasobject
        return id(value), value.tobytes() if small else b""
    if not isinstance(value, _INSIDE) or not depth:
        return value if value.__class__ in values.SCALARS else id(value)
    items = value.values() if isinstance(value, dict) else value
    return len(value), [_mark(item, depth - 1) for item in itertools.islice(items, _MARKED_MAX)]


def _encoded(value: Any) -> bytes | None:
    plain = list(value) if isinstance(value, set | deque | tuple) else value
    try:
        return codec.dumps_inline(plain)
    except UsageError:
        return None
