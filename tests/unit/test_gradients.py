"""Gradients that live longer than a step are copied, undone and carried."""

from __future__ import annotations

import torch

from keepstep.worker.state import gradients
from keepstep.worker.state.gradients import Gradients


def make() -> tuple[list[torch.nn.Parameter], Gradients]:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    return parameters, Gradients(parameters)


def backward(parameters: list[torch.nn.Parameter], watched: Gradients) -> None:
    watched.before_backward()
    sum((p * 2).sum() for p in parameters).backward()  # type: ignore[union-attr]


def test_a_gradient_that_is_alive_at_the_first_backward_is_found_again_by_a_retry() -> None:
    parameters, watched = make()
    watched.enter()
    backward(parameters, watched)
    parameters[0].grad = None  # used up
    assert parameters[1].grad is not None
    parameters[1].grad.zero_()
    watched.enter()
    backward(parameters, watched)
    assert watched.outliving == {2}
    assert set(watched.to_carry(updating=True)) == {2}
    watched.undo()
    assert parameters[0].grad is None
    assert not parameters[1].grad.any() and parameters[2].grad.tolist() == [2.0] * 3


def test_before_any_backward_a_retry_leaves_gradients_alone() -> None:
    parameters, watched = make()
    backward(parameters, watched)
    watched.enter()
    watched.undo()
    assert parameters[0].grad.tolist() == [2.0] * 3


def test_an_update_without_a_backward_uses_what_is_left() -> None:
    parameters, watched = make()
    backward(parameters, watched)
    watched.enter()
    watched.before_update()
    assert watched.outliving == {0, 1, 2}


def test_carried_gradients_arrive_in_another_process() -> None:
    parameters, watched = make()
    watched.enter()
    backward(parameters, watched)
    others, theirs = make()
    others[1].grad = torch.zeros(3)
    place = others[1].grad
    theirs.put(watched.to_carry(updating=False))
    assert others[0].grad.tolist() == [2.0] * 3 and others[1].grad is place
    assert place.tolist() == [2.0] * 3


def test_kinds() -> None:
    assert gradients.kind(None) == gradients.ABSENT
    assert gradients.kind(torch.zeros(2)) == gradients.ZERO
    assert gradients.kind(torch.tensor([0.0, 1.0])) == gradients.ALIVE
