"""The frames of the user's script, and how the locals of a running frame are set.

A newcomer that has walked to the dead rank's last transaction stands at the same call, inside the
same functions. What differs is in the local variables of those functions. This module finds the
frames, from the script's module inward to the caller of the `ks.*` wrapper, and gives each a key
that is the same in every process that runs the same script.

Frames of Keepstep, of torch and of the standard library are skipped. Frames of other installed
packages are kept: a framework's training loop counts in its own locals.

Python lets nobody write a running function's locals directly. CPython up to 3.12 copies them from
`frame.f_locals` on request (PyFrame_LocalsToFast); since 3.13 `f_locals` writes through. Both
reach closure cells as well. A self-test at import says whether it works here (`available`).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal

import torch

from keepstep.errors import UsageError

Origin = Literal["script", "library", "skipped"]

CO_OPTIMIZED: Final = 0x1
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LAUNCHER: Final = os.path.join(_PACKAGE, "worker", "__main__.py")
_WRITES_THROUGH: Final = sys.version_info >= (3, 13)
# A function that asks for its namespace may hold on to the very dict that f_locals returns.
_NAMESPACE_CALLS: Final = frozenset({"locals", "vars", "eval", "exec", "dir"})

_origins: dict[str, Origin] = {}
_claimed: list[str] = []  # folders and files of installed packages that are the script's
_libraries = tuple(
    path + os.sep
    for path in {
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
        os.path.dirname(os.path.dirname(torch.__file__)),
    }
)
_skipped = (
    _PACKAGE,
    os.path.dirname(torch.__file__) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")),
    os.path.dirname(os.__file__) + os.sep,
)


def origin(filename: str) -> Origin:
    """Whose code a file holds: the script's (and the user's own modules), a library's, or code
    whose variables are none of our business."""
    known = _origins.get(filename)
    if known is None:
        known = _origins[filename] = _find_origin(filename)
    return known


def _find_origin(filename: str) -> Origin:
    if filename.startswith("<frozen"):
        return "skipped"
    path = os.path.abspath(filename)
    if path.startswith(_skipped[:2]):
        return "skipped"
    if claimed(path):
        return "script"
    if path.startswith(_libraries) or installed(path):
        return "library"
    return "skipped" if path.startswith(_skipped[2:]) else "script"


def claim(frame: FrameType, top: str) -> bool:
    """An installed package whose code uses Keepstep is the user's, like the script. Whether this
    one, `top`, is new."""
    package = sys.modules.get(top) if top != "__main__" else None
    found = [os.path.abspath(folder) + os.sep for folder in getattr(package, "__path__", ())]
    found = found or [os.path.abspath(frame.f_code.co_filename)]
    new = [path for path in found if path not in _claimed and origin(path) == "library"]
    _claimed.extend(new)
    if new:
        _origins.clear()
    return bool(new)


def claims() -> int:
    return len(_claimed)


def claimed(path: str) -> bool:
    return path.startswith(tuple(_claimed))


def installed(path: str) -> bool:
    """Whether a package manager has put this file where it is: into the usual places, or into a
    folder of the search path (`pip install --target`)."""
    if "site-packages" in path or "dist-packages" in path:
        return True
    for entry in sys.path:
        folder = os.path.abspath(entry) + os.sep
        if path.startswith(folder):
            first = path[len(folder) :].partition(os.sep)[0]
            if first in _installed_into(folder):
                return True
    return False


@functools.cache
def _installed_into(folder: str) -> frozenset[str]:
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
        found.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(found)


def script_frames(root: CodeType | None = None) -> list[FrameType]:
    """From the script's module inward to whoever called into Keepstep. `root` begins elsewhere:
    at the outermost frame that runs this code."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    kept = 0
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if (_origins.get(name) or origin(name)) != "skipped":
            found.append(frame)
            if code is root:
                kept = len(found)
        elif name == _LAUNCHER:
            break
        frame = frame.f_back
    if root is not None:
        del found[kept:]
    found.reverse()
    return found


def own_code(function: Any) -> CodeType | None:
    """The code of a step function: below what other packages put around it (torch.no_grad, a
    partial)."""
    code: CodeType | None = getattr(function, "__code__", None)
    while code is None or origin(code.co_filename) != "script":
        inner = function.func if isinstance(function, functools.partial) else None
        inner = inner or getattr(function, "__wrapped__", None)
        if inner is None and code is None:
            inner = inspect.getattr_static(type(function), "__call__", None)
        if inner is None or inner is function:
            break
        function, code = inner, getattr(inner, "__code__", None)
    return code


def key(frame: FrameType, depth: int) -> str:
    code = frame.f_code
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{code.co_qualname}:{code.co_firstlineno}#{depth}"


def place(frame: FrameType) -> str:
    """For people: function, file and line."""
    code = frame.f_code
    return f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def is_function(code: CodeType) -> bool:
    """Otherwise a module or a class body, whose f_locals is the namespace itself."""
    return bool(code.co_flags & CO_OPTIMIZED)


def read(frame: FrameType) -> dict[str, Any]:
    """A function's locals, closures included."""
    names = frame.f_locals
    if _WRITES_THROUGH:
        return dict(names)
    values = names.copy()
    if not _NAMESPACE_CALLS.intersection(frame.f_code.co_names):
        names.clear()  # it would keep the old batch alive until somebody reads it again
    return values


def write(frame: FrameType, values: dict[str, Any]) -> None:
    """Set variables of a running or suspended frame."""
    names = frame.f_locals
    names.update(values)
    if is_function(frame.f_code) and not _WRITES_THROUGH:
        _locals_to_fast(ctypes.py_object(frame), ctypes.c_int(0))
        if not _NAMESPACE_CALLS.intersection(frame.f_code.co_names):
            names.clear()


def refuse_unless_available() -> None:
    if not available:
        raise UsageError(
            f"{sys.implementation.name} {sys.version.split()[0]} does not let a debugger set the "
            "variables of a running function, so a moved rank would not get the script's",
            hint="use CPython 3.11 or later",
        )


def _self_test() -> bool:
    def counting() -> tuple[int, int, int]:
        plain, shared = 1, 2

        def inner() -> int:
            return shared

        write(sys._getframe(), {"plain": 5, "shared": 6})
        return plain, shared, inner()

    try:
        return counting() == (5, 6, 6)
    except Exception:
        return False


_locals_to_fast: Any = getattr(ctypes.pythonapi, "PyFrame_LocalsToFast", None)
available: Final[bool] = sys.implementation.name == "cpython" and _self_test()
