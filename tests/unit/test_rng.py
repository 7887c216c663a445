from __future__ import annotations

import random
import time
from typing import Any

import numpy
import pytest
import torch

from keepstep.worker.state import codec, rng


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        numpy.random.rand(),
        numpy.random.standard_normal(),
    )


def test_restore_repeats_all_generators() -> None:
    draw()  # leaves a cached gauss value in python's and numpy's generators
    state = rng.capture()
    first = draw()
    assert draw() != first
    rng.restore(state)
    assert draw() == first


def test_words_read_from_memory_are_those_of_getstate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rng._PYTHON_WORDS, "this interpreter lays its generator out in another way"
    for draws in (0, 1, 623, 624, 700):
        random.seed(draws)
        for _ in range(draws):
            random.random()
        fast = rng._capture_python()
        with monkeypatch.context() as slow:
            slow.setattr(rng, "_PYTHON_WORDS", 0)
            assert rng._capture_python() == fast


def test_state_survives_the_codec() -> None:
    data = codec.dumps_inline(rng.capture())
    first = draw()
    rng.restore(codec.loads_inline(data))
    assert draw() == first
    assert len(data) < 12_000


def test_capture_is_cheap_enough_for_every_step() -> None:
    rng.capture()
    best = min(_timed() for _ in range(200))
    assert best < 0.001  # 30 us on an idle core


def _timed() -> float:
    begin = time.perf_counter()
    rng.capture()
    return time.perf_counter() - begin


@pytest.mark.parametrize("theirs", [0, 2])
def test_generator_of_the_rank_goes_to_the_device_of_its_new_slot(
    theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process uses one device as a rule, and its number belongs to the slot."""
    set_states: dict[int, bytes] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda,
        "set_rng_state",
        lambda state, index: set_states.update({index: state.numpy().tobytes()}),
    )
    rng._restore_cuda([b"a", b"b", b"c"], theirs)
    assert set_states[3] == [b"a", b"b", b"c"][theirs]
    assert set_states[1] == b"b"
