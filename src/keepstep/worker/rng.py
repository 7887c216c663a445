"""The random number generators of this process: capture and restore, in microseconds.

Captured at the begin of every step (a retry starts from it) and again before every fence (a
newcomer continues from it), so it is on the hot path. Python's Mersenne Twister travels as 2500
raw bytes instead of a tuple of 625 integers.
"""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import torch

_WORDS = array.array("I")
assert _WORDS.itemsize == 4, "Python's generator is made of 32-bit words"


def capture() -> dict[str, Any]:
    """Only generators that exist: CUDA once initialised, numpy once imported."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, array.array("I", words).tobytes(), gauss),
    }
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        state["cuda"] = [cuda.get_rng_state(i) for i in range(cuda.device_count())]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, key, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (str(name), key.tobytes(), int(position), int(has_gauss), float(cached))
    return state


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    for index, cuda in enumerate(state.get("cuda", ())):
        torch.cuda.set_rng_state(cuda, index)
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, cached = state["numpy"]
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, cached))
