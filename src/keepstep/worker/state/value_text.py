"""Values of a script as short text that is equal exactly when the value is.

Numbers and short strings are written out, because a person will read them; tensors and everything
long become digests. A container is walked to a bounded depth, and each part gets a name of its own
(`batch[0]`, `result['loss']`), so that a difference can be named. What is no plain data has no
value here: it is left out, or stands as the name of its type where its place counts.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any, Final

import torch
import xxhash

from keepstep.worker.device import digest
from keepstep.worker.state import shards
from keepstep.worker.state.tensors import memory, on_cpu

TEXT_MAX: Final = 80
PARTS_MAX: Final = 2_000
DEPTH_MAX: Final = 4
ITEMS_MAX: Final = 10_000  # of a variable that is written down as a whole

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def of_tensor(tensor: torch.Tensor) -> str:
    """A single number as it is; else shape, kind and a digest, made where the tensor is."""
    tensor = shards.local(tensor).detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.numel() == 1 and not tensor.is_quantized:
        return repr(tensor.item())
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.device.type == "cpu":
        found = xxhash.xxh3_64_hexdigest(memory(on_cpu(tensor)))
    else:
        found = digest.digest(tensor).hex()[:16]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {found}"


def of_plain(value: Any) -> str | None:
    """None: it is not plain data, or too much of it."""
    if not _is_plain(value, 0, [ITEMS_MAX]):
        return None
    text = repr(sorted(value, key=repr)) if isinstance(value, set | frozenset) else repr(value)
    if len(text) <= TEXT_MAX:
        return text
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size} {xxhash.xxh3_64_hexdigest(text.encode())}"


def _is_plain(value: Any, depth: int, left: list[int]) -> bool:
    left[0] -= 1
    if left[0] < 0 or depth > DEPTH_MAX:
        return False
    if type(value) in _PLAIN:
        return True
    if type(value) is dict:
        return all(
            _is_plain(k, depth + 1, left) and _is_plain(v, depth + 1, left)
            for k, v in value.items()
        )
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(item, depth + 1, left) for item in value)
    return False


def parts(name: str, value: Any) -> dict[str, str]:
    """Every part of `value` by name."""
    found: dict[str, str] = {}
    for part, item in _walk(name, value, 0):
        if len(found) >= PARTS_MAX:
            break
        found[part] = item
    return found


def _walk(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield name, of_tensor(value)
    elif (text := generator_state(value)) is not None:
        yield name, text
    elif isinstance(value, Mapping) and depth < DEPTH_MAX:
        for key, item in value.items():
            yield from _walk(f"{name}[{key!r}]", item, depth + 1)
    elif _is_array(value):
        yield name, of_tensor(torch.from_numpy(value.copy()))
    elif (text := of_plain(value)) is not None:
        yield name, text
    elif isinstance(value, list | tuple) and depth < DEPTH_MAX:
        for index, item in enumerate(value):
            yield from _walk(f"{name}[{index}]", item, depth + 1)
    elif dataclasses.is_dataclass(value) and depth < DEPTH_MAX:
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            yield from _walk(f"{name}.{field.name}", item, depth + 1)
    else:
        yield name, f"<{type(value).__name__}>"


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"


def generator_state(value: Any) -> str | None:
    """A digest of a random stream's state; None: it is none."""
    if isinstance(value, torch.Generator):
        return xxhash.xxh3_64_hexdigest(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return xxhash.xxh3_64_hexdigest(repr(value.getstate()).encode())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return xxhash.xxh3_64_hexdigest(repr(value.bit_generator.state).encode())
    if isinstance(value, numpy.random.RandomState):
        return xxhash.xxh3_64_hexdigest(repr(value.get_state(legacy=False)).encode())
    return None


# --------------------------------------------------------------------------- variables of a script


def variables(frame: FrameType | None, function: Any) -> tuple[dict[str, str], dict[str, str]]:
    """(plain variables, random streams) that the script has where it calls a step, and that the
    step function itself can see: frames from the call outwards, closure, globals."""
    plain: dict[str, str] = {}
    streams: dict[str, str] = {}
    seen: set[int] = set()
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            inside = frame.f_code.co_name
            if inside == "<module>":
                seen.add(id(frame.f_globals))
            prefix = "" if inside == "<module>" else f"{inside}."
            _note(plain, streams, prefix, frame.f_locals)
        frame = frame.f_back
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        name = function.__name__
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            try:
                _note(plain, streams, f"{name}.", {variable: cell.cell_contents})
            except ValueError:
                continue  # not bound yet
        if id(function.__globals__) not in seen and not _is_library(function.__code__.co_filename):
            _note(plain, streams, f"{function.__module__}.", function.__globals__)
    return plain, streams


def globals_of_script(frame: FrameType | None) -> dict[str, Any]:
    """Of the outermost module that is the user's."""
    found: dict[str, Any] = {}
    while frame is not None:
        if frame.f_code.co_name == "<module>" and not _is_library(frame.f_code.co_filename):
            found = frame.f_globals
        frame = frame.f_back
    return found


def of_module(found: Mapping[str, Any]) -> dict[str, str]:
    plain: dict[str, str] = {}
    _note(plain, {}, "", found)
    return plain


def _note(
    plain: dict[str, str], streams: dict[str, str], prefix: str, found: Mapping[str, Any]
) -> None:
    for name, value in list(found.items()):
        if name.startswith("__") or len(plain) >= PARTS_MAX:
            continue
        _note_one(plain, streams, prefix + name, value)
        # One level into the script's own objects: a Trainer keeps its counters in attributes.
        if _is_of_script(type(value)):
            for attribute, item in _attributes(value).items():
                if not attribute.startswith("__"):
                    _note_one(plain, streams, f"{prefix}{name}.{attribute}", item)


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    found = dict(found) if type(found) is dict else {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _note_one(plain: dict[str, str], streams: dict[str, str], name: str, value: Any) -> None:
    stream = generator_state(value)
    if stream is not None:
        streams[name] = stream
    elif (text := of_plain(value)) is not None:
        plain[name] = text


def _is_of_script(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return False
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (path is not None and not _is_library(path))


_LIBRARIES = tuple(
    {
        *(f"{prefix}/lib" for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)),
        __file__.rpartition("/worker/")[0],
    }
)


def _is_library(path: str) -> bool:
    """Not written by the user: installed packages, the standard library, Keepstep itself."""
    return path.startswith(_LIBRARIES) or path.startswith("<") or "/site-packages/" in path
