"""The object graph of a user's script: what can be reached from named roots, by which path.

Theory of operation
-------------------
Two processes that run the same script build the same objects under the same names, so a *path*
(`trainer.augment._rng`, `train_step<closure>.gen`, `loader.sampler.generator`) names one object in
both. `find` walks breadth first: the shortest path names an object, and among paths of one length
the first in the order of the roots and of their members. Each object is visited once, by identity.

    entered      dicts, lists, tuples, sets, deques; instances of the user's classes (__dict__,
                 __slots__, plain class attributes) and of helpers; functions (closure, defaults,
                 attributes), partials and bound methods; suspended generators (their locals);
                 everything of torch.utils.data; submodules of any nn.Module
    not entered  modules, tensors, arrays, parameters and buffers, the insides of torch, numpy and
                 the standard library; what else is installed, unless `third_party` is set

The user's are the script, its modules, and installed packages whose code uses Keepstep (`claim`). A
helper is an object of another installed package that is Python through and through and is not
about the world outside: an average of weights, a schedule, a meter.

The walk reads storage only: `vars`, slots, cells. It calls no property, no `__getattr__`, no
`__eq__`, no `repr` of the user's. Number and depth of the objects are bounded, and a walk that was
cut short says so.

A set has no order that another process repeats. Its members are named by their type; several of
one type carry `UNORDERED` in their path, and whoever relies on the path must refuse it.
"""

from __future__ import annotations

import builtins
import functools
import io
import queue
import socket
import subprocess
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from keepstep.worker.script import frames, outside

OBJECTS_MAX: Final = 50_000
DEPTH_MAX: Final = 16
ITEMS_MAX: Final = 1024  # looked at in one container
UNORDERED: Final = "{?"

Member = tuple[str, str, Any, Any]  # what it adds to the path, how and where it is kept, itself
Route = tuple[tuple[str, Any], ...]

_PLAIN: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(Ellipsis)}
)
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
_STDLIB_BAGS: Final = frozenset(
    {"UserDict", "UserList", "SimpleNamespace", "Namespace", "ChainMap", "Counter", "mappingproxy"}
)
_helping: dict[Any, bool] = {}  # of classes, remembered
_entering: dict[tuple[Any, bool], bool] = {}  # of classes, remembered
_MODULE_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})
_NOT_HELPERS: Final = (
    *(dict, list, tuple, set, frozenset, deque, type, BaseException),
    *(torch.Tensor, np.ndarray, torch.nn.Module, torch.optim.Optimizer),
)
_OF_PROCESS: Final = (
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), queue.Queue, queue.SimpleQueue),
    *(socket.socket, io.IOBase, subprocess.Popen),
)
# Of the standard library: bases that keep nothing.
_BASES: Final = frozenset({"abc", "collections", "contextlib", "enum", "types", "typing"})


