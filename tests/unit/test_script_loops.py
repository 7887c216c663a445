"""Loops around a step whose place no replacement could know."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from keepstep.errors import UsageError
from keepstep.worker.script import frames, refusals

DATA = list(range(4))


def progress(items: Any) -> Iterator[Any]:
    yield from (item for item in items)


def look() -> None:
    refusals.loader_loops(frames.script_frames(), "train_step")


@pytest.mark.parametrize(
    "wrapped",
    [lambda x: x, enumerate, progress, lambda x: enumerate(progress(x), 1), lambda x: zip(x, DATA)],
)
def test_a_step_in_a_loop_over_a_loader_is_refused(wrapped: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="'train_step' is called in a loop over a DataLoader"):
        for _ in wrapped(DataLoader(DATA)):
            look()


def test_other_loops_and_loaders_that_are_not_looped_over_are_not() -> None:
    loader = DataLoader(DATA)
    first = iter(loader)
    for _ in enumerate(progress(DATA)):
        next(first)
        look()


def test_a_step_is_the_script_s_own_function_below_what_others_put_around_it() -> None:
    def step() -> None: ...

    class Step:
        def __call__(self) -> None: ...

        def method(self) -> None: ...

    def around(function: Any) -> Any:
        @functools.wraps(function)
        def inner() -> Any:
            return function()

        return inner

    code = step.__code__
    assert frames.own_code(step) is code
    assert frames.own_code(torch.no_grad()(step)) is code
    assert frames.own_code(torch.autocast("cpu")(torch.no_grad()(step))) is code
    assert frames.own_code(functools.partial(torch.no_grad()(step), 1)) is code
    assert frames.own_code(Step()) is Step.__call__.__code__
    assert frames.own_code(Step().method) is Step.method.__code__
    mine = around(step)
    assert frames.own_code(torch.no_grad()(mine)) is mine.__code__, "it has locals of its own"
    assert frames.own_code(len) is None
