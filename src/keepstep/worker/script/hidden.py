"""Generators that Keepstep sees and cannot carry: they are named before the first step.

A generator of a C extension keeps its state where Python does not reach, and one that asks the
operating system has none. Both are told by their names: there is nothing else to tell them by.
"""

from __future__ import annotations

import random
import re
import types
from typing import Any, Final

from keepstep.worker.script import graph
from keepstep.worker.script.data import is_data
from keepstep.worker.script.roots import Roots
from keepstep.worker.script.sources import is_stream

_NAME: Final = re.compile(
    r"rng|random|generator|prng|mersenne|twister|philox|sampler", re.IGNORECASE
)
_HEAP_TYPE: Final = (
    1 << 9
)  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a newer extension
_LANGUAGE: Final = (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType, type)


def hidden(roots: Roots) -> list[str]:
    """Sentences about what looks like a random generator and cannot be carried."""
    found = graph.find(roots.script, _is_hidden)
    pipelines = dict(graph.find(roots.script, is_data)) | roots.loaders
    inside = graph.find(pipelines, _is_hidden, third_party=True)
    things = {id(thing): (path, thing) for path, thing in (*inside.items(), *found.items())}
    return [_sentence(path, thing) for path, thing in things.values()]


def _is_hidden(thing: Any) -> bool:
    if isinstance(thing, random.Random):
        return not is_stream(thing)
    if is_stream(thing) or isinstance(thing, _LANGUAGE):
        return False
    kind = type(thing)
    return bool(_NAME.search(kind.__name__)) and _compiled(kind)


def _compiled(kind: type) -> bool:
    """Whether no Python code says what an object of this class holds."""
    if graph.origin(kind) == "library" and kind.__module__.partition(".")[0] != "random":
        return False
    if not kind.__flags__ & _HEAP_TYPE:
        return True
    return not any(isinstance(value, types.FunctionType) for value in vars(kind).values())


def _sentence(path: str, thing: Any) -> str:
    kind = type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(thing, random.SystemRandom):
        return (
            f"{path} ({name}) asks the operating system for random numbers, which no process can "
            "repeat: where training depends on it, results differ after a fault (hint: use "
            "random.Random with a seed)"
        )
    return (
        f"{path} ({name}) looks like a random generator whose state cannot be read: where training "
        "draws from it, a moved rank goes on with other numbers (hint: ks.register(name, save, "
        "load, per_rank=True), or a generator of torch, numpy or random)"
    )