class Found(dict[str, Any]):
    """Objects by path; `aliases` are other paths to them, each with the first one. `routes` leads
    along each path again (`follow`)."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, Route] = {}
        self.aliases: dict[str, str] = {}
        self.cut_at = ""  # the path at which the walk reached a bound, if it did


def find(
    roots: Mapping[str, Any],
    wanted: Callable[[Any], bool],
    *,
    limit: int = OBJECTS_MAX,
    depth: int = DEPTH_MAX,
    third_party: bool = False,
    visit: Callable[[str, Any], object] = lambda path, node: None,
) -> Found:
    """What is `wanted` and reached from the roots, by its shortest path. Nothing wanted is entered.
    Plain values (numbers, strings) are not offered to `wanted`. `visit` is called with everything
    that is looked into."""
    found = Found()
    names: dict[int, str] = {}  # of what was found
    seen: dict[int, Any] = {}  # the objects too: an id is free again once its object is gone
    queue: deque[tuple[str, Any, Route]] = deque(
        (name, root, (("root", name),)) for name, root in roots.items()
    )
    while queue:
        path, node, route = queue.popleft()
        if id(node) in seen or type(node) in _PLAIN:
            if id(node) in names:
                found.aliases.setdefault(path, names[id(node)])
                found.routes.setdefault(path, route)
            continue
        if len(seen) >= limit:
            found.cut_at = found.cut_at or path
            break
        seen[id(node)] = node
        if wanted(node):
            found[path] = node
            found.routes[path] = route
            names[id(node)] = path
            continue
        if len(route) > depth:
            found.cut_at = found.cut_at or path
            continue
        visit(path, node)
        for label, how, key, value in members(node, third_party=third_party):
            if type(value) not in _PLAIN and (id(value) not in seen or id(value) in names):
                queue.append((path + label, value, (*route, (how, key))))
    return found


def follow(roots: Mapping[str, Any], route: Route) -> Any:
    """The object that a route leads to now; None where it leads nowhere any more."""
    node: Any = roots
    try:
        for how, key in route:
            node = _FOLLOW[how](node, key)
    except (LookupError, AttributeError, TypeError, ValueError):
        return None
    return node


# ---------------------------------------------------------------------- whose code it is


@functools.cache
def _foreign_places() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.add(str(Path(__file__).parents[2]))
    return tuple(f"{place}/" for place in sorted(places))


@functools.cache
def module_origin(name: str) -> str:
    """user, installed (a package of other people's), or library (torch, numpy, the standard
    library, Keepstep)."""
    if name == "__main__":
        return "user"
    top = name.partition(".")[0]
    if top in ("torch", "numpy", "keepstep", "builtins") or top in sys.stdlib_module_names:
        return "library"
    module = sys.modules.get(name)
    if module is None:
        return "user"  # made by exec, or the script itself: runpy takes its name away
    file = vars(module).get("__file__")
    if not isinstance(file, str):
        return "installed"
    if frames.claimed(file):
        return "user"
    if frames.installed(file):
        return "installed"
    return "installed" if file.startswith(_foreign_places()) else "user"


def origin(thing: Any) -> str:
    """Of a module, a class or a function: `user`, `installed` or `library`."""
    if isinstance(thing, types.ModuleType):
        name = vars(thing).get("__name__", "")
    elif isinstance(thing, type):
        name = type.__dict__["__module__"].__get__(thing)
    else:
        name = getattr(thing, "__module__", None)
    return module_origin(name) if isinstance(name, str) else "library"


def user_code(thing: Any) -> bool:
    """Whether the user wrote this module, class or function."""
    return origin(thing) == "user"


def claim(frame: types.FrameType) -> bool:
    """Its code uses Keepstep: if it is of an installed package, the whole package is the user's.
    Whether that is news."""
    space = frame.f_globals
    top = str(space.get("__package__") or space.get("__name__")).partition(".")[0]
    if top in outside.PACKAGES or not frames.claim(frame, top):
        return False
    module_origin.cache_clear()
    _helping.clear()
    _entering.clear()
    return True


def helper(kind: Any) -> bool:
    """Whether objects of this class are helpers (see above)."""
    known = _helping.get(kind)
    if known is None:
        known = not issubclass(kind, _NOT_HELPERS) and origin(kind) == "installed"
        known = _helping[kind] = known and all(map(_helps, kind.__mro__[:-1]))
    return known


def is_outside(thing: Any) -> bool:
    """This helper runs a thread, or has a connection or a file."""
    own = getattr(thing, "__dict__", {})
    return any(isinstance(value, _OF_PROCESS) for value in list(own.values()))


def _helps(base: type) -> bool:
    top = base.__module__.partition(".")[0]
    if origin(base) == "library":
        return top in _BASES or base.__module__ == "collections.abc"
    file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
    return file.endswith(".py") and top not in outside.PACKAGES and top != "torchdata"


def user_modules() -> dict[str, dict[str, Any]]:
    """Namespaces of the user's modules, by name, for use as roots."""
    modules = sorted(sys.modules.items())
    return {
        name: vars(module)
        for name, module in modules
        if name != "__main__" and type(module) is types.ModuleType and user_code(module)
    }


