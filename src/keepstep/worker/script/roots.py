"""Where a walk over the user's script begins: its namespaces, and the loaders of its open loops.

The frames of the script are those between the call into Keepstep and whatever started the script
(`runpy`). A step's own frame is left out: its locals are gone when the step is, and a retry makes
them again. Locals are copied, and the copy that CPython keeps with the frame is emptied at once:
it would keep alive what the script has deleted.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

from keepstep.worker.script import frames, graph


class Roots(NamedTuple):
    script: dict[str, Any]  # in the order in which they are walked
    loaders: dict[str, Any]  # of open ks.batches loops, for what the script cannot reach by name
    near: tuple[str, ...] = ()  # namespaces small enough to be looked through at every step


_modules: tuple[int, dict[str, dict[str, Any]]] = (0, {})


def claim_caller() -> bool:
    """Whoever called into Keepstep is the user, also if it is an installed package, and so is what
    was started with `-m`. Whether that is news."""
    global _modules
    frame = inspect.currentframe()
    while frame is not None and _top(frame) == "keepstep":
        frame = frame.f_back
    found = [] if frame is None else [frame]
    between = False  # a file of the user's: what is further out only runs it
    while frame is not None and _top(frame) != "runpy":
        between = between or frames.origin(frame.f_code.co_filename) == "script"
        found, frame = [*found[:1], frame], frame.f_back
    new = [graph.claim(each) for each in (found[:1] if between else found)]
    if any(new):
        _modules = (0, {})
    return any(new)


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _user_modules() -> dict[str, dict[str, Any]]:
    global _modules
    if _modules[0] != len(sys.modules):
        _modules = (len(sys.modules), graph.user_modules())
    return _modules[1]


def script_roots(named: dict[str, Any], loaders: dict[str, Any]) -> Roots:
    """`named`: objects that Keepstep was given (models, registered objects, steps)."""
    running = script_frames()
    namespaces: dict[str, Any] = {}
    for frame in reversed(running):
        if frame.f_code.co_name == "<module>":
            namespaces.setdefault("globals", frame.f_globals)
            continue
        name = f"{frame.f_code.co_qualname}()"
        while name in namespaces:
            name += "'"
        namespaces[name] = locals_of(frame)
    if "globals" not in namespaces and running:
        namespaces["globals"] = running[-1].f_globals
    near = tuple(namespaces)
    main = namespaces.get("globals")
    others = {name: space for name, space in _user_modules().items() if space is not main}
    return Roots({**namespaces, **others, **named}, loaders, near)


def script_frames() -> list[FrameType]:
    """Innermost first."""
    found: list[FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "runpy":
            break
        if module.partition(".")[0] == "keepstep":
            found.clear()  # nearer frames are of the step's own
        elif graph.module_origin(module) == "user":
            found.append(frame)
        frame = frame.f_back
    return found


def locals_of(frame: FrameType) -> dict[str, Any]:
    space = frame.f_locals
    copy = dict(space)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(space) is dict:
        space.clear()
    return copy
