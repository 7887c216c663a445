"""One random generator that a script made: read it in microseconds, set it exactly.

Carried are torch.Generator (of any device), numpy's Generator, RandomState and BitGenerator, and
random.Random. States are plain data for msgpack. What most steps leave alone must cost next to
nothing to read: words are compared in memory before a state is made of them, as in rng.py.
"""

from __future__ import annotations

import array
import ctypes
import random
import sys
from typing import Any, Final, Protocol

import torch

from keepstep.errors import UsageError
from keepstep.worker.state import codec
from keepstep.worker.state.rng import torch_state

_TWISTER_BYTES: Final = 625 * 4
_SPAWNED: Final = "keepstep/spawned"


class StreamSource(Protocol):
    kind: str

    def read(self) -> Any: ...
    def write(self, state: Any) -> None: ...


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.kind = "torch" if generator.device.type == "cpu" else f"torch-{generator.device.type}"

    def read(self) -> bytes:
        state = self._generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)

    def write(self, state: bytes) -> None:
        self._generator.set_state(torch_state(state))


class _Python:
    kind = "random"

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._where = 0
        if sys.implementation.name == "cpython":
            where = id(generator) + object.__basicsize__
            words = array.array("I", random.Random.getstate(generator)[1]).tobytes()
            if ctypes.string_at(where, _TWISTER_BYTES) == words[-4:] + words[:-4]:
                self._where = where

    def read(self) -> tuple[int, bytes, float | None]:
        if self._where:
            raw = ctypes.string_at(self._where, _TWISTER_BYTES)
            gauss: float | None = self._generator.gauss_next  # type: ignore[attr-defined]
            return random.Random.VERSION, raw[4:] + raw[:4], gauss
        version, words, gauss = random.Random.getstate(self._generator)
        return version, array.array("I", words).tobytes(), gauss

    def write(self, state: Any) -> None:
        version, words, gauss = state
        random.Random.setstate(self._generator, (version, tuple(array.array("I", words)), gauss))


class _Numpy:
    def __init__(self, generator: Any) -> None:
        numpy: Any = sys.modules["numpy"]
        self._legacy = generator if isinstance(generator, numpy.random.RandomState) else None
        self._bits = bits_of(generator)
        self.kind = f"numpy-{type(self._bits).__name__}"
        self._where = 0
        if type(self._bits) is numpy.random.MT19937:  # its state is long, and slow to read
            self._where = self._bits.ctypes.state_address
        self._seen: tuple[bytes, bytes] | None = None

    def _spawned(self) -> int:
        """Children that it has had: the next ones are seeded by their number."""
        return int(getattr(getattr(self._bits, "seed_seq", None), "n_children_spawned", 0))

    def read(self) -> bytes:
        raw = ctypes.string_at(self._where, _TWISTER_BYTES) if self._where else b""
        spawned = self._spawned()
        raw += bytes(f"{spawned}", "ascii") if raw else b""
        if raw and self._seen is not None and self._seen[0] == raw:
            return self._seen[1]
        state = self._bits.state if self._legacy is None else self._legacy.get_state(legacy=False)
        data = codec.dumps_inline({**state, _SPAWNED: spawned} if spawned else state)
        # A pending second Gaussian is not among the words: such a state is always read again.
        keep = bool(raw) and not state.get("has_gauss")
        self._seen = (raw, data) if keep else None
        return data

    def write(self, state: bytes) -> None:
        self._seen = None
        found = codec.loads_inline(state)
        missing = found.pop(_SPAWNED, 0) - self._spawned()
        if missing < 0:
            raise UsageError(
                "a numpy generator has had children (spawn) in a step that must be repeated, and "
                "would give other ones",
                hint="spawn generators before the first step, or between steps",
            )
        if missing:
            self._bits.seed_seq.spawn(missing)
        if self._legacy is not None:
            self._legacy.set_state(found)
        else:
            self._bits.state = found


def _numpy_types() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return ()
    return (numpy.Generator, numpy.RandomState, numpy.BitGenerator)


def bits_of(generator: Any) -> Any:
    """The bit generator: several of numpy's generators may share one."""
    numpy: Any = sys.modules["numpy.random"]
    if isinstance(generator, numpy.Generator):
        return generator.bit_generator
    if isinstance(generator, numpy.RandomState):
        return generator._bit_generator
    return generator


def is_plain_random(thing: Any) -> bool:
    """random.Random, or a subclass that leaves what it draws from alone."""
    kind = type(thing)
    if kind is random.Random:
        return True
    own = ("random", "seed", "getstate", "setstate", "getrandbits")
    bases = kind.__mro__[: kind.__mro__.index(random.Random)]
    return not any(name in base.__dict__ for base in bases for name in own)


def is_stream(thing: Any) -> bool:
    if isinstance(thing, torch.Generator):
        return True
    if isinstance(thing, random.Random):
        return is_plain_random(thing)
    return isinstance(thing, _numpy_types())


def near_types() -> frozenset[type]:
    """For a quick look: the usual types themselves, no subclasses."""
    return frozenset({torch.Generator, random.Random, *_numpy_types()})


def identity(stream: Any) -> int:
    """What is equal for two names of one stream."""
    return id(bits_of(stream)) if isinstance(stream, _numpy_types()) else id(stream)


def process_wide() -> set[int]:
    """Identities of the streams that rng.py carries."""
    found = {id(torch.default_generator), id(random._inst)}  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        found |= {id(generator) for generator in cuda.default_generators}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found.add(id(numpy.mtrand._rand._bit_generator))
    return found


def source(stream: Any) -> StreamSource:
    if isinstance(stream, torch.Generator):
        return _Torch(stream)
    if isinstance(stream, random.Random):
        return _Python(stream)
    return _Numpy(stream)