# ---------------------------------------------------------------------- members


def members(node: Any, *, third_party: bool = False) -> Iterator[Member]:
    """What one object holds, in an order that every process of the script repeats."""
    kind = type(node)
    if kind in _PLAIN or isinstance(node, torch.Tensor | types.ModuleType):
        return
    if isinstance(node, _CONTAINERS):
        yield from _items(node)
        if kind.__module__ != "builtins":
            yield from _attributes(node, third_party)
    elif kind is types.FunctionType:
        yield from _of_function(node)
    elif kind is types.MethodType:
        yield ".__self__", "slot", "__self__", node.__self__
        yield "", "slot", "__func__", node.__func__
    elif kind is types.BuiltinMethodType:  # draw = random.Random(1).random
        yield ".__self__", "slot", "__self__", node.__self__
    elif isinstance(node, functools.partial):
        yield ".func", "slot", "func", node.func
        yield ".args", "slot", "args", node.args
        yield ".keywords", "slot", "keywords", node.keywords
    elif isinstance(node, staticmethod | classmethod):
        yield "", "slot", "__func__", node.__func__
    elif kind is types.GeneratorType:
        frame = node.gi_frame
        if frame is not None and module_origin(frame.f_globals.get("__name__", "")) == "user":
            for name, value in frame.f_locals.items():
                yield f"<locals>.{name}", "frame", name, value
    elif isinstance(node, type):
        if user_code(node):
            yield from _of_class(node)
    elif isinstance(node, torch.nn.Module):
        yield from _of_nn_module(node, third_party)
    elif _entered(kind, third_party) and not (helper(kind) and is_outside(node)):
        yield from _attributes(node, third_party)


def _entered(kind: Any, third_party: bool) -> bool:
    known = _entering.get((kind, third_party))
    if known is None:
        known = _entering[(kind, third_party)] = _decide(kind, third_party)
    return known


def _decide(kind: Any, third_party: bool) -> bool:
    if kind.__module__ == "torch.utils.data.dataloader" and kind.__name__.startswith("_"):
        return False  # an iterator is a position, and not every process stands in the same loops
    for base in kind.__mro__:
        whose = origin(base)
        if whose == "user" or (third_party and whose == "installed"):
            return True
        if base.__module__.startswith(("torch.utils.data", "torchdata")):
            return True
    return helper(kind) or (kind.__name__ in _STDLIB_BAGS and origin(kind) == "library")


def _items(node: Any) -> Iterator[Member]:
    if isinstance(node, dict):
        pairs = dict.items(node)
        for index, (key, value) in enumerate(pairs):
            if index >= ITEMS_MAX:
                return
            if value is builtins.__dict__:  # in every namespace
                continue
            named = type(key) is str and key.isidentifier()
            if type(key) is int or (type(key) is str and not named):
                yield f"[{key!r}]", "item", key, value
            else:
                yield (f".{key}" if named else f"[#{index}]"), "value", (key, index), value
    elif isinstance(node, set | frozenset):
        if len(node) <= ITEMS_MAX:
            yield from _of_set(node)
    else:
        for index, value in enumerate(node):
            if index >= ITEMS_MAX:
                return
            yield f"[{index}]", "index", index, value


def _of_set(node: set[Any] | frozenset[Any]) -> Iterator[Member]:
    by_type: dict[str, list[Any]] = {}
    for value in node:
        if type(value) not in _PLAIN:
            kind = type(value)
            by_type.setdefault(f"{kind.__module__}.{kind.__qualname__}", []).append(value)
    for name, values in sorted(by_type.items()):
        for index, value in enumerate(values):
            label = f"{{{name}}}" if len(values) == 1 else f"{UNORDERED}{name}#{index}}}"
            yield label, "set", value, value


