"""Plain data of the script as msgpack, exactly: types, signs and shared objects survive.

Scalars are themselves. Everything else is an array that begins with a tag; mutable containers are
never nested but referred to by number (`_REF`), so that one list under two names stays one list.
Nothing that is decoded here runs code: classes are looked up among those that are loaded.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import math
import os
import pathlib
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
import xxhash

from keepstep.errors import KeepstepError, UsageError
from keepstep.worker.state import codec

SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
ITEMS_MAX: Final = 4096
BYTES_MAX: Final = 64 << 10

_REF: Final = 0
_TUPLE: Final = 1
_NAMED_TUPLE: Final = 2
_FROZENSET: Final = 3
_CODEC: Final = 4
_ENUM: Final = 5
_TEXT: Final = 6  # of a type that is made from its text
_IMPORTED: Final = 7  # a function of C, by its name
_RANGE: Final = 8
_SLICE: Final = 9

_TEXTS: Final[dict[type, Callable[[Any], str]]] = {
    decimal.Decimal: str,
    fractions.Fraction: str,
    pathlib.PosixPath: str,
    pathlib.PurePosixPath: str,
    datetime.datetime: datetime.datetime.isoformat,
    datetime.date: datetime.date.isoformat,
    datetime.timedelta: lambda delta: f"{delta.days},{delta.seconds},{delta.microseconds}",
}
_FROM_TEXT: Final[dict[str, Callable[[str], Any]]] = {
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "PosixPath": pathlib.PosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "timedelta": lambda text: datetime.timedelta(*map(int, text.split(","))),
}
_CODEC_LEAVES: Final = (complex, torch.dtype, torch.Size)
# Functions of C often do not say where they can be imported from.
_HOMES: Final = ("torch", "torch.nn.functional", "math", "operator", "numpy", "builtins")

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def is_leaf_type(kind: type) -> bool:
    """Immutable plain data without anything inside."""
    if kind in SCALARS or kind in _TEXTS or kind in _CODEC_LEAVES or issubclass(kind, enum.Enum):
        return True
    if kind is range or kind is slice:
        return True
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic) and kind.__module__ == "numpy"


def same(old: Any, new: Any) -> bool:
    """Of two leaves that are not one object."""
    if type(old) is not type(new) or type(new) not in SCALARS:
        return False
    return bool(old == new) and not (new == 0.0 and math.copysign(1, new) != math.copysign(1, old))


class NotPlain(Exception):
    """It contains something that cannot be carried."""


class NoSuchFunction(UsageError):
    """The process that takes over has another one, or none."""


def pack(value: Any, refer: Callable[[Any], int | None]) -> Any:
    """`refer` numbers containers and objects; None: it is none of those."""
    kind = type(value)
    if kind in SCALARS:
        if kind is int and not -(1 << 63) <= value < 1 << 64:
            return [_CODEC, codec.dumps_inline(value)]
        return value if kind is not str or value.isascii() else _pack_str(value)
    number = refer(value)
    if number is not None:
        return [_REF, number]
    if kind is tuple:
        return [_TUPLE, *(pack(item, refer) for item in value)]
    if kind is frozenset:
        return [_FROZENSET, *(pack(item, refer) for item in value)]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [_NAMED_TUPLE, name_of(kind), *(pack(item, refer) for item in value)]
    if issubclass(kind, enum.Enum):
        return [_ENUM, name_of(kind), value.name]
    if kind in _TEXTS:
        return [_TEXT, kind.__name__, _TEXTS[kind](value)]
    if kind is range or kind is slice:
        parts = (value.start, value.stop, value.step)
        return [_RANGE if kind is range else _SLICE, *(pack(part, refer) for part in parts)]
    home = home_of(value)
    if home:
        return [_IMPORTED, home]
    if is_leaf_type(kind):
        try:
            return [_CODEC, codec.dumps_inline(value)]
        except KeepstepError:
            raise NotPlain from None
    raise NotPlain


def _pack_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return [_CODEC, codec.dumps_inline(value)]
    return value


def unpack(node: Any, referred: Callable[[int], Any]) -> Any:
    if type(node) is not list:
        return node
    match node[0]:
        case 0:  # _REF
            return referred(node[1])
        case 1:  # _TUPLE
            return tuple(unpack(item, referred) for item in node[1:])
        case 2:  # _NAMED_TUPLE
            return class_named(node[1])._make(unpack(item, referred) for item in node[2:])
        case 3:  # _FROZENSET
            return frozenset(unpack(item, referred) for item in node[1:])
        case 4:  # _CODEC
            return codec.loads_inline(node[1])
        case 5:  # _ENUM
            return class_named(node[1])[node[2]]
        case 7:  # _IMPORTED
            return _imported(node[1])
        case 8:  # _RANGE
            return range(*(unpack(item, referred) for item in node[1:]))
        case 9:  # _SLICE
            return slice(*(unpack(item, referred) for item in node[1:]))
        case _:  # _TEXT
            return _FROM_TEXT[node[1]](node[2])


def home_of(value: Any) -> str:
    """Where a function of C can be imported from; empty: nowhere, or it is something else."""
    numpy: Any = sys.modules.get("numpy")
    ufunc = numpy is not None and type(value) is numpy.ufunc
    if not ufunc and not isinstance(value, types.BuiltinFunctionType):
        return ""
    name = value.__name__
    for module in (getattr(value, "__module__", None), *_HOMES):
        space = vars(sys.modules[module]) if module in sys.modules else {}
        if space.get(name) is value:
            return f"{module}:{name}"
    return ""


def _imported(home: str) -> Any:
    module, _, name = home.partition(":")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if found is None:
        raise UsageError(
            f"{name} of {module} is not there in the process that takes over",
            hint="import the same modules in every process",
        )
    return found


def described(thing: Any) -> str:
    """What tells a function from others that may be bound to the same name."""
    if isinstance(thing, types.MethodType):
        return f"method {described(thing.__func__)}"
    if isinstance(thing, functools.partial):
        return f"partial {described(thing.func)}"
    if not isinstance(thing, types.FunctionType):
        return name_of(thing if isinstance(thing, type) else type(thing))
    code = thing.__code__
    text = repr((code.co_code, code.co_names, [x for x in code.co_consts if type(x) in SCALARS]))
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "backslashreplace"))[:8]
    return f"{thing.__module__}:{thing.__qualname__}@{code.co_firstlineno} {digest}"


def function_described(text: str) -> Any:
    """A function that its module has under its own name; None: there is none."""
    module, _, rest = text.partition(":")
    space = script_globals.get(module) or vars(sys.modules.get(module, types))
    found = space.get(rest.partition("@")[0])
    return found if found is not None and described(found) == text else None


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def class_named(name: str) -> Any:
    """Of a module that is loaded; the script's own is found although runpy hides it."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    if found is not None and module != "__main__":
        namespace = vars(found)
    else:
        namespace = script_globals.get(module) or (vars(found) if found is not None else {})
    first, *rest = qualname.split(".")
    kind = namespace.get(first)
    for part in rest:
        kind = getattr(kind, part, None)
    if not isinstance(kind, type):
        raise UsageError(
            f"the class {qualname} of {module} is not there in the process that takes over",
            hint="define classes at the top level of a module",
        )
    return kind


script_globals: dict[str, dict[str, Any]] = {}  # namespaces of modules that run as scripts


# ------------------------------------------------------------------ what belongs to the slot


def slot(local_rank: int | None) -> list[str]:
    """What this process has from its place and not from its rank, as text."""
    local = "" if local_rank is None else str(local_rank)
    return [local, socket.gethostname(), str(os.getpid())]


slot_now = slot(None)  # until the process attaches


def belongs_to_slot(theirs: Any, mine: Any, their_slot: list[str], my_slot: list[str]) -> bool:
    """Whether two different values say the same of two places: `cuda:0` here, `cuda:1` there."""
    if type(theirs) is not type(mine):
        return False
    if type(theirs) is int:
        return any(
            str(theirs) == there and str(mine) == here
            for there, here in zip(their_slot, my_slot, strict=True)
        )
    if type(theirs) is str:
        return any(
            there and theirs.replace(there, here) == mine
            for there, here in zip(their_slot, my_slot, strict=True)
        )
    return False