def _of_function(node: types.FunctionType) -> Iterator[Member]:
    wrapped = node.__dict__.get("__wrapped__")
    if wrapped is not None:  # a decorated function is called what the user calls it
        yield "", "attr", "__wrapped__", wrapped
    for index, (name, cell) in enumerate(zip(node.__code__.co_freevars, node.__closure__ or ())):
        try:
            yield f"<closure>.{name}", "closure", index, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for index, value in enumerate(node.__defaults__ or ()):
        yield f"<default>[{index}]", "default", index, value
    for name, value in (node.__kwdefaults__ or {}).items():
        yield f"<default>.{name}", "kwdefault", name, value
    for name, value in node.__dict__.items():
        if name != "__wrapped__":
            yield f".{name}", "attr", name, value


def _of_class(node: type) -> Iterator[Member]:
    for base in node.__mro__:
        if not user_code(base):
            continue
        for name, value in type.__dict__["__dict__"].__get__(base).items():
            if not (name.startswith("__") and name.endswith("__")):
                yield f".{name}", "class", (base, name), value


def _of_nn_module(node: torch.nn.Module, third_party: bool) -> Iterator[Member]:
    """Submodules of any module; plain attributes of the user's own."""
    own = object.__getattribute__(node, "__dict__")
    for name, value in (own.get("_modules") or {}).items():
        if not _is_bare(value):
            yield f".{name}", "submodule", name, value
    if _entered(type(node), third_party):
        for label, how, key, value in _attributes(node, third_party):
            if not (how == "attr" and key in _MODULE_OWN):
                yield label, how, key, value


def _is_bare(module: Any) -> bool:
    """A layer of torch's own without layers inside: most of a model, and nothing to be found."""
    if module is None or type(module).__module__[:9] != "torch.nn.":
        return module is None
    return not object.__getattribute__(module, "__dict__").get("_modules")


def _attributes(node: Any, third_party: bool) -> Iterator[Member]:
    kind = type(node)
    try:
        own = object.__getattribute__(node, "__dict__")
    except AttributeError:
        own = {}
    if type(own) is dict:
        for name, value in list(own.items()):
            yield f".{name}", "attr", name, value
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            slot = base.__dict__.get(_mangled(base, name))
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", "descriptor", slot, slot.__get__(node, kind)
                except AttributeError:  # never assigned
                    continue
    if user_code(kind):
        yield "<class>", "type", None, kind


def _mangled(base: type, name: str) -> str:
    if name.startswith("__") and not name.endswith("__"):
        return f"_{base.__name__.lstrip('_')}{name}"
    return name


def _value(node: Any, key: Any) -> Any:
    """A key may have an __eq__ of the user's: it is compared by identity, at its place first."""
    wanted, index = key
    if type(wanted) is str:
        return dict.__getitem__(node, wanted)
    for place, (known, value) in enumerate(dict.items(node)):
        if place == index and known is wanted:
            return value
    raise LookupError(index)


def _in_set(node: Any, key: Any) -> Any:
    if any(value is key for value in node):
        return key
    raise LookupError


_FOLLOW: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "root": lambda node, key: node[key],
    "item": dict.__getitem__,
    "value": _value,
    "index": lambda node, key: node[key],
    "set": _in_set,
    "slot": lambda node, key: object.__getattribute__(node, key),
    "attr": lambda node, key: object.__getattribute__(node, "__dict__")[key],
    "closure": lambda node, key: node.__closure__[key].cell_contents,
    "default": lambda node, key: node.__defaults__[key],
    "kwdefault": lambda node, key: node.__kwdefaults__[key],
    "frame": lambda node, key: node.gi_frame.f_locals[key],
    "class": lambda node, key: type.__dict__["__dict__"].__get__(key[0])[key[1]],
    "submodule": lambda node, key: object.__getattribute__(node, "__dict__")["_modules"][key],
    "descriptor": lambda node, key: key.__get__(node, type(node)),
    "type": lambda node, key: type(node),
}
